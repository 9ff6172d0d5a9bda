"""Run folders under faults: concurrent processes, kills between two files, files of other runs, damage."""

import errno
import json
import math
import os
import random
import shutil
import struct
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import iresnet
from iresnet import atomic, cli, lock
from iresnet.audit import Subject, audit
from iresnet.data import DataSettings
from iresnet.presets import Experiment
from iresnet.report import page
from iresnet.run import Run, reading, resume, start
from iresnet.run.board import TensorBoard
from iresnet.run.logger import Loggers
from iresnet.run.room import FILES
from iresnet.train import checkpoint
from iresnet.train.checkpoint import Checkpoint
from tests import material
from tests.runs import copy_of, tiny, trained
from tests.test_run import same, tensors

MODEL = "model.safetensors"

#: The run that is trained fastest.
KIND = "points-density"


@pytest.fixture
def folder(tmp_path):
    return copy_of(trained(KIND), tmp_path / "run")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A run with the same settings but for the seed: its files fit, and are not the same."""
    folder = tmp_path_factory.mktemp("other") / "run"
    start(replace(tiny(KIND), seed=1), folder)
    return folder


def content(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def flip(path):
    """Change the last bit of a file, which is in its tensors."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def edited(path, **changes):
    """The same checkpoint with another state, or other groups of tensors, and a digest that agrees."""
    saved = checkpoint.load(path)
    state = {k: v for k, v in {**saved.state, **changes.pop("state", {})}.items() if v is not ...}
    checkpoint.save(Checkpoint({**saved.tensors, **changes}, state), path, version="0")


class TestOneAtATime:
    SENTENCE = "is in use: another process is training or tightening this run. Wait until it ends, or choose another"

    @pytest.mark.parametrize(
        "words",
        [
            ("train", "--resume", "--out", "{}"),
            ("certify", "{}", "--tighten"),
            ("train", "digits-hybrid", "--out", "{}"),
        ],
        ids=["resume", "tighten", "start"],
    )
    def test_a_second_process_is_refused_and_changes_nothing(self, call, folder, words):
        with lock.lock_folder(folder):
            before = content(folder)
            code, text = call(*(w.format(folder) for w in words))
            assert (code, content(folder)) == (2, before)
        assert f"iresnet: {folder} {self.SENTENCE}" in text

    def test_a_folder_that_is_being_created_is_in_use(self, call, tmp_path):
        asked = []

        def second():
            if not asked:
                asked.append(call("train", "digits-hybrid", "--out", tmp_path / "run"))
            return True

        first = start(tiny(KIND), tmp_path / "run", stop=second)
        assert first.step == 1
        assert asked[0][0] == 2
        assert self.SENTENCE in asked[0][1]
        assert Run.open(tmp_path / "run").experiment.name == KIND

    def test_reading_is_free(self, call, folder):
        with lock.lock_folder(folder):
            assert call("certify", folder)[0] == 0

    def test_the_lock_file_is_removed(self, folder):
        resume(folder)
        assert not (folder / "lock").exists()

    def test_the_lock_ends_with_a_failure(self, tmp_path):
        def crash():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            start(tiny(KIND), tmp_path / "run", stop=crash)
        assert start(tiny(KIND), tmp_path / "run", overwrite=True).finished


