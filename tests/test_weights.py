"""Models that come with the library are opened by name, read like runs, and never written to."""

import csv
import hashlib
import importlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import iresnet
from iresnet import cli, run
from iresnet.data import Dataset
from iresnet.evaluate import log_likelihood, score_tolerance
from iresnet.presets import PRESETS
from iresnet.run import Run, shipped
from iresnet.run.releasing import reference_likelihoods
from iresnet.train import checkpoint
from tests.runs import copy_of, trained
from tools import float16, ship

weights = importlib.import_module("iresnet.run.weights")

#: What `iresnet evaluate --protocol` keeps of a hybrid, as far as shipping reads it.
FIGURES: dict[str, Any] = {
    "split": "test",
    "rows": 360,
    "error": {"value": 2.5, "low": 1.3, "high": 4.7, "rows": 360},
    "protocol": {
        "value": 2.25,
        "bias_bound": 0.0,
        "estimator_error": 1e-4,
        "standard_error": 0.01,
        "rows": 360,
    },
    "inverse": {
        "rows": 360,
        "proven": 360,
        "precision": "float64",
        "largest_block_bound": 1e-9,
        "code_residual": 1e-9,
        "measured_error": 1e-9,
    },
}


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library with one shipped model, `tiny`, made by the maintainers' tool; the present folder is an empty one."""
    for module in (weights, ship):
        monkeypatch.setattr(module, "WEIGHTS", tmp_path / "weights")
    folder = copy_of(trained(), tmp_path / "source")
    (folder / "evaluation.json").write_text(json.dumps(FIGURES))
    ship.ship(Run.open(folder), "tiny")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "weights"


def state(folder: Path) -> dict[str, str]:
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in folder.rglob("*")
        if p.is_file()
    }


def call(*words):
    with pytest.raises(SystemExit) as stop:
        cli.main([str(w) for w in words])
    return stop.value.code


class TestNames:
    def test_a_shipped_model_is_listed_and_loaded_by_name(self, library):
        assert shipped() == iresnet.shipped() == ["tiny"]
        x = torch.full((2, 1, 8, 8), 3.5)
        torch.testing.assert_close(iresnet.load("tiny").logits(x), iresnet.load(trained()).logits(x))

    def test_a_folder_of_the_same_name_takes_precedence(self, library):
        Path("tiny").mkdir()
        with pytest.raises(FileNotFoundError, match="tiny is not a run folder"):
            iresnet.load("tiny")

    def test_other_names_and_paths_are_paths(self, library):
        for path in ("demo", "runs/other"):
            with pytest.raises(FileNotFoundError, match=f"{path} does not exist. Train first"):
                Run.open(path)

    def test_a_name_that_is_misspelt(self, library):
        sentence = r"tinyy does not exist. Did you mean 'tiny', which comes with the library\? Train first: "
        with pytest.raises(FileNotFoundError, match=sentence):
            iresnet.load("tinyy")
        sentence = r"give a run folder, or a model that comes with the library \(tiny\); got ''."
        with pytest.raises(ValueError, match=sentence):
            iresnet.load("")

    def test_only_released_weights(self, library, capsys):
        assert call("certify", "tiny", "--weights", "best") == 2
        sentence = "only the released weights come with the library; got 'best' for tiny. Use 'model'."
        assert sentence in capsys.readouterr().err

    def test_without_weights_the_list_is_empty(self, tmp_path, monkeypatch):
        monkeypatch.setattr(weights, "WEIGHTS", tmp_path / "none")
        assert shipped() == []

    def test_the_names_of_the_library_itself_can_be_opened(self):
        for name in shipped():
            opened = Run.open(name)
            assert opened.experiment.data.folder == "data"
            assert not opened.model().training
            assert (opened.folder / "model.safetensors").stat().st_size <= ship.LARGEST

    @pytest.mark.parametrize("name", shipped())
    def test_a_shipped_model_has_the_name_of_the_preset_that_made_it(self, name):
        opened = Run.open(name)
        assert opened.experiment.name == name
        assert replace(opened.experiment.network, norm="auto") == PRESETS[name].network  # its default has changed
        assert opened.experiment.objective == PRESETS[name].objective

    @pytest.mark.parametrize("former", weights.RENAMED)
    def test_a_former_name_is_answered_with_the_new_one(self, former):
        assert weights.RENAMED[former] in shipped()
        sentence = (
            f"the model '{former}' that comes with the library is now called '{weights.RENAMED[former]}'. Use that"
        )
        with pytest.raises(FileNotFoundError, match=sentence):
            iresnet.load(former)

    @pytest.mark.no_cover
    @pytest.mark.slow
    def test_the_shipped_flow_draws_digits_and_detects_shuffled_ones(self):
        """Samples lie in the range of pixels, ink in the middle; what is shuffled is less likely than each of them."""
        flow = iresnet.load("mnist-flow-noise")
        torch.manual_seed(0)
        with torch.no_grad():
            x = flow.sample((6,))
            assert x.shape == (6, 1, 28, 28)
            assert -1 < float(x.min()) < float(x.max()) < 257
            assert x[..., 7:21, 7:21].mean() > 10 * x[..., :2].mean()
            bytes_ = x.floor().clamp(0, 255)
            spoilt = bytes_.flatten(1)[:, torch.randperm(784)].view_as(bytes_)
            drawn, strange = flow.log_prob(torch.cat([bytes_, spoilt]) + 0.5).chunk(2)
        assert float(strange.max()) < float(drawn.min())


