"""The command in scripts: --json, --quiet, --threads, the data folder in the environment, shell completion."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from iresnet import atomic, certify
from iresnet.cli.completion import complete_data, complete_preset, complete_run, complete_tracker, complete_training
from iresnet.data.download import ENVIRONMENT, search_folders
from iresnet.presets import PRESETS
from iresnet.run import Run
from tests.runs import copy_of, trained

TINY = ("--set", "network.width=4", "--set", "blocks=[1, 1]", "--set", "steps=2", "--set", "batch=16")

#: Words of a command that takes a run folder, and keys of its JSON object.
WITH_RUN = [
    (("evaluate", "--rows", 20), {"split", "rows", "of", "error", "density", "inverse", "run", "file"}),
    (("sample", "-n", 2), {"samples", "seconds", "file", "plot"}),
    (("invert", "-n", 2), {"rows", "proven", "largest_block_bound", "code_residual", "measured_error", "files"}),
    (("interpolate", "--pairs", 1, "--steps", 2), {"pairs", "steps", "file", "plot"}),
    (("certify",), {"passed", "summary", "blocks", "run", "weights"}),
    (("export",), {"files"}),
]
WITHOUT_RUN = [
    (("presets",), {"presets", "models"}),
    (("presets", "digits-hybrid"), {"name", "data", "network", "objective", "training"}),
    (("data", "list"), {"datasets", "folder"}),
    (("data", "verify"), {"files"}),
    (("reproduce",), {"results"}),
]


@pytest.fixture
def folder(tmp_path):
    return copy_of(trained(), tmp_path / "a run")


@pytest.fixture
def split_call(capsys):
    """Run the command; return its exit code, its standard output and its standard error."""
    from iresnet import cli

    def run(*words):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main([str(w) for w in words])
        return stop.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(("words", "keys"), WITH_RUN, ids=lambda value: value[0] if isinstance(value, tuple) else "")
def test_json_is_one_object(split_call, folder, words, keys):
    code, out, _ = split_call(words[0], folder, *words[1:], "--json")
    assert code == 0
    assert keys <= json.loads(out).keys()  # which refuses a second object, or any other text
    assert out.count("\n") == 1


@pytest.mark.parametrize(("words", "keys"), WITHOUT_RUN)
def test_json_of_commands_without_a_run(split_call, words, keys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = split_call(*words, "--json")
    assert code == 0
    assert keys <= json.loads(out).keys()


def test_json_and_quiet_of_a_training(split_call, tmp_path):
    code, out, err = split_call("train", "digits", *TINY, "--out", tmp_path / "a", "--json")
    content = json.loads(out)
    assert (code, content["finished"], content["step"], content["certified"]) == (0, True, 2, True)
    assert content["best"]["step"] == 2
    assert "digits is a dataset" in err
    assert "Next: iresnet evaluate" in err
    code, out, err = split_call("train", "digits", *TINY, "--out", tmp_path / "b", "--quiet")
    assert (code, err) == (0, "")
    assert out.startswith("Trained 2 steps")
    assert "Next" not in out
    assert "digits is a dataset" not in out


def test_json_of_scores_are_their_rows(split_call, folder):
    code, out, _ = split_call("score", folder, "digits", "--draws", 2, "--json")
    content = json.loads(out)
    assert code == 0
    assert content["columns"][:2] == ["row", "log_likelihood"]
    assert len(content["rows"]) == 360
    assert all(len(row) == len(content["columns"]) for row in content["rows"])


def test_quiet_leaves_the_result(split_call, folder):
    _, whole, _ = split_call("certify", folder)
    assert split_call("certify", folder, "--quiet") == (0, whole, "")
    code, out, err = split_call("evaluate", folder, "--rows", 20, "--quiet")
    assert (code, err) == (0, "")
    assert "density" in out
    assert "Metrics in" not in out


def test_an_error_with_json_is_a_sentence_on_stderr(split_call, tmp_path):
    code, out, err = split_call("evaluate", tmp_path / "none", "--json", "--quiet")
    assert (code, out) == (2, "")
    assert err.startswith("iresnet: ")


def test_a_failed_check_prints_its_result_and_the_error(split_call, folder):
    code, out, err = split_call("certify", folder, "--weights", "best", "--json")
    assert json.loads(out)["passed"] is (code == 0)
    assert ("iresnet: the certificate does not pass" in err) is (code == 1)


@pytest.mark.parametrize("words", [("certify",), ("export",), ("sample", "-n", 1), ("audit", "--seconds", 0.01)])
def test_threads(split_call, folder, words, monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    split_call(words[0], folder, *words[1:], "--threads", 3)
    assert seen == [3]
    assert split_call(words[0], folder, "--threads", 0)[0] == 2


def test_every_command_has_the_common_options(call):
    from iresnet.cli import app

    for command in (*app.registered_commands, *app.registered_groups[0].typer_instance.registered_commands):
        assert {"json", "quiet", "threads"} <= set(command.callback.__annotations__)


class TestDataFolder:
    def test_is_searched_after_the_given_one(self, monkeypatch, tmp_path):
        before = search_folders("mnist", "mine")
        monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
        after = search_folders("mnist", "mine")
        assert after[: len(before)] == before
        assert tmp_path / "mnist" in after[len(before) :]

    def test_is_the_default_of_the_data_commands(self, monkeypatch, tmp_path, split_call):
        monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
        assert json.loads(split_call("data", "list", "--json")[1])["folder"] == str(tmp_path)

    def test_is_named_if_a_dataset_is_missing(self, monkeypatch, tmp_path, split_call):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "shared"))
        code, _, err = split_call("train", "mnist-classifier")
        assert code == 2
        assert str(tmp_path / "shared" / "mnist") in err


class TestCompletion:
    def test_of_presets(self):
        assert complete_preset("digits-h") == ["digits-hybrid"]
        assert complete_preset("") == list(PRESETS)

    def test_of_trackers(self):
        assert complete_tracker("w") == ["wandb"]

    def test_of_datasets_files_and_folders(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "mnist.csv").touch()
        (tmp_path / "mnist folder").mkdir()
        (tmp_path / ".hidden").touch()
        assert complete_data("mni") == ["mnist", "mnist folder/", "mnist.csv"]
        assert complete_training("moo") == ["moons"]
        assert ".hidden" not in complete_data("")

    def test_of_run_folders(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        copy_of(trained(), tmp_path / "runs" / "first")
        (tmp_path / "runs" / "notes.txt").touch()
        assert complete_run("runs/f") == ["runs/first"]
        assert complete_run("mnist-c") == ["mnist-classifier"]
        assert complete_run("ru") == ["runs/", "runs/first"]

    def test_in_the_shell(self):
        """bash asks the command itself, through the environment."""
        variables = {"_IRESNET_COMPLETE": "complete_bash", "COMP_WORDS": "iresnet presets digits-h", "COMP_CWORD": "2"}
        words = [sys.executable, "-m", "iresnet"]
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **variables}, check=False)
        assert done.stdout.strip() == "digits-hybrid"

    def test_the_script_can_be_shown(self, split_call, monkeypatch):
        monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
        code, out, _ = split_call("--show-completion", "bash")
        assert code == 0
        assert "_IRESNET_COMPLETE=complete_bash" in out


class TestReadOnly:
    """A run folder in which nothing can be written. (These tests may run as root, who can write everywhere.)"""

    @pytest.fixture(autouse=True)
    def read_only(self, folder, monkeypatch):
        reserve = atomic._reserve

        def refuse(target):
            if target.parent == folder:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return reserve(target)

        (folder / "evaluation.json").unlink(missing_ok=True)
        monkeypatch.setattr(atomic, "_reserve", refuse)

    @pytest.mark.parametrize(("words", "keys"), [WITH_RUN[0], WITH_RUN[4]], ids=["evaluate", "certify"])
    def test_the_result_is_printed_and_the_exit_code_is_2(self, split_call, folder, words, keys):
        before = {path: path.read_bytes() for path in folder.glob("*.*")}
        code, out, err = split_call(words[0], folder, *words[1:], "--json")
        assert code == 2
        assert keys <= json.loads(out).keys()
        assert json.loads(out).get("file") is None
        why = f"iresnet: the result is not saved, since {folder} cannot be written: Read-only file system. Free disk"
        assert why in err
        code, out, err = split_call(*words[:1], folder, *words[1:])
        assert code == 2
        assert ("Invertible: proven" if words[0] == "certify" else "density") in out
        assert why in err
        assert {path: path.read_bytes() for path in folder.glob("*.*")} == before

    def test_a_certificate_that_does_not_pass_still_exits_with_1(self, split_call, folder, monkeypatch):
        failed = replace(certify(Run.open(folder).model(), (1, 8, 8)), unknown=("a layer",))
        monkeypatch.setattr(sys.modules["iresnet.cli.certify"], "prove", lambda *_: failed)
        code, _, err = split_call("certify", folder)
        assert code == 1
        assert "the certificate does not pass." in err
        assert "the result is not saved" in err

    def test_a_report_elsewhere(self, split_call, folder, tmp_path):
        code, out, _ = split_call("report", folder, "--rows", 20, "--out", tmp_path / "page.html")
        assert code == 0
        assert "The metrics are in the page alone: the result is not saved" in out
        assert "20" in (tmp_path / "page.html").read_text()