class TestBinding:
    """What is said of a model is shown beside that model only."""

    def test_both_files_name_the_model(self, call, folder):
        assert call("evaluate", folder, "--rows", 20, "--draws", 2)[0] == 0
        digest = checkpoint.sha256(folder / MODEL)
        for name in ("certificate.json", "evaluation.json"):
            assert json.loads((folder / name).read_text())["model_sha256"] == digest

    def test_a_report_does_not_call_other_weights_proven(self, call, folder, other):
        assert call("report", folder, "--rows", 20)[0] == 0
        page_before = (folder / "report.html").read_text()
        assert checkpoint.sha256(folder / MODEL) in page_before
        (folder / MODEL).write_bytes((other / MODEL).read_bytes())
        code, text = call("report", folder, "--rows", 20)
        assert code == 2
        assert (
            f"{folder / 'certificate.json'} describes other weights than {folder / MODEL}. "
            f"Recreate it: iresnet certify {folder}"
        ) in text.replace("\n", "")
        assert (folder / "report.html").read_text() == page_before
        assert call("certify", folder)[0] == 0
        assert call("report", folder)[0] == 0
        assert checkpoint.sha256(other / MODEL) in (folder / "report.html").read_text()

    @pytest.mark.slow
    def test_metrics_of_other_weights_are_recomputed(self, call, folder, other):
        assert call("evaluate", folder, "--rows", 20, "--draws", 2)[0] == 0
        (folder / "evaluation.json").write_text(
            json.dumps({**json.loads((folder / "evaluation.json").read_text()), "mine": 1})
        )
        for name in (MODEL, "certificate.json"):
            (folder / name).write_bytes((other / name).read_bytes())
        with pytest.raises(ValueError, match="evaluation.json describes other weights .* iresnet evaluate"):
            Run.open(folder).read_json("evaluation.json")
        code, text = call("report", folder, "--rows", 10)
        assert code == 0
        assert f"{folder / 'evaluation.json'} does not belong to these weights and will be replaced." in text
        assert "Evaluated 10 of 10,000" in text
        kept = json.loads((folder / "evaluation.json").read_text())
        assert (kept["model_sha256"], "mine" in kept) == (checkpoint.sha256(other / MODEL), False)

    @pytest.mark.parametrize("old_model", [False, True])
    @pytest.mark.parametrize("digest", [None, "", 0])
    def test_a_certificate_that_names_no_model_is_not_that_of_any(self, call, folder, old_model, digest):
        unnamed(folder / "certificate.json", digest)
        if old_model:
            without_digest(folder / MODEL)
        sentence = (
            f"{folder / 'certificate.json'} does not say which weights it describes, so nothing is proven of "
            f"{folder / MODEL}. Recreate it: iresnet certify {folder}"
        )
        assert Run.open(folder).read_current_json("certificate.json") == {}
        with pytest.raises(ValueError, match="does not say which weights it describes") as found:
            Run.open(folder).read_json("certificate.json")
        assert str(found.value) == sentence
        code, text = call("report", folder, "--rows", 20)
        assert (code, sentence in text.replace("\n", "")) == (2, True)
        assert not (folder / "report.html").exists()
        code, text = call("audit", folder)
        assert code == 1
        assert "FAILED  certificate.json does not say which weights it describes" in text

    def test_a_certificate_of_an_old_model_is_recreated_for_its_content(self, call, folder, other):
        without_digest(folder / MODEL)
        unnamed(folder / "certificate.json")
        assert call("certify", folder)[0] == 0
        assert Run.open(folder).read_json("certificate.json")["passed"] is True
        assert call("report", folder, "--rows", 20)[0] == 0
        assert "ok      certificate.json, evaluation.json match the weights" in call("audit", folder)[1]
        shutil.copyfile(other / MODEL, folder / MODEL)
        without_digest(folder / MODEL)
        with pytest.raises(ValueError, match="certificate.json describes other weights"):
            Run.open(folder).read_json("certificate.json")

    def test_metrics_of_an_old_version_are_those_of_its_model(self, folder):
        (folder / "evaluation.json").write_text('{"rows": 5}')
        without_digest(folder / MODEL)
        assert Run.open(folder).read_json("evaluation.json") == {"rows": 5}

    def test_a_certificate_that_names_no_model_is_not_given_one_while_it_is_replaced(self, folder, monkeypatch):
        unnamed(folder / "certificate.json")
        with monkeypatch.context() as patch:
            killed_before(patch, MODEL)
            with pytest.raises(Killed):
                cli.main(["certify", str(folder), "--weights", "best", "--tighten"])
        with pytest.raises(ValueError, match="certificate.json describes other weights"):
            Run.open(folder).read_json("certificate.json")

    def test_metrics_of_a_running_evaluation_name_the_weights_they_describe(self, call, folder, other, monkeypatch):
        """The model changes while it is evaluated: the metrics are those of the previous one."""
        digest = checkpoint.sha256(folder / MODEL)

        def evaluated(*_, **__):
            (folder / MODEL).write_bytes((other / MODEL).read_bytes())
            return {"split": "test", "rows": 20, "of": 20}

        monkeypatch.setattr(sys.modules["iresnet.cli.evaluate"], "evaluate_some", evaluated)
        assert call("evaluate", folder)[0] == 0
        assert json.loads((folder / "evaluation.json").read_text())["model_sha256"] == digest

    @pytest.mark.parametrize("name", ["last", "best", "model"])
    def test_one_flipped_bit_is_detected(self, call, folder, name):
        flip(folder / f"{name}.safetensors")
        words = {
            "last": ("train", "--resume", "--out", folder),
            "best": ("certify", folder, "--weights", "best"),
            "model": ("sample", folder, "-n", 1),
        }[name]
        code, text = call(*words)
        assert code == 2
        assert f"{name}.safetensors is damaged: its content does not match the SHA-256" in text
        if name == "model":
            with pytest.raises(ValueError, match="is damaged"):
                iresnet.load(folder)

    @pytest.mark.parametrize(
        ("old", "new", "why"),
        [
            ('activation = "sine"', 'activation = "elu"', "it was made with network.activation = 'sine'; got 'elu'"),
            ("lipschitz = 0.99\n", "lipschitz = 0.5\n", "it was made with network.lipschitz = 0.99; got 0.5"),
        ],
    )
    def test_settings_of_another_network_are_refused(self, folder, old, new, why):
        """Weights that fit another function are not that function's."""
        text = (folder / "config.toml").read_text()
        assert old in text
        (folder / "config.toml").write_text(text.replace(old, new))
        for load in (lambda: iresnet.load(folder), lambda: resume(folder)):
            with pytest.raises(
                ValueError, match=f"does not fit .*config.toml: {why}. Restore that value, or train again."
            ):
                load()

    @pytest.mark.parametrize("removed", range(3))
    def test_a_kill_while_a_run_is_removed_leaves_a_folder_that_is_still_a_run(self, folder, removed, monkeypatch):
        for path in folder.iterdir():
            if path.name not in ("config.toml", "schema.json", "data.json"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        plain, left = Path.unlink, iter(range(removed))

        def unlink(path, missing_ok=False):
            if path.parent == folder and path.name in FILES:
                next(left)
            plain(path, missing_ok=missing_ok)

        monkeypatch.setattr(Path, "unlink", unlink)
        with pytest.raises((StopIteration, RuntimeError)):
            start(tiny(KIND), folder)
        monkeypatch.undo()
        assert start(tiny(KIND), folder).finished

    @pytest.mark.parametrize(
        ("old", "new", "why"),
        [
            ("shift = 0\n", "shift = 2\n", "shift, flip and cutout are for images"),
            ('source = "moons"', 'source = "moon"', "there is no dataset, file or folder 'moon'"),
        ],
    )
    def test_settings_that_do_not_fit_the_data_are_named(self, folder, old, new, why):
        text = (folder / "config.toml").read_text()
        assert old in text
        (folder / "config.toml").write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=f"config.toml: .*{why}"):
            Run.open(folder).splits()

    def test_data_with_another_schema_are_named(self, tmp_path):
        folder = copy_of(trained(), tmp_path / "run")
        text = (folder / "schema.json").read_text()
        (folder / "schema.json").write_text(text.replace('"levels": 17', '"levels": 33'))
        with pytest.raises(ValueError, match="does not fit .*schema.json: it was made with schema.levels = 17; got 33"):
            iresnet.load(folder)


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A run on a table with two numbers, a category and a label."""
    return train_shop(tmp_path_factory.mktemp("shop"), "a,b,size,label", "no", "yes")


def train_shop(folder, header, *classes):
    rows = [f"{i % 7 + 0.1 * i},{(i * i) % 11 - 0.3 * i},{'sml'[i % 3]},{classes[i % 2]}" for i in range(90)]
    (folder / "shop.csv").write_text("\n".join([header, *rows, ""]))
    data = DataSettings(str(folder / "shop.csv"), label="label", kinds=("size=category",))
    start(replace(tiny("table-density"), name="shop", data=data), folder / "run")
    return folder / "run"


class TestNames:
    """The order and the names of columns, categories and classes belong to the function of a model."""

    @pytest.mark.parametrize(
        ("name", "change", "why"),
        [
            ("columns", lambda v: [v[1], v[0], *v[2:]], "schema.columns = ['a', 'b', 'size']; got ['b', 'a', 'size']"),
            ("columns", lambda _: [], "schema.columns = ['a', 'b', 'size']; got []"),
            ("classes", lambda v: v[::-1], "schema.classes = ['no', 'yes']; got ['yes', 'no']"),
            ("kinds", lambda v: regrouped(v, "lsm"), "['l', 'm', 's']}]; got "),
            ("kinds", lambda v: regrouped(v, "lmsabcd"), "schema.kinds = "),
        ],
        ids=["swapped", "unnamed", "reversed", "reordered", "more"],
    )
    def test_an_edited_schema_is_refused(self, shop, tmp_path, name, change, why):
        folder = copy_of(shop, tmp_path / "run")
        known = json.loads((folder / "schema.json").read_text())
        known[name] = change(known[name])
        (folder / "schema.json").write_text(json.dumps(known))
        with pytest.raises(ValueError, match="model.safetensors does not fit .*schema.json: it was made with") as found:
            iresnet.load(folder)
        assert why in str(found.value)
        assert str(found.value).endswith("Restore that value, or train again.")
        made, got = str(found.value).split(" = ")[1].split(". Restore")[0].split("; got ")
        assert made != got  # long values are cut where they differ

    def test_the_model_of_a_table_with_other_names_is_refused(self, call, shop, tmp_path):
        folder = train_shop(tmp_path, "b,a,size,label", "bad", "good")
        for name in (MODEL, "certificate.json"):
            (folder / name).write_bytes((shop / name).read_bytes())
        with pytest.raises(ValueError, match="schema.json: it was made with schema.columns"):
            iresnet.load(folder)
        for command in ("report", "certify"):
            code, text = call(command, folder)
            assert (code, "made with schema.columns" in text, "proven" in text) == (2, True, False)
        found = {finding.name: finding for finding in audit(Subject(Run.open(folder)))}
        assert found["weights"].holds is False
        assert "made with schema.columns" in found["weights"].words

    def test_a_file_without_these_names_is_read_as_before(self, shop, tmp_path):
        folder = copy_of(shop, tmp_path / "run")
        made = dict(checkpoint.load(folder / MODEL).state["made_with"])
        del made["schema.columns"], made["schema.classes"]
        edited(folder / MODEL, state={"made_with": made | {"schema.kinds": ["real", "real", "category"]}})
        iresnet.load(folder)
        edited(folder / MODEL, state={"made_with": made | {"schema.kinds": ["real", "positive", "category"]}})
        with pytest.raises(ValueError, match="does not fit .*schema.json: it was made with schema.kinds"):
            iresnet.load(folder)


def regrouped(kinds, names):
    """The same kinds with other names of the category."""
    kind = kinds[-1]
    return [*kinds[:-1], kind | {"upper": len(names) - 1.0, "categories": list(names)}]


def unnamed(path, digest=None):
    """A certificate that names no weights, as old versions wrote it."""
    known = json.loads(path.read_text())
    del known["model_sha256"]
    path.write_text(json.dumps(known if digest is None else known | {"model_sha256": digest}))


def without_digest(path):
    """A file as it was written before there were digests."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    ours = json.loads(header["__metadata__"]["iresnet"])
    del ours["sha256"]
    header["__metadata__"]["iresnet"] = json.dumps(ours)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