@pytest.mark.slow
@pytest.mark.no_cover
def test_the_errors_of_scores_by_the_shipped_flow_have_the_size_they_claim():
    """Digits of scikit-learn, enlarged: scores to the default tolerance against the mean over 48 other draws."""
    opened = Run.open(weights.WEIGHTS / "mnist-flow-noise")
    model, digits = opened.model(), load_digits().images[:40] / 16
    large = torch.nn.functional.interpolate(torch.tensor(digits)[:, None].float(), size=(20, 20), mode="bilinear")
    x = torch.nn.functional.pad(255 * large, (4, 4, 4, 4)).round().to(torch.uint8)
    data = Dataset(x, None, opened.schema)
    tolerance = score_tolerance(model, data.schema, opened.reference())
    got = log_likelihood(model, data, tolerance=tolerance)
    truth = log_likelihood(model, data, draws=48, seed=1000)
    error = (got.standard_error.square() + truth.standard_error.square()).sqrt()
    assert ((got.value - truth.value).abs() <= 2 * error).double().mean() >= 0.75  # 0.86 expected
    assert ((got.value - truth.value).abs() <= 6 * error).all()
    assert ((got.standard_error <= tolerance.at(got.value) + 0.5) | (got.passes == 16)).all()
    assert 1 < got.standard_error.median() < 10


