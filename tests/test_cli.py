"""The command line: what it prints, what it writes, and one sentence for every error."""

import csv
import importlib
import io
import json
import re
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from iresnet import __version__, certify, cli
from iresnet.cli.console import Mode, console, table, use_mode, waiting
from iresnet.cli.score import _columns
from iresnet.cli.train import finish
from iresnet.data import DataSettings
from iresnet.device import choose_device
from iresnet.inverse import decoder
from iresnet.presets import PRESETS
from iresnet.progress import each, phase
from iresnet.run import FitResult, Run, Scorer, start
from iresnet.run.progress import progress, reporter
from iresnet.train import checkpoint
from tests.runs import copy_of, tiny, trained

COMMANDS = (
    "train", "evaluate", "sample", "invert", "interpolate", "certify", "audit", "score", "report", "export", "presets",
    "demo", "data list", "data download", "data verify",
)  # fmt: skip


def packed():
    file = io.BytesIO()
    np.savez_compressed(file, a=np.zeros((2, 64)))
    return file.getvalue()


@pytest.fixture
def folder(tmp_path):
    return copy_of(trained(), tmp_path / "run")


def rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def _without_proof(found, changes):
    """The result of `reconstruct` or `solve_codes`, not proven."""
    return (replace(found[0], **changes), found[1]) if isinstance(found, tuple) else replace(found, **changes)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command, call):
    code, text = call(*command.split(), "--help")
    assert code == 0
    assert "Example" in text


def test_version(call):
    assert call("--version") == (0, f"iresnet {__version__}\n")


def test_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "iresnet", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"iresnet {__version__}\n"


def test_presets_are_listed(call):
    code, text = call("presets")
    assert code == 0
    assert all(name in text for name in PRESETS)