class Killed(BaseException):
    """What a kill looks like from within: nothing catches it."""


def killed_before(monkeypatch, name):
    """The process ends where it is about to write a file of this name."""
    plain = atomic.write

    def write(path, content):
        if Path(path).name == name:
            raise Killed
        return plain(path, content)

    monkeypatch.setattr(atomic, "write", write)


class TestKills:
    def test_between_model_and_certificate(self, call, folder, monkeypatch):
        before = json.loads((folder / "certificate.json").read_text())
        (folder / MODEL).unlink()
        (folder / "certificate.json").unlink()
        with monkeypatch.context() as patch:
            killed_before(patch, "certificate.json")
            with pytest.raises(Killed):
                resume(folder)
        assert (folder / MODEL).is_file()
        assert not (folder / "certificate.json").exists()
        code, text = call("train", "--resume", "--out", folder)
        assert code == 0
        assert "Invertible: proven" in text
        assert json.loads((folder / "certificate.json").read_text()) == before

    def test_between_another_model_and_its_certificate(self, folder, other):
        (folder / "certificate.json").write_bytes((other / "certificate.json").read_bytes())
        assert resume(folder).certificate.passed
        assert json.loads((folder / "certificate.json").read_text())["model_sha256"] == Run.open(folder).sha256()

    @pytest.mark.parametrize("name", [MODEL, pytest.param("certificate.json", marks=pytest.mark.slow)])
    def test_while_it_is_tightened(self, call, folder, name, monkeypatch):
        """Before the new model is there, all is as it was; after it, nothing passes for what it is not."""
        assert call("report", folder, "--rows", 20)[0] == 0
        spoil(folder)
        assert call("certify", folder)[0] == 1
        assert call("report", folder, "--rows", 20)[0] == 0
        before = content(folder)
        with monkeypatch.context() as patch:
            killed_before(patch, name)
            with pytest.raises(Killed):
                cli.main(["certify", str(folder), "--tighten"])
        run = Run.open(folder)
        assert set(content(folder)) - {"lock"} == set(before)
        if name == MODEL:
            assert content(folder) == before
        else:
            for file in ("certificate.json", "evaluation.json"):
                with pytest.raises(ValueError, match=f"{file} describes other weights"):
                    run.read_json(file)
        assert call("certify", folder, "--tighten")[0] == 0
        assert run.read_json("certificate.json")["passed"] is True
        assert not (folder / "report.html").exists() or name != MODEL

    def test_metrics_without_a_digest_do_not_outlive_their_model(self, call, folder, monkeypatch):
        (folder / "evaluation.json").write_text('{"rows": 5}')
        with monkeypatch.context() as patch:
            killed_before(patch, "certificate.json")
            with pytest.raises(Killed):
                cli.main(["certify", str(folder), "--weights", "best", "--tighten"])
        spoil(folder)
        with pytest.raises(ValueError, match="evaluation.json describes other weights"):
            Run.open(folder).read_json("evaluation.json")