class TestCommands:
    @pytest.mark.parametrize(
        ("words", "made"),
        [
            (("sample", "tiny", "-n", 2), "samples.npz"),
            (("invert", "tiny", "-n", 2), "inverse.npz"),
            (("interpolate", "tiny", "--pairs", 1, "--steps", 2), "interpolation.npz"),
            (("certify", "tiny"), "certificate.json"),
            (("evaluate", "tiny", "--rows", 20, "--draws", 2), "evaluation.json"),
            (("score", "tiny", "digits", "--out", "runs/tiny-shipped/scores.csv", "--draws", 2), "scores.csv"),
        ],
    )
    def test_results_are_written_to_runs_not_to_the_library(self, library, words, made, capsys):
        before = state(library)
        assert call(*words) == 0
        assert Path("runs/tiny-shipped", made).is_file()
        assert state(library) == before
        if words[0] not in ("certify", "score"):
            assert str(Path("runs/tiny-shipped", made)) in capsys.readouterr().out

    def test_new_metrics_take_precedence(self, library):
        assert Run.open("tiny").read_json("evaluation.json")["rows"] == 360
        assert call("evaluate", "tiny", "--rows", 20, "--draws", 2) == 0
        assert Run.open("tiny").read_json("evaluation.json")["rows"] == 20

    @pytest.mark.parametrize(
        "words",
        [
            ("evaluate", "mnist-classifier"),
            ("invert", "mnist-classifier"),
            ("interpolate", "mnist-classifier"),
            ("score", "mnist-classifier", "mnist"),
            ("report", "mnist-classifier"),
        ],
    )
    def test_data_dir_is_searched(self, words, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        assert call(*words, "--data-dir", "elsewhere") == 2
        text = capsys.readouterr().err
        assert "was not found in elsewhere" in text
        assert "Run `iresnet data download mnist`, or set the dataset directory: --data-dir FOLDER." in text

    def test_a_run_can_use_another_data_directory(self):
        opened = Run.open(trained())
        assert opened.with_data_folder(None) is opened
        assert opened.with_data_folder(Path("there")).experiment.data.folder == "there"

    @pytest.mark.parametrize("words", [("certify", "tiny", "--tighten"), ("train", "--resume", "--out", "tiny")])
    def test_commands_that_would_change_it_are_refused(self, library, words, capsys):
        before = state(library)
        assert call(*words) == 2
        assert "tiny comes with the library and cannot be changed. Train a copy of your own" in capsys.readouterr().err
        assert state(library) == before
        with pytest.raises(ValueError, match="tiny comes with the library and cannot be changed"):
            run.resume("tiny")

    def test_results_of_other_runs_stay_in_their_folder(self, tmp_path):
        own = Run.open(copy_of(trained(), tmp_path / "run"))
        assert own.require_writable() is own
        assert own.output == own.folder


class TestShipping:
    def test_settings_are_portable_and_training_state_is_left_out(self, library):
        opened = Run.open("tiny")
        assert opened.experiment.data.folder == "data"
        assert opened.experiment.name == "tiny"
        names = {p.name for p in (library / "tiny").iterdir()}
        assert names == {"config.toml", *ship.KEPT}

    def test_shipping_refuses_incomplete_or_large_runs(self, tmp_path, monkeypatch):
        monkeypatch.setattr(ship, "WEIGHTS", tmp_path / "weights")
        folder = copy_of(trained(), tmp_path / "source")
        with pytest.raises(FileNotFoundError, match="has no evaluation.json. Finish the training and evaluate it."):
            ship.ship(Run.open(folder), "tiny")
        (folder / "evaluation.json").write_text(json.dumps(FIGURES))
        monkeypatch.setattr(ship, "LARGEST", 1000)
        with pytest.raises(ValueError, match="a shipped model must have at most 1,000 bytes; got "):
            ship.ship(Run.open(folder), "tiny")
        assert not (tmp_path / "weights").exists()

    @pytest.mark.parametrize(
        ("kind", "changes", "lacking"),
        [
            ("digits-hybrid", {"error": None, "inverse": None}, "error, inverse"),
            ("digits-hybrid", {"protocol": {**FIGURES["protocol"], "rows": 100}}, "protocol"),
            ("digits-density", {"error": None, "protocol": None}, "protocol"),
            ("digits-classifier", {"error": {**FIGURES["error"], "rows": 359}, "protocol": None}, "error"),
        ],
    )
    def test_shipping_needs_the_metrics_of_all_test_samples(self, kind, changes, lacking, tmp_path, monkeypatch):
        monkeypatch.setattr(ship, "WEIGHTS", tmp_path / "weights")
        folder = copy_of(trained(kind), tmp_path / "source")
        metrics = {name: value for name, value in {**FIGURES, **changes}.items() if value is not None}
        (folder / "evaluation.json").write_text(json.dumps(metrics))
        aim = Run.open(folder).experiment.objective.kind
        option = "" if aim == "classification" else " --protocol"
        sentence = (
            f"must have the metrics of a {aim} model on all 360 test samples; it lacks {lacking}. "
            f"Run: iresnet evaluate .*source --rows 360{option}$"
        )
        with pytest.raises(ValueError, match=sentence):
            ship.ship(Run.open(folder), "tiny")

    def test_each_kind_of_model_has_its_own_metrics(self, library):
        density = copy_of(trained("digits-density"), library.parent / "density")
        classifier = copy_of(trained("digits-classifier"), library.parent / "classifier")
        for folder, other in ((density, "error"), (classifier, "protocol")):
            metrics = {name: value for name, value in FIGURES.items() if name != other}
            (folder / "evaluation.json").write_text(json.dumps(metrics))
            ship.ship(Run.open(folder), folder.name)
        rows = {r["model"]: r for r in ship.results().rows}
        assert {name: (r["kind"], r["error %"], r["bits/dim"]) for name, r in rows.items()} == {
            "classifier": ("classification", 2.5, None),
            "density": ("density", None, 2.25),
            "tiny": ("hybrid", 2.5, 2.25),
        }
        errors = ("bias bound", "estimator error", "error over images", "test images")
        assert [rows["density"][k] for k in errors] == [0.0, 1e-4, 0.01, 360]
        assert [rows["classifier"][k] for k in errors] == [None, None, None, 360]
        assert len({tuple(r) for r in rows.values()}) == 1  # a page may name any column whatever ships


class TestSlim:
    """A shipped file leaves out the state of power iteration, and nothing that the function needs."""

    def test_the_function_is_the_same_to_the_last_bit(self, library):
        x = 17 * torch.rand(5, 1, 8, 8)
        whole, small = iresnet.load(trained()), iresnet.load("tiny")
        assert torch.equal(whole.logits(x), small.logits(x))
        assert torch.equal(whole.log_prob(x), small.log_prob(x))
        assert iresnet.certify(small, (1, 8, 8)) == iresnet.certify(whole, (1, 8, 8))
        assert torch.equal(Run.open("tiny").reference(), Run.open(trained()).reference())

    def test_the_file_is_smaller(self, library):
        kept = checkpoint.load(library / "tiny" / "model.safetensors").tensors["weights"]
        assert not any(name.endswith(("gradient", "direction")) for name in kept)
        whole = (trained() / "model.safetensors").stat().st_size
        assert (library / "tiny" / "model.safetensors").stat().st_size < 0.8 * whole

    def test_further_training_keeps_the_bounds(self, library):
        model = iresnet.load("tiny").train()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):  # steps that push the norms up
            optimiser.zero_grad()
            (-sum(p.square().sum() for n, p in model.named_parameters() if n.endswith("original"))).backward()
            model.log_prob(17 * torch.rand(4, 1, 8, 8))
            optimiser.step()
        bounds = iresnet.certify(model.eval(), (1, 8, 8)).lipschitz.values()
        assert max(bounds) < Run.open("tiny").experiment.network.lipschitz * 1.01

    def test_an_incomplete_file_is_refused(self, library):
        path = library / "tiny" / "model.safetensors"
        content = checkpoint.load(path)
        kept = dict(content.tensors["weights"])
        kept.pop(next(name for name in kept if name.endswith("original")))
        checkpoint.save(replace(content, tensors={"weights": kept}), path, version="0")
        with pytest.raises(ValueError, match="does not fit"):
            iresnet.load("tiny")