class TestTrain:
    SMALL = ("--set", "network.width=4", "--set", "blocks=[1, 1]", "--set", "terms=2", "--set", "batch=16")

    def test_from_a_preset(self, call, tmp_path):
        code, text = call("train", "digits-hybrid", *self.SMALL, "--set", "steps=3", "--out", tmp_path / "a")
        assert code == 0
        assert "Invertible: proven. 2 of 2 blocks proven contractive" in text
        assert f"iresnet evaluate {tmp_path / 'a'}" in text.replace("\n", "")
        assert Run.open(tmp_path / "a").experiment.network.width == 4

    def test_from_the_toml_that_presets_prints(self, call, tmp_path):
        _, text = call("presets", "digits-hybrid")
        (tmp_path / "mine.toml").write_text(text)
        words = (*self.SMALL, "--set", "steps=2", "--seed", "5", "--out", tmp_path / "b")
        assert call("train", tmp_path / "mine.toml", *words)[0] == 0
        assert Run.open(tmp_path / "b").experiment.seed == 5

    def test_on_a_csv_file(self, call, tmp_path):
        rng = np.random.default_rng(0)
        lines = [f"{a:.4f},{b:.4f},{'cat' if a > 0 else 'dog'}" for a, b in rng.normal(size=(200, 2))]
        (tmp_path / "t.csv").write_text("\n".join(["height,weight,kind", *lines]) + "\n")
        words = ("--set", "width=4", "--set", "blocks=[1]", "--set", "steps=3", "--out", tmp_path / "c")
        assert call("train", "table-hybrid", "--data", tmp_path / "t.csv", "--label", "kind", *words)[0] == 0
        schema = Run.open(tmp_path / "c").schema
        assert (schema.columns, schema.classes) == (("height", "weight"), ("cat", "dog"))
        code, text = call("score", tmp_path / "c", tmp_path / "t.csv")
        assert code == 0
        assert {r["class"] for r in rows(text)} <= {"cat", "dog"}
        assert call("sample", tmp_path / "c", "-n", 10)[0] == 0
        assert (tmp_path / "c" / "samples.csv").read_text().startswith("height,weight\n")
        assert call("report", tmp_path / "c")[0] == 0

    def test_resume(self, call, tmp_path):
        words = ("digits-hybrid", "--preset", "digits-hybrid")  # twice the same is once
        code, _ = call("train", *words, *self.SMALL, "--set", "steps=2", "--out", tmp_path / "d")
        assert code == 0
        assert call("train", "--resume", "--out", tmp_path / "d")[0] == 0

    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            (("digits-hybird",), "unknown preset 'digits-hybird'. Did you mean 'digits-hybrid'?"),
            (("--preset", "digits-hybird"), "unknown preset 'digits-hybird'. Did you mean 'digits-hybrid'?"),
            (("digits-hybrid", "--preset", "digits-glow"), "got 'digits-hybrid' and --preset 'digits-glow'. Leave one"),
            ((), "name a preset, a dataset or a file"),
            (("none.toml",), "none.toml does not exist"),
            (("digits-hybrid", "--set", "training.stepps=4"), "Did you mean 'training.steps'?"),
            (("digits-hybrid", "--set", "steps"), "a setting must be given as key=value; got 'steps'"),
            (("digits-hybrid", "--set", "steps=many"), "training.steps must be an integer; got 'many'"),
            (("digits-hybrid", "--set", "seed=1.5"), "must be an integer; got 1.5"),
            (("digits-hybrid", "--set", "lipschitz=1.5"), "lipschitz must lie in (0, 1); got 1.5"),
            (("digits-hybrid", "--data", "mnits"), "Did you mean 'mnist'?"),
            (("digits-hybrid", "--data", "no.csv"), "no.csv"),
            (("digits-hybrid", "--device", "abacus"), "device must be cpu, cuda, cuda:N or auto"),
            (("digits-hybrid", "--resume"), "a resumed run keeps its settings; got a preset"),
            (("--resume",), "--resume needs the run folder"),
            (("--resume", "--out", "nowhere"), "nowhere does not exist"),
        ],
    )
    def test_mistakes(self, call, words, sentence, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        code, text = call("train", *words)
        assert code == 2
        assert text.startswith("iresnet: ")
        assert sentence in text
        assert list(tmp_path.iterdir()) == []  # nothing was made

    @pytest.mark.parametrize(
        ("word", "near"),
        [("customers.cvs", "customers.csv"), ("custmers.txt", "customers.csv"), ("mine.tml", "mine.toml")],
    )
    def test_a_misspelt_file_is_found(self, call, word, near, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for name in ("customers.csv", "mine.toml"):
            (tmp_path / name).write_text("")
        sentence = f"iresnet: there is no preset, dataset or file '{word}'. Did you mean '{near}'?\n"
        assert call("train", word) == (2, sentence)

    @pytest.mark.parametrize("out", [False, True])
    def test_a_run_to_resume_comes_after_out(self, call, folder, out):
        words = ("--set", "learning_rate=0.001", *(("--out", folder) if out else ()))
        code, text = call("train", "--resume", folder, *words)
        assert code == 2
        assert f"Use: iresnet train --resume --out {folder} --set learning_rate=0.001\n" in text
        code, text = call("train", "--resume", folder, "--out", "elsewhere")
        assert (code, "a resumed run keeps its settings; got a preset" in text) == (2, True)

    @pytest.mark.parametrize("name", ["", ".", "..", "../out", "/tmp/out", "a/b", "a\\b", "a\nb", "a\0b"])
    def test_a_name_that_leads_out_of_runs_is_refused(self, call, name, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "mine.toml").write_text(f"name = {json.dumps(name)}\n")
        code, text = call("train", "mine.toml")
        assert code == 2
        assert "must be a plain name without slashes; got" in text
        assert "Change it, or choose a folder with --out." in text
        assert [p.name for p in tmp_path.iterdir()] == ["mine.toml"]

    def test_any_name_is_allowed_with_out(self, call, tmp_path):
        _, text = call("presets", "points-density")
        (tmp_path / "mine.toml").write_text(text.replace('name = "points-density"', 'name = "../a"'))
        words = ("--set", "width=4", "--set", "blocks=[1]", "--set", "steps=1", "--out", tmp_path / "run")
        assert call("train", tmp_path / "mine.toml", *words)[0] == 0

    def test_an_existing_run_is_not_overwritten(self, call, folder):
        before = (folder / "model.safetensors").read_bytes()
        code, text = call("train", "digits-hybrid", "--set", "steps=1", "--out", folder)
        assert code == 2
        assert "already holds a run" in text
        assert (folder / "model.safetensors").read_bytes() == before

    def test_labels_out_of_range(self, call, tmp_path):
        np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(50, 2)), y=np.full(50, 0.5))
        code, text = call("train", "table-hybrid", "--data", tmp_path / "d.npz", "--out", tmp_path / "f")
        assert code == 2
        assert not (tmp_path / "f").exists()
        assert text.startswith("iresnet: ")

    def test_an_empty_folder_of_images(self, call, tmp_path):
        (tmp_path / "images").mkdir()
        code, text = call("train", "digits-hybrid", "--data", tmp_path / "images", "--out", tmp_path / "g")
        assert code == 2
        assert "images" in text
        assert not (tmp_path / "g").exists()

    def test_training_that_diverges_exits_with_1(self, call, tmp_path):
        words = (*self.SMALL, "--set", "learning_rate=1e30", "--set", "warmup=0", "--set", "clip=1e30")
        code, text = call("train", "digits-hybrid", *words, "--set", "steps=20", "--out", tmp_path / "h")
        assert code == 1
        assert "step" in text
        assert "Lower learning_rate" in text


def test_one_step_is_singular(capsys):
    opened = Run.open(trained())
    finish(FitResult(opened, 1, True, 0.0, certify(opened.model(), opened.schema.shape)))
    assert "Trained 1 step in 0 s" in capsys.readouterr().out