def spoil(folder):
    """Weights beyond their bounds, which tightening brings back."""
    saved = checkpoint.load(folder / MODEL)
    grown = {".original": 50.0, ".gradient": 0.98}  # sigma is <W, G>, so every norm is a little more than it seems
    weights = {
        k: grown[k[k.rfind(".") :]] * v if k.endswith(tuple(grown)) else v for k, v in saved.tensors["weights"].items()
    }
    edited(folder / MODEL, weights=weights)


class TestTensors:
    def test_weights_that_are_not_finite_are_not_loaded(self, folder):
        weights = dict(checkpoint.load(folder / MODEL).tensors["weights"])
        name = next(n for n in weights if n.endswith("original"))
        edited(folder / MODEL, weights={**weights, name: weights[name] * math.nan})
        with pytest.raises(ValueError, match=f"model.safetensors is damaged: weights/{name} has values that are not"):
            iresnet.load(folder)

    def test_integer_weights_are_not_loaded(self, folder):
        weights = dict(checkpoint.load(folder / MODEL).tensors["weights"])
        name = next(n for n in weights if n.endswith("original"))
        edited(folder / MODEL, weights={**weights, name: weights[name].view(torch.int32)})
        with pytest.raises(ValueError, match=f"does not fit .*config.toml: weights/{name} must be float32; got int32"):
            iresnet.load(folder)

    def test_half_precision_is_widened(self, folder):
        weights = dict(checkpoint.load(folder / MODEL).tensors["weights"])
        name = next(n for n in weights if n.endswith("original"))
        edited(folder / MODEL, weights={**weights, name: weights[name].half()})
        assert dict(iresnet.load(folder).named_parameters())[name].dtype == torch.float32

    def test_optimiser_state_of_another_shape_is_refused_on_resume(self, call, folder):
        """Fused AdamW would write beyond them."""
        (folder / MODEL).unlink()
        moments = dict(checkpoint.load(folder / "last.safetensors").tensors["optimiser"])
        edited(folder / "last.safetensors", optimiser={**moments, "0.exp_avg": torch.zeros(1)}, state={"step": 3})
        before = content(folder)
        code, text = call("train", "--resume", "--out", folder)
        assert code == 2
        assert "last.safetensors does not fit this model: optimiser/0.exp_avg must have shape" in text
        assert content(folder) == before

    @pytest.mark.parametrize("values", [torch.zeros(0), torch.zeros(3, 1), torch.tensor([math.nan]), torch.arange(3)])
    def test_invalid_likelihoods_are_refused(self, folder, values):
        edited(folder / MODEL, reference={"log_likelihood": values})
        with pytest.raises(ValueError, match=r"model.safetensors .*: reference/log_likelihood (must|has values)"):
            Run.open(folder).reference()

    @pytest.mark.parametrize(
        ("name", "state", "why"),
        [
            ("last", {"step": ...}, "step is missing"),
            ("last", {"step": [1]}, r"step must be a number; got \[1\]"),
            ("last", {"seconds": "long"}, "seconds must be a number; got 'long'"),
            ("best", {"step": ...}, "step is missing"),
            ("best", {"validation nats": "few"}, "validation nats must be a number; got 'few'"),
            ("model", {"tightened": "all"}, "tightened must be a list of layer names; got 'all'"),
            ("model", {"tightened": [1]}, r"tightened must be a list of layer names; got \[1\]"),
        ],
    )
    def test_invalid_states_are_refused(self, call, folder, name, state, why):
        edited(folder / f"{name}.safetensors", state=state)
        code, text = call("train", "--resume", "--out", folder)
        assert code == 2
        assert "\n" not in text.strip()
        with pytest.raises(ValueError, match=f"{name}.safetensors is damaged: {why}. Restore it, or train again."):
            raise ValueError(text)