class TestFloat16:
    """A rounded model is certified for exactly its weights, and shipped in half the bytes without a further change."""

    @pytest.fixture
    def rounded(self, library):
        return float16.round_run(Run.open(trained()), library.parent / "rounded")

    def test_weights_are_float16_numbers_near_the_trained_ones(self, rounded):
        before, after = weights.slim_state(iresnet.load(trained())), weights.slim_state(rounded.model())
        constrained = [name for name in before if name.endswith(".weight.original")]
        assert constrained
        for name in before:
            assert (after[name].dtype == torch.float16) == (name in constrained)
            torch.testing.assert_close(after[name].to(before[name].dtype), before[name], rtol=2**-11, atol=1e-7)

    def test_certificate_and_reference_are_those_of_the_rounded_weights(self, rounded):
        model, stored = rounded.model(), rounded.read_json("certificate.json")
        bounds = iresnet.certify(model, (1, 8, 8)).lipschitz
        assert [b["lipschitz"] for b in stored["blocks"]] == list(bounds.values())
        assert list(bounds.values()) != list(iresnet.certify(iresnet.load(trained()), (1, 8, 8)).lipschitz.values())
        torch.testing.assert_close(rounded.reference(), reference_likelihoods(model, rounded.splits().validation))

    def test_metrics_of_other_weights_are_left_behind(self, rounded):
        assert not (rounded.folder / "evaluation.json").exists()
        with pytest.raises(FileNotFoundError, match=r"has no evaluation.json. Finish the training and evaluate it."):
            ship.ship(rounded, "small")

    def test_shipping_changes_nothing_and_makes_the_file_smaller(self, rounded, library):
        (rounded.folder / "evaluation.json").write_text(json.dumps(FIGURES))
        ship.ship(rounded, "small")
        x = 17 * torch.rand(5, 1, 8, 8)
        assert torch.equal(iresnet.load("small").log_prob(x), rounded.model().log_prob(x))
        assert all(p.dtype == torch.float32 for p in iresnet.load("small").parameters())
        small, whole = ((library / name / "model.safetensors").stat().st_size for name in ("small", "tiny"))
        assert small < whole
        assert {r["model"]: r["weights"] for r in ship.results().rows} == {"small": "float16", "tiny": "float32"}