class TestWorkOnARun:
    def test_evaluate(self, call, folder):
        code, text = call("evaluate", folder, "--draws", 2)
        assert code == 0
        assert "95 % interval" in text
        assert "bits/dim" in text
        assert "360 of 360 samples proven" in text
        content = json.loads((folder / "evaluation.json").read_text())
        assert content["rows"] == 360
        assert content["inverse"]["measured_error"] < 1e-5

    def test_evaluating_another_split_does_not_replace_the_test_metrics(self, call, folder):
        assert call("evaluate", folder, "--split", "validation", "--draws", 2)[0] == 0
        assert not (folder / "evaluation.json").exists()

    def test_sample(self, call, folder):
        assert call("sample", folder, "-n", 9, "--seed", 3)[0] == 0
        first = np.load(folder / "samples.npz")["x"]
        assert first.shape == (9, 1, 8, 8)
        assert (folder / "samples.png").read_bytes().startswith(b"\x89PNG")
        assert call("sample", folder, "-n", 9, "--seed", 3, "--out", folder / "again")[0] == 0
        assert np.array_equal(first, np.load(folder / "again.npz")["x"])

    def test_a_low_temperature_makes_samples_more_alike(self, call, folder):
        spreads = []
        for temperature in (0.1, 1.0):
            call("sample", folder, "-n", 40, "--temperature", temperature)
            spreads.append(np.load(folder / "samples.npz")["x"].std(axis=0).mean())
        assert spreads[0] < 0.5 * spreads[1]

    def test_samples_of_one_class(self, call, folder):
        assert call("sample", folder, "-n", 4, "--class", "7")[0] == 0
        code, text = call("sample", folder, "--class", "eleven")
        assert code == 2
        assert "there is no class 'eleven'" in text

    def test_samples_of_one_class_need_a_base_with_classes(self, call, tmp_path):
        folder = copy_of(trained("digits-density"), tmp_path / "density")
        code, text = call("sample", folder, "--class", "7")
        assert code == 2
        assert "--set network.bayes=true" in text

    def test_invert(self, call, folder):
        code, text = call("invert", folder, "-n", 4)
        assert code == 0
        assert "4 of 4 samples proven" in text
        table = rows((folder / "inverse-errors.csv").read_text())
        assert all(float(r["measured_error"]) < 1e-5 and r["proven"] == "True" for r in table)
        test = Run.open(folder).splits().test.x[:4].double() + 0.5
        assert np.allclose(np.load(folder / "inverse.npz")["x"], test.numpy(), atol=1e-5)

    @pytest.mark.parametrize("named", [(), ("--solver", "banach"), ("--solver", "newton")])
    def test_invert_uses_the_fastest_inverse_unless_a_solver_is_named(self, call, folder, monkeypatch, named):
        made, inverter = [], decoder.Inverter
        monkeypatch.setattr(decoder, "_on_gpu", lambda z: True)
        monkeypatch.setattr(decoder, "Inverter", lambda *a, **o: made.append(inverter(*a, **o)) or made[-1])
        code, text = call("invert", folder, "-n", 2, *named)
        assert (code, "2 of 2 samples proven" in text) == (0, True)
        assert [i.reason for i in made] == ([] if named else [""])

    def test_an_inverse_without_a_proof_counts_no_sample_as_proven_and_says_why(self, call, folder, monkeypatch):
        module, not_proven = importlib.import_module("iresnet.cli.invert"), {"proven": False, "reason": "A hook."}
        for name in ("reconstruct", "solve_codes"):
            plain = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *a, plain=plain, **o: _without_proof(plain(*a, **o), not_proven))
        code, text = call("invert", folder, "-n", 2)
        assert code == 1
        assert "this inverse is not proven; the files hold its result. A hook." in " ".join(text.split())
        assert {r["proven"] for r in rows((folder / "inverse-errors.csv").read_text())} == {"False"}
        np.save(folder / "codes.npy", np.zeros((2, *Run.open(folder).schema.shape)))
        code, text = call("invert", folder, "--codes", folder / "codes.npy", "--out", folder / "decoded")
        assert (code, "2 of 2 samples solved, not proven (A hook), block by block" in " ".join(text.split())) == (
            1,
            True,
        )

    def test_invert_codes(self, call, folder):
        opened = Run.open(folder)
        x = opened.splits().test.x[:3] + 0.5
        with torch.no_grad():
            np.save(folder / "codes.npy", opened.model().encode(x).numpy())
        assert call("invert", folder, "--codes", folder / "codes.npy", "--out", folder / "decoded")[0] == 0
        assert np.allclose(np.load(folder / "decoded.npz")["x"], x.numpy(), atol=1e-3)

    def test_an_unreachable_tolerance_exits_with_1(self, call, folder):
        code, text = call("invert", folder, "-n", 2, "--precision", "float32", "--tolerance", "1e-12")
        assert code == 1
        assert "proven" in text

    def test_interpolate(self, call, folder):
        assert call("interpolate", folder, "--pairs", 2, "--steps", 5)[0] == 0
        assert np.load(folder / "interpolation.npz")["x"].shape == (2, 5, 1, 8, 8)

    def test_certify(self, call, folder):
        code, text = call("certify", folder)
        assert code == 0
        assert "Invertible: proven. 2 of 2 blocks" in text

    def test_tighten_saves_the_tightened_model(self, call, folder):
        code, text = call("certify", folder, "--weights", "best", "--tighten")
        assert code == 0
        assert "tightened and saved as the model in" in text
        first, second = (checkpoint.load(f / "model.safetensors").tensors["weights"] for f in (folder, trained()))
        assert all(torch.equal(first[k], second[k]) for k in first)

    def test_a_certificate_that_does_not_pass_exits_with_1(self, call, folder):
        saved = checkpoint.load(folder / "model.safetensors")
        # sigma is <W, G>: a tenth of G makes every norm ten times what the constraint takes it for.
        grown = {".original": 50.0, ".gradient": 0.1}
        weights = {k: grown.get(k[k.rfind(".") :], 1) * v for k, v in saved.tensors["weights"].items() if v.dim() > 1}
        weights = {**saved.tensors["weights"], **weights}
        spoilt = checkpoint.Checkpoint({**saved.tensors, "weights": weights}, saved.state)
        checkpoint.save(spoilt, folder / "model.safetensors", version=__version__)
        code, text = call("certify", folder)
        assert code == 1
        assert "does not pass" in text
        assert f"iresnet certify {folder} --tighten" in text

    def test_scores_are_not_written_to_a_folder(self, call, folder):
        sentence = f"iresnet: cannot write {folder}: it is a folder. Name a file in it.\n"
        assert call("score", folder, "digits", "--out", folder) == (2, sentence)

    def test_score(self, call, folder):
        code, text = call("score", folder, "digits", "--draws", 2, "--out", folder / "s.csv")
        assert code == 0
        table = rows((folder / "s.csv").read_text())
        assert list(table[0]) == [
            "row", "log_likelihood", "standard_error", "bias_bound", "bits_per_dim", "anomaly", "atypicality", "class",
            "probability",
        ]  # fmt: skip
        assert len(table) == int(text.split()[0])
        assert all(0 <= float(r[name]) <= 1 for r in table for name in ("anomaly", "atypicality"))

    def test_report(self, call, folder):
        assert call("report", folder, "--out", folder / "page.html")[0] == 0
        page = (folder / "page.html").read_text()
        assert "digits-hybrid" in page
        assert json.loads((folder / "evaluation.json").read_text())["split"] == "test"

    def test_export(self, call, folder):
        code, _ = call("export", folder)
        assert code == 0
        program = torch.export.load(folder / "export" / "program.pt2").module()
        opened = Run.open(folder)
        x = opened.splits().test.x[:3] + 0.5
        assert torch.allclose(program(x)["logits"], opened.model().logits(x), atol=1e-4)

    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            (("evaluate", "{run}", "--split", "future"), "split must be one of test, validation, train; got 'future'"),
            (("evaluate", "{run}", "--data", "{run}/none.csv"), "none.csv"),
            (("sample", "{run}", "--temperature", "0"), "--temperature must be positive and finite; got 0.0"),
            (("invert", "{run}", "--precision", "float8"), "precision must be float32 or float64; got 'float8'"),
            (("invert", "{run}", "--solver", "luck"), "solver must be anderson, banach or newton; got 'luck'"),
            (("invert", "{run}", "--codes", "{run}/log.csv"), "must be a .npy file with an array"),
            (("invert", "{run}", "--codes", "{run}/none.npy"), "there is no file"),
            (("invert", "{run}", "--codes", "{run}"), "there is no file"),
            (("sample", "{run}", "--out", ".."), "--out must be a file path without suffix; got '..'"),
            (("certify", "{run}", "--device", "mps"), "since proofs need float64; got 'mps'"),
            (("report", "{run}", "--device", "cuda:99"), "device 'cuda:99' is not available here. Use cpu, or auto."),
            (("certify", "{run}", "--weights", "worst"), "weights must be 'model' or 'best'; got 'worst'"),
            (("score", "{run}", "{run}"), "run"),
            (("report", "{run}/nothing"), "does not exist"),
            (("export", "{run}/nothing"), "does not exist"),
            (("demo", "--only", "music"), "--only must be digits or toy; got 'music'"),
            (("demo", "--density", "moons"), "--density needs --only toy"),
            (("presets", "digit"), "unknown preset 'digit'"),
        ],
    )
    def test_mistakes(self, call, folder, words, sentence):
        before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
        code, text = call(*(w.format(run=folder) for w in words))
        assert code == 2
        assert sentence in text
        assert before == {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}

    def test_codes_of_another_shape(self, call, folder):
        np.save(folder / "codes.npy", np.zeros((2, 5)))
        code, text = call("invert", folder, "--codes", folder / "codes.npy")
        assert code == 2
        assert "codes must have shape (n, 16, 2, 2)" in text

    @pytest.mark.parametrize(
        "content",
        [b"", b"PK\x03\x04 no zip", b"\x93NUMPY\x01\x00v\x00", packed()[:-40], packed()],
        ids=["empty", "no zip", "no header", "cut zip", "zip"],
    )
    def test_codes_that_cannot_be_read(self, call, folder, content):
        (folder / "codes.npy").write_bytes(content)
        code, text = call("invert", folder, "--codes", folder / "codes.npy")
        assert code == 2
        assert text.startswith(f"iresnet: {folder / 'codes.npy'} ")
        assert "Save codes with numpy.save." in text

    def test_debug_shows_the_traceback(self):
        with pytest.raises(FileNotFoundError):
            cli.main(["evaluate", "nowhere", "--debug"])