def use(board):
    for step in (1, 2, 3):
        board.log({"step": step, "loss": 1.0})
    board.end(None)
    board.end(None)


class TestBoard:
    """TensorBoard's file is only a copy, so its failures must not stop training."""

    def test_a_folder_that_is_moved(self, tmp_path):
        pytest.importorskip("tensorboard")
        moved, hook = [], threading.excepthook

        def stop():
            if not moved:
                (tmp_path / "run" / "tensorboard").rename(tmp_path / "elsewhere")
                moved.append(True)
            return False

        calls = iter(range(100))
        experiment = tiny(KIND, steps=40, validate_every=40, save_every=10)
        with pytest.warns(UserWarning, match="cannot log to TensorBoard's file in .*: .* continues without") as seen:
            outcome = start(experiment, tmp_path / "run", stop=lambda: next(calls) > 15 and stop())
        assert outcome.finished
        assert len(seen) == 1
        assert threading.excepthook is hook

    @pytest.mark.parametrize("method", ["__init__", "add_scalar", "close"])
    def test_a_full_disk(self, tmp_path, monkeypatch, method):
        class Full:
            def __init__(self, *_, **__):
                self.fail("__init__")

            def add_scalar(self, *_):
                self.fail("add_scalar")

            def close(self):
                self.fail("close")

            def fail(self, name):
                if name == method:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        board = TensorBoard(tmp_path)
        board.make = Full
        with pytest.warns(UserWarning, match="cannot log to .*: No space left on device. Training continues") as seen:
            use(Loggers([board]))
        assert len(seen) == 1

    def test_exceptions_of_other_threads_are_still_reported(self, tmp_path, monkeypatch):
        pytest.importorskip("tensorboard")
        told = []
        monkeypatch.setattr(threading, "excepthook", told.append)
        board = TensorBoard(tmp_path)
        board.log(1, {"loss": 1.0})
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        board.end(None)
        assert [failure.exc_type for failure in told] == [ZeroDivisionError]

    @pytest.mark.parametrize("late", [False, True])
    def test_a_thread_that_fails_while_the_file_is_opened_is_not_reported_twice(self, tmp_path, monkeypatch, late):
        """Also where it fails after the writer has given up."""
        told, threads, go = [], [], threading.Event()
        monkeypatch.setattr(threading, "excepthook", told.append)

        def make(*_, **__):
            threads.append(threading.Thread(target=lambda: (go.wait(), 1 / 0)))
            threads[0].start()
            if late:  # it fails while it is waited for, after the writer has given up
                threads[0].join = lambda timeout=None: (go.set(), threading.Thread.join(threads[0], timeout))
            else:
                go.set()
                threads[0].join()
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

        board = TensorBoard(tmp_path)
        board.make = make
        with pytest.warns(UserWarning, match="cannot log to .*: No such file or directory"):
            Loggers([board]).log({"step": 1, "loss": 1.0})
        assert go.is_set()
        assert not threads[0].is_alive()
        assert told == []

    def test_without_a_failure_there_is_no_warning(self, tmp_path):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            use(Loggers([TensorBoard(tmp_path)]))