class TestCards:
    """Every model that comes with the library has a card, which lies beside its weights in the wheel."""

    ROOT = Path(__file__).resolve().parent.parent

    @pytest.mark.parametrize("name", shipped())
    def test_a_card_names_the_digest_the_size_and_the_command(self, name):
        card, opened = (self.ROOT / "docs" / "models" / f"{name}.md").read_text(encoding="utf-8"), Run.open(name)
        environment = opened.read_json("environment.json")
        assert opened.sha256() in card
        assert f">{environment['parameters']}<" in card
        assert environment["command"] in card
        for part in ("Training", "Metrics", "What is proven", "Use and limits", "Licence"):
            assert f"## {part}" in card
        assert "Attribution-ShareAlike 3.0" in card

    @pytest.mark.parametrize("name", shipped())
    def test_a_card_is_part_of_the_wheel(self, name):
        text = (self.ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert f'"docs/models/{name}.md" = "iresnet/weights/{name}/MODEL_CARD.md"' in text


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A density on digits, trained for a few steps and judged by the command, as whoever ships it does."""
    folder = copy_of(trained("digits-density"), tmp_path_factory.mktemp("flow") / "source")
    assert call("evaluate", folder, "--protocol", "--limit", 0.02, "--draws", 2, "--device", "cpu") == 0
    return folder


class TestFlow:
    """What `mnist-flow-noise` must do, at the size of seconds."""

    @pytest.fixture
    def flow(self, judged, tmp_path, monkeypatch):
        for module in (weights, ship):
            monkeypatch.setattr(module, "WEIGHTS", tmp_path / "weights")
        ship.ship(Run.open(judged), "digits-flow")
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        return tmp_path / "weights" / "digits-flow"

    def test_samples_are_drawn_by_name(self, flow, capsys):
        assert call("sample", "digits-flow", "-n", 64) == 0
        assert "64 samples in runs/digits-flow-shipped/samples.npz, plotted in" in capsys.readouterr().out
        with np.load("runs/digits-flow-shipped/samples.npz") as made:
            assert made["x"].shape == (64, 1, 8, 8)
            z = iresnet.load("digits-flow").double().transform(torch.from_numpy(made["x"]).double()).detach()
        expected = iresnet.load("digits-flow").base.rsample(64, torch.Generator().manual_seed(0)).detach()
        torch.testing.assert_close(z.float(), expected, atol=1e-3, rtol=0)

    def test_images_are_scored_by_name(self, flow, capsys):
        np.save("images.npy", np.random.default_rng(0).integers(0, 17, (3, 1, 8, 8)).astype(np.uint8))
        assert call("score", "digits-flow", "images.npy", "--draws", 2) == 0
        rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
        assert all(0.99 < float(r["anomaly"]) < 1 for r in rows)  # noise is less likely than any digit
        assert all(float(r["bits_per_dim"]) > 2 for r in rows)

    def test_likelihoods_and_certificate_are_those_of_the_run(self, flow, judged):
        x = torch.full((2, 1, 8, 8), 3.5)
        model = iresnet.load("digits-flow")
        torch.testing.assert_close(model.log_prob(x), iresnet.load(judged).log_prob(x))
        bounds = iresnet.certify(model, (1, 8, 8)).lipschitz
        kept = json.loads((flow / "certificate.json").read_text())["blocks"]
        assert [b["lipschitz"] for b in kept] == pytest.approx(list(bounds.values()), abs=1e-12)

    def test_the_table_has_bits_and_their_errors(self, flow, judged):
        (row,) = ship.results().rows
        found = json.loads((judged / "evaluation.json").read_text())["protocol"]
        assert row["bits/dim"] == found["value"]
        assert 0 < row["estimator error"] <= 0.02
        assert row["error over images"] == found["standard_error"] > 0
        assert (row["error %"], row["bias bound"], row["test images"], row["epochs"]) == (None, 0.0, 360, None)