def test_auto_selects_a_working_device():
    assert torch.zeros(1, device=choose_device("auto")).item() == 0.0


@pytest.mark.parametrize("name", ["mps", "xpu", "cuda:", "cuda0", "meta", ""])
def test_a_device_without_float64_is_refused(name):
    with pytest.raises(
        ValueError, match=f"device must be cpu, cuda, cuda:N or auto, .* got '{name}'. Use cpu, or auto"
    ):
        choose_device(name)


class TestRows:
    def test_rows_limits_the_samples_evaluated(self, call, folder):
        code, text = call("evaluate", folder, "--rows", 50, "--draws", 2)
        assert code == 0
        assert "samples  50 of 360\n" in text
        content = json.loads((folder / "evaluation.json").read_text())
        assert (content["rows"], content["of"]) == (50, 360)

    def test_all_samples_are_evaluated_by_default_if_likelihoods_are_exact(self, call, folder, monkeypatch):
        monkeypatch.setattr(sys.modules["iresnet.cli.metrics"], "MANY", 40)
        assert "samples  360 of 360\n" in call("evaluate", folder, "--draws", 2)[1]
        monkeypatch.setattr(sys.modules["iresnet.cli.metrics"], "EXACT_UP_TO", 63)
        assert "samples  40 of 360\n" in call("evaluate", folder, "--draws", 2)[1]

    def test_a_report_evaluates_again_with_rows(self, call, folder):
        (folder / "evaluation.json").write_text('{"tightening": {"layers": 3, "predictions_changed": 0, "rows": 360}}')
        code, text = call("report", folder, "--rows", 30, "--device", "cpu")
        assert code == 0
        assert "Evaluated 30 of 360 test samples." in text
        content = json.loads((folder / "evaluation.json").read_text())
        assert (content["rows"], content["tightening"]["layers"]) == (30, 3)
        assert "Evaluated" not in call("report", folder)[1]