class TestLearningRate:
    """After divergence the remedy is a lower learning rate, and it needs no new run."""

    @pytest.fixture
    def stopped(self, tmp_path):
        calls = iter(range(100))
        start(tiny(KIND, steps=6), tmp_path / "run", stop=lambda: next(calls) == 2)
        return tmp_path / "run"

    def test_a_new_learning_rate_is_used_and_recorded(self, call, stopped):
        before = Run.open(stopped).experiment
        code, text = call("train", "--resume", "--out", stopped, "--set", "learning_rate=1e-5")
        assert code == 0, text
        after = Run.open(stopped)
        changed = replace(before, training=replace(before.training, learning_rate=1e-5))
        assert after.experiment == changed
        note = f"training.learning_rate 1e-05 from step 3, {before.training.learning_rate:g} before"
        assert f"\n# {note}\n" in (stopped / "config.toml").read_text()
        assert after.read_json("environment.json")["changes"] == [note]
        assert [row["learning_rate"] for row in after.log()] == pytest.approx(
            [before.training.learning_rate_at(2), changed.training.learning_rate_at(5)], rel=1e-6
        )
        assert call("report", stopped, "--rows", 20)[0] == 0
        assert note in (stopped / "report.html").read_text()

    def test_two_changes_are_both_recorded(self, stopped):
        for rate in (1e-4, 1e-4, 1e-5):  # the same again is no change
            resume(stopped, learning_rate=rate, stop=lambda: True)
        assert len(Run.open(stopped).changes()) == 2
        assert resume(stopped).finished
        assert Run.open(stopped).experiment.training.learning_rate == 1e-5

    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            (("--set", "steps=9"), "keeps its settings except training.learning_rate; got --set steps=9. Leave that"),
            (("--set", "learning_rate=1e-4", "--set", "clip=2"), "got --set clip=2. Leave that out, or start a"),
            (("--set", "learning_rate=-1"), "learning_rate must be positive; got -1.0"),
            (("--set", "learning_rate=slow"), "training.learning_rate must be a number; got 'slow'"),
            (("--seed", "3"), "a resumed run keeps its settings; got --seed. Leave that out, or start a new run."),
        ],
    )
    def test_nothing_else_may_change(self, call, stopped, words, sentence):
        before = content(stopped)
        code, text = call("train", "--resume", "--out", stopped, *words)
        assert (code, content(stopped)) == (2, before)
        assert sentence in text

    def test_a_finished_run_refuses_a_new_learning_rate(self, call, folder):
        before = content(folder)
        code, text = call("train", "--resume", "--out", folder, "--set", "learning_rate=1e-4")
        assert (code, content(folder)) == (2, before)
        assert "is finished, so its learning rate cannot change. Start a new run with another --out." in text

    def test_the_advice_after_divergence_works(self, call, tmp_path):
        words = ("--set", "width=4", "--set", "blocks=[1]", "--set", "terms=2", "--set", "batch=16")
        words += ("--set", "steps=30", "--set", "save_every=1", "--set", "warmup=0", "--set", "average=0.5")
        # Without a warmup weights grow by the rate at every step, and their squares overflow after some.
        code, text = call("train", "points-density", *words, "--set", "learning_rate=1e18", "--out", tmp_path / "run")
        assert code == 1
        advice = f"iresnet train --resume --out {tmp_path / 'run'} --set training.learning_rate=5e+17"
        assert advice in text.replace("\n", "")