class TestCertify:
    def test_metrics_of_the_former_model_are_removed(self, call, folder):
        (folder / "evaluation.json").write_text("{}")
        code, text = call("certify", folder, "--weights", "best", "--tighten", "--device", "cpu")
        assert code == 0
        assert f"Evaluate it again: iresnet evaluate {folder}" in text
        assert not (folder / "evaluation.json").exists()
        assert "Evaluate it again" not in call("certify", folder, "--weights", "best", "--tighten")[1]

    def test_an_unchanged_model_keeps_its_metrics(self, call, folder):
        (folder / "evaluation.json").write_text("{}")
        before = (folder / "model.safetensors").read_bytes()
        code, text = call("certify", folder, "--tighten")
        assert code == 0
        assert f"No layer exceeds its coefficient; the model in {folder} is unchanged." in text
        assert (folder / "evaluation.json").exists()
        assert (folder / "model.safetensors").read_bytes() == before

    def test_the_remedy_names_the_same_weights(self, call, folder):
        saved = checkpoint.load(folder / "best.safetensors")
        grown = {".original": 50.0, ".gradient": 0.1}
        weights = {k: grown.get(k[k.rfind(".") :], 1) * v for k, v in saved.tensors["weights"].items() if v.dim() > 1}
        weights = {**saved.tensors["weights"], **weights}
        spoilt = checkpoint.Checkpoint({**saved.tensors, "weights": weights}, saved.state)
        checkpoint.save(spoilt, folder / "best.safetensors", version=__version__)
        code, text = call("certify", folder, "--weights", "best")
        assert code == 1
        assert f"Try: iresnet certify {folder} --weights best --tighten" in text


class TestOut:
    @pytest.mark.parametrize("command", ["sample", "invert", "interpolate"])
    def test_a_dot_in_the_name_stays(self, call, folder, command):
        few = ("--pairs", 1, "--steps", 2) if command == "interpolate" else ("-n", 2)
        for name in ("t0.5", "t0.7"):
            assert call(command, folder, *few, "--out", folder / name)[0] == 0
        found = {p.name for p in folder.iterdir() if p.name.startswith("t0")}
        errors = {"t0.5-errors.csv", "t0.7-errors.csv"} if command == "invert" else set()
        assert found == {"t0.5.npz", "t0.5.png", "t0.7.npz", "t0.7.png"} | errors

    def test_a_suffix_is_not_doubled(self, call, folder):
        assert call("sample", folder, "-n", 2, "--out", folder / "s.npz")[0] == 0
        assert {p.name for p in folder.iterdir() if p.name.startswith("s.")} == {"s.npz", "s.png"}

    def test_brackets_are_printed_as_they_are(self, call, tmp_path):
        folder = copy_of(trained(), tmp_path / "[" / "x]")
        code, text = call("sample", folder, "-n", 1)
        assert code == 0
        assert f"1 sample in {folder}/samples.npz" in text


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    where = tmp_path_factory.mktemp("table")
    rng = np.random.default_rng(0)
    lines = [f"{a:.4f},{b:.4f},{c:.4f},{'cat' if a > 0 else 'dog'}" for a, b, c in rng.normal(size=(200, 3))]
    (where / "t.csv").write_text("\n".join(["a,b,c,kind", *lines]) + "\n")
    settings = DataSettings(source=str(where / "t.csv"), label="kind")
    start(replace(tiny("table-hybrid"), data=settings), where / "run")
    return where


class TestTables:
    """A run on a file that may go, and files with labels that the model does not know."""

    def test_samples_without_the_data(self, call, made, tmp_path):
        folder = copy_of(made / "run", tmp_path / "run")
        config = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(config.replace(str(made / "t.csv"), str(made / "gone.csv")))
        code, text = call("sample", folder, "-n", 5)
        assert code == 0
        assert f"5 samples in {folder / 'samples.csv'}. No plot, since it needs the test data: " in text
        assert "gone.csv" in text
        assert (folder / "samples.csv").read_text().startswith("a,b,c\n")
        assert not (folder / "samples.png").exists()

    def test_samples_beside_the_data(self, call, made, tmp_path):
        folder = copy_of(made / "run", tmp_path / "run")
        code, text = call("sample", folder, "-n", 5)
        assert code == 0
        assert f"plotted in {folder / 'samples.png'}" in text

    @pytest.mark.parametrize("command", ["score", "invert", "interpolate", "evaluate"])
    def test_only_evaluate_reads_labels(self, call, made, tmp_path, command):
        folder, other = copy_of(made / "run", tmp_path / "run"), tmp_path / "other.csv"
        other.write_text("c,b,a,kind\n1,2,3,bird\n4,5,6,cat\n")
        given = (other,) if command == "score" else ("--data", other)
        code, text = call(command, folder, *given)
        assert code == (2 if command == "evaluate" else 0), text
        assert ("bird" in text) == (command == "evaluate")

    def test_a_report_names_no_folders(self, call, made, tmp_path):
        folder = copy_of(made / "run", tmp_path / "run")
        known = json.loads((folder / "environment.json").read_text())
        command = f"iresnet train --data {made / 't.csv'} --out={folder} --set steps=3"
        (folder / "environment.json").write_text(json.dumps({**known, "command": command}))
        assert call("report", folder)[0] == 0
        page = (folder / "report.html").read_text()
        assert str(made) not in page
        assert str(tmp_path) not in page
        assert "iresnet train --data t.csv --out=run --set steps=3" in page
        assert "source = &quot;t.csv&quot;" in page

    def test_a_report_shows_interpolations_of_a_table(self, call, made, tmp_path):
        folder = copy_of(made / "run", tmp_path / "run")
        assert call("report", folder)[0] == 0
        assert "One line for each pair of samples" in (folder / "report.html").read_text()


class TestTolerance:
    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            (
                ("--draws", 4, "--tolerance", 0.5),
                "draws and tolerance exclude each other; got 4 and 0.5. Give one of",
            ),
            (("--tolerance", 0), "--tolerance must be positive and finite; got 0.0."),
            (("--tolerance", "nan"), "--tolerance must be positive and finite; got nan."),
        ],
    )
    def test_a_mistake_gets_a_sentence(self, call, options, sentence):
        code, text = call("score", trained(), "digits", *options)
        assert code == 2
        assert sentence in text

    def test_an_image_gets_the_draws_that_it_needs(self):
        run = Run.open(trained())
        few = run.splits().test.take([0, 1, 2])
        usual, eight, loose, strict = (
            torch.tensor(Scorer(run, draws=draws, tolerance=tolerance).score(few)["standard_error"])
            for draws, tolerance in ((None, None), (8, None), (None, 1e6), (None, 1e-6))
        )
        assert torch.equal(usual, eight)
        assert loose.mean() > eight.mean()
        assert strict.mean() < loose.mean() / 1.5