class TestDamage:
    """Whatever a file of a run folder holds, it is read, or a one-line error names it."""

    @pytest.mark.parametrize("name", ["config.toml", "log.csv", "evaluation.json", "certificate.json", "schema.json"])
    def test_a_file_that_is_not_text_is_refused(self, call, folder, name):
        (folder / "evaluation.json").touch()
        (folder / name).write_bytes(b"\xff\xfe" + (folder / name).read_bytes())
        code, text = call("report", folder)
        assert code == 2
        assert text.startswith(f"iresnet: {folder / name} ")

    @pytest.mark.parametrize("name", ["evaluation.json", "certificate.json", "environment.json", "schema.json"])
    @pytest.mark.parametrize("depth", [40, 100_000])
    def test_a_file_that_is_nested_too_deeply_is_refused(self, call, folder, name, depth):
        (folder / name).write_text('{"a":' * depth + "1" + "}" * depth)
        code, text = call("report", folder)
        assert code == 2
        assert str(folder / name) in text

    def test_damage_to_the_log_is_named_on_resume(self, tmp_path):
        calls = iter(range(100))
        start(tiny(KIND), tmp_path / "run", stop=lambda: next(calls) == 2)
        whole = (tmp_path / "run" / "log.csv").read_bytes()
        for damage in (b"\xff\n", b"x" + b"," * whole.splitlines()[0].count(b",") + b"\n"):
            (tmp_path / "run" / "log.csv").write_bytes(whole + damage)
            with pytest.raises(ValueError, match="log.csv is damaged: .* Remove it, and resume."):
                resume(tmp_path / "run")
        (tmp_path / "run" / "log.csv").unlink()
        assert resume(tmp_path / "run").finished

    @pytest.mark.parametrize("cell", ["nan", "-1", "1e308", "1e999", "", "x"])
    def test_an_invalid_step_in_the_log_is_named(self, tmp_path, cell):
        (tmp_path / "log.csv").write_text(f"step,loss\n1,2\n{cell},3\n")
        with pytest.raises(ValueError, match=r"log.csv is damaged: .*Remove it; the model does not need it."):
            reading.read_log(tmp_path / "log.csv")

    def test_a_diverged_run_is_plotted_as_far_as_possible(self, tmp_path):
        values = ["1e308", "-1e308", "nan", "inf", "", "1e299", "5e-324", "1e308", "2"]
        lines = [f"{10 * i},{v}" for i, v in enumerate(values * 100)]
        (tmp_path / "log.csv").write_text("\n".join(["step,loss", *lines, ""]))
        assert "loss" in page(replace(plain(), log=reading.read_log(tmp_path / "log.csv")))