def test_scores_of_images_name_the_files():
    run = Run.open(trained())
    few = run.splits().test.take([0, 1])
    scorer = Scorer(run, draws=2)
    made = _columns(scorer, replace(few, names=("a.png", "b,c.png")))
    assert list(made)[:3] == ["row", "file", "log_likelihood"]
    assert made["file"] == ["a.png", "b,c.png"]
    assert "file" not in _columns(scorer, few)


@pytest.mark.parametrize(
    "run_out",
    [lambda: np.empty(10**17), lambda: torch.empty(10**15), lambda: _raise(torch.OutOfMemoryError("CUDA out of"))],
    ids=["numpy", "torch", "cuda"],
)
def test_running_out_of_memory_prints_a_sentence(call, monkeypatch, run_out):
    monkeypatch.setattr(cli, "app", lambda **_: run_out())
    code, text = call("sample", "runs/x")
    assert code == 1
    assert text == f"iresnet: {cli.OUT_OF_MEMORY}\n"
    assert "--rows" in text


def _raise(error):
    raise error


class TestHostile:
    ESCAPE = "\x1b]0;title\x07\x9b2J\u202e"

    @pytest.mark.parametrize("kind", [ValueError, OSError, RuntimeError])
    def test_control_characters_in_messages_are_escaped(self, call, monkeypatch, kind):
        monkeypatch.setattr(cli, "app", lambda **_: _raise(kind(f"class {self.ESCAPE}\n is unknown \udce9.")))
        code, text = call("sample", "runs/x")
        assert code in (1, 2)
        assert text == "iresnet: class \\x1b]0;title\\x07\\x9b2J\\u202e\\n is unknown \\udce9.\n"

    def test_control_characters_in_tables_are_escaped(self, capsys):
        made = table("set", title=self.ESCAPE)
        made.add_row(self.ESCAPE)
        console().print(f"Written: {self.ESCAPE}\n", made)
        out = capsys.readouterr().out
        assert not set("\x1b\x07\x9b\u202e") & set(out)
        assert r"Written: \x1b]0;title" in out

    def test_control_characters_in_scores_are_escaped_on_a_terminal(self, call, folder, monkeypatch):
        columns = {"row": [0, 1], "class": [f"a{self.ESCAPE}", "=cmd|' /C calc'!A0"], "x": [-0.5, 2.0]}
        monkeypatch.setattr(sys.modules["iresnet.cli.score"], "_columns", lambda *_: columns)
        words = ("score", folder, "digits")
        text = f'row,class,x\n0,"a{self.ESCAPE}",-0.5\n1,"\'=cmd|\' /C calc\'!A0",2\n'
        assert call(*words) == (0, text)
        assert call(*words, "--out", folder / "scores.csv")[0] == 0
        assert (folder / "scores.csv").read_text(encoding="utf-8") == text
        monkeypatch.setattr(sys.modules["iresnet.cli.output"], "on_terminal", lambda: True)
        assert "\x1b" not in call(*words)[1]

    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            (("sample", "--seed", 2**64), "seed must fit 64 bits; got 18446744073709551616."),
            (("interpolate", "--seed", -(2**70)), "seed must fit 64 bits; got -11"),
            (("sample", "-n", 10**12), "10000000"),
            (("sample", "-n", 10**30), "10000000"),
            (("interpolate", "--pairs", 10**30), "10000000"),
            (("interpolate", "--steps", 10**30), "10000000"),
            (("score", "digits", "--draws", 10**30), "100000"),
        ],
    )
    def test_numbers_out_of_range_are_refused(self, call, folder, words, sentence):
        code, text = call(words[0], folder, *words[1:])
        assert code == 2
        assert sentence in text

    @pytest.mark.parametrize("command", ["sample", "invert"])
    @pytest.mark.parametrize("tolerance", ["nan", "inf", "0", "-1"])
    def test_a_tolerance_must_be_positive_and_finite(self, call, folder, command, tolerance):
        sentence = f"iresnet: --tolerance must be positive and finite; got {float(tolerance)}.\n"
        assert call(command, folder, "-n", 2, "--tolerance", tolerance) == (2, sentence)

    @pytest.mark.parametrize("kind", [">f8", "<f2", np.longdouble, "u8"])
    def test_codes_of_any_precision_and_byte_order(self, call, folder, kind):
        np.save(folder / "codes.npy", np.zeros((2, 64), kind))
        assert call("invert", folder, "--codes", folder / "codes.npy", "--out", folder / "x")[0] == 0

    @pytest.mark.parametrize(
        "codes", [np.full((2, 64), np.nan), np.full((2, 64), np.inf), np.zeros((0, 64))], ids="nio"
    )
    def test_codes_must_be_finite_numbers(self, call, folder, codes):
        np.save(folder / "codes.npy", codes)
        code, text = call("invert", folder, "--codes", folder / "codes.npy")
        assert code == 2
        assert text == f"iresnet: {folder / 'codes.npy'} must hold at least one code, of finite numbers. Correct it.\n"

    def test_codes_whose_header_claims_too_much_are_refused(self, call, folder):
        path = folder / "codes.npy"
        path.write_bytes(
            b"\x93NUMPY\1\0F\0" + b"{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999, 64)}".ljust(70)
        )
        code, text = call("invert", folder, "--codes", path)
        assert code == 2
        assert text.startswith(
            f"iresnet: {path} must be a .npy file with an array of numbers (its header says (9999999999, 64) float64"
        )
        assert text.endswith("Save codes with numpy.save.\n")


@pytest.mark.parametrize("words", [(), ("train",), ("data", "list")], ids=str)
def test_help_has_a_short_name(call, words):
    assert call(*words, "-h") == call(*words, "--help")


def test_help_names_the_demo_and_debug(call):
    code, text = call("--help")
    assert code == 0
    assert "iresnet demo" in text
    assert "--debug" in text


class TestConsole:
    def test_text_is_not_markup(self, capsys):
        console().print("[a] [/x] :smile: [bold]b[/bold]")
        assert capsys.readouterr().out == "[a] [/x] :smile: [bold]b[/bold]\n"

    def test_names_in_the_bar_are_not_markup(self):
        screen = Console(file=io.StringIO(), force_terminal=True, width=100, markup=False)
        with progress(screen) as bars:
            reporter(bars, "[/x]")(1, 1, {"loss [/y]": torch.tensor(1.0)})
        assert "[/x]" in screen.file.getvalue()
        assert "loss [/y]" in screen.file.getvalue()

    def test_the_bar_fits_80_columns(self):
        screen = Console(file=io.StringIO(), force_terminal=True, width=80, markup=False)
        metrics = {"loss": 3.795, "bits/dim": 3.299, "cross-entropy": 2.444, "error %": 87.8, "certified %": 5.17}
        with progress(screen) as bars:
            reporter(bars, "digits-hybrid")(1, 1, {name: torch.tensor(value) for name, value in metrics.items()})
        shown = screen.file.getvalue()
        assert "3.299 bits/dim  87.8 % wrong  5.2 % certified" in shown.replace("\n", "")
        assert "loss" not in shown
        assert "cross-entropy" not in shown

    @pytest.mark.parametrize(("terminal", "quiet"), [(True, False), (False, False), (True, True)])
    def test_what_is_done_before_the_bar_is_shown_on_terminals_only(self, terminal, quiet):
        screen = Console(file=io.StringIO(), force_terminal=terminal, width=100, quiet=quiet)
        with progress(screen) as bars:
            with phase("fitting [/x]"):
                pass
            reporter(bars, "run")(1, 1, {"loss": torch.tensor(1.0)})
            with phase("too late"):
                pass
        shown = screen.file.getvalue()
        assert ("fitting [/x]" in shown) == (terminal and not quiet)
        assert "too late" not in shown
        assert (shown == "") == quiet

    def test_nothing_is_left_of_what_fails_before_the_bar(self):
        screen = Console(file=io.StringIO(), force_terminal=True, width=100)
        with pytest.raises(ValueError, match="no fit"), progress(screen) as bars, phase("fitting"):
            raise ValueError("no fit")
        assert not any(task.visible for task in bars.tasks)

    def test_a_spinner_is_shown_on_terminals_only(self):
        for terminal in (True, False):
            screen = Console(file=io.StringIO(), force_terminal=terminal, width=100)
            with waiting(screen, "Evaluating 5 of [/x] samples …"):
                pass
            assert ("Evaluating 5 of [/x] samples …" in screen.file.getvalue()) == terminal

    def test_a_loop_that_reports_turns_the_spinner_into_a_bar_with_the_time_left(self):
        for terminal in (True, False):
            screen = Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)
            with waiting(screen, "Scoring 4 samples …"), phase("likelihood"):
                each(lambda _: time.sleep(0.2), range(4))
            shown = screen.file.getvalue()
            assert bool(re.search(r"Scoring 4 samples: likelihood … .* (25|50|75)%.* 00:0\d left", shown)) == terminal

    def test_what_takes_longer_than_a_moment_gets_a_bar_beside_the_training(self, monkeypatch):
        monkeypatch.setattr("iresnet.run.progress.MOMENT", 0.0)
        for terminal in (True, False):
            screen = Console(file=io.StringIO(), force_terminal=terminal, width=100)
            with progress(screen):
                each(lambda _: time.sleep(0.2), range(4))
            assert ("evaluating" in screen.file.getvalue()) == terminal

    def test_a_quiet_console_shows_no_bar(self, capsys):
        with use_mode(Mode(quiet=True)), waiting(console(), "Scoring …"):
            each(str, range(2))
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("command", "default"),
    [("sample", "RUN/samples"), ("evaluate", "all up to 64 dimensions, else 1,000"), ("score", "print it")],
)
def test_help_shows_defaults(call, command, default, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert default in call(command, "--help")[1]