def plain():
    """Material for a page of numbers alone, with everything that evaluation.json can hold."""
    whole = material.digits()
    more = {"robustness": [material.ROBUST], "probe": material.PROBE, "anomalies": [{"name": "a", "detection": 0.5}]}
    nothing = {"samples": None, "data": None, "reconstruction": None, "interpolation": None}
    return replace(whole, evaluation={**whole.evaluation, **more}, log=[], anomalies=[], spectra=[], **nothing)


def places(content, at=()):
    yield at
    members = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(members)[:12]:
        yield from places(value, (*at, key))


def put(content, at, value):
    if not at:
        return value
    if isinstance(content, dict):
        return {**content, at[0]: put(content[at[0]], at[1:], value)}
    return [put(v, at[1:], value) if i == at[0] else v for i, v in enumerate(content)]


VALUES: tuple[object, ...] = (
    None, True, 0, -1, 2, 10**30, 10**400, 0.5, 1e308, -1e308, 1e-320, math.nan, math.inf, "", "x", "proven", [], [1],
    [[1]], [None], {}, {"a": 1}, [{}], [None, 1], ["a", "b"], [[1, 2], [3]],
)  # fmt: skip


@pytest.mark.parametrize("name", ["evaluation.json", "certificate.json", "environment.json"])
def test_any_value_anywhere_gives_a_page_or_a_clear_error(name, tmp_path):
    """A sample of all places times all values; what is refused names the file, in one line."""
    whole = plain()
    known, refused = getattr(whole, name.removesuffix(".json")), 0
    cases = [(at, value) for at in places(known) for value in VALUES]
    for at, value in random.Random(0).sample(cases, 250):
        (tmp_path / name).write_text(json.dumps(put(known, at, value)))
        if (why := refusal(tmp_path / name)) is None:
            page(replace(whole, **{name.removesuffix(".json"): reading.read_json_object(tmp_path / name)}))
        else:
            assert why.startswith(f"{tmp_path / name} is damaged: ")
            assert "\n" not in why
            refused += 1
    assert 0 < refused < 250 or name == "environment.json"


def refusal(path):
    try:
        reading.read_json_object(path)
    except ValueError as error:
        return str(error)
    return None


class TestSeeds:
    @pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 10**30])
    def test_seeds_beyond_64_bits_leave_no_folder(self, call, tmp_path, seed):
        code, text = call("train", "points-density", "--seed", seed, "--out", tmp_path / "run")
        assert code == 2
        assert text == f"iresnet: seed must fit 64 bits; got {seed}.\n"
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("words", [("sample", "{}"), ("report", "{}"), ("interpolate", "{}"), ("demo",)], ids=str)
    def test_seeds_beyond_64_bits_are_refused_by_every_command(self, call, folder, words):
        code, text = call(*(w.format(folder) for w in words), "--seed", 2**64)
        assert code == 2
        assert "seed must fit 64 bits" in text

    @pytest.mark.parametrize("seed", [2**63 - 1, -(2**63)])
    def test_seeds_of_64_bits_are_accepted(self, seed):
        assert torch.Generator().manual_seed(Experiment(seed=seed).seed)


def test_a_resumed_run_has_the_digests_of_an_undisturbed_one(tmp_path):
    experiment, calls = tiny(KIND, steps=4, validate_every=2, save_every=2), iter(range(100))
    start(experiment, tmp_path / "whole")
    start(experiment, tmp_path / "parts", stop=lambda: next(calls) == 1)
    resume(tmp_path / "parts")
    for name in ("best.safetensors", MODEL):
        assert checkpoint.sha256(tmp_path / "whole" / name) == checkpoint.sha256(tmp_path / "parts" / name)
    assert same(tensors(tmp_path / "whole" / "last.safetensors"), tensors(tmp_path / "parts" / "last.safetensors"))
    assert (tmp_path / "whole" / "certificate.json").read_bytes() == (
        tmp_path / "parts" / "certificate.json"
    ).read_bytes()
