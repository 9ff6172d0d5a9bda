"""Models that come with the library: found by name, read like a run, never written to."""

import hashlib
import importlib
import json
from pathlib import Path

import pytest
import torch

import iresnet
from iresnet import cli, run
from iresnet.run import Run, shipped
from tests.runs import copy_of, trained
from tools import ship

weights = importlib.import_module("iresnet.run.weights")


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library with one shipped model, `tiny`, made by the maintainers' tool; the present folder is an empty one."""
    for module in (weights, ship):
        monkeypatch.setattr(module, "WEIGHTS", tmp_path / "weights")
    folder = copy_of(trained(), tmp_path / "source")
    (folder / "evaluation.json").write_text(json.dumps({"split": "test", "rows": 360}))
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
    def test_it_is_listed_and_loaded_by_name(self, library):
        assert shipped() == iresnet.shipped() == ["tiny"]
        x = torch.full((2, 1, 8, 8), 3.5)
        torch.testing.assert_close(iresnet.load("tiny").logits(x), iresnet.load(trained()).logits(x))

    def test_a_folder_of_that_name_comes_first(self, library):
        Path("tiny").mkdir()
        with pytest.raises(FileNotFoundError, match="tiny is not a run folder"):
            iresnet.load("tiny")

    def test_other_names_and_paths_are_paths(self, library):
        for path in ("demo", "runs/tiny"):
            with pytest.raises(FileNotFoundError, match=f"{path} does not exist. Train first"):
                Run.open(path)

    def test_a_name_that_is_misspelt(self, library):
        sentence = r"tinyy does not exist. Did you mean 'tiny', which comes with the library\? Train first: "
        with pytest.raises(FileNotFoundError, match=sentence):
            iresnet.load("tinyy")
        sentence = r"name a run folder, or a model that comes with the library \(tiny\); got ''."
        with pytest.raises(ValueError, match=sentence):
            iresnet.load("")

    def test_only_released_weights(self, library, capsys):
        assert call("certify", "tiny", "--weights", "best") == 2
        sentence = "only the released weights come with the library; got 'best' for tiny. Use 'model'."
        assert sentence in capsys.readouterr().err

    def test_nothing_is_listed_where_nothing_is(self, tmp_path, monkeypatch):
        monkeypatch.setattr(weights, "WEIGHTS", tmp_path / "none")
        assert shipped() == []

    def test_the_names_of_the_library_itself_can_be_opened(self):
        for name in shipped():
            opened = Run.open(name)
            assert opened.experiment.data.folder == "data"
            assert not opened.model().training
            assert (opened.folder / "model.safetensors").stat().st_size <= ship.LARGEST


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
    def test_results_go_elsewhere(self, library, words, made, capsys):
        before = state(library)
        assert call(*words) == 0
        assert Path("runs/tiny-shipped", made).is_file()
        assert state(library) == before
        if words[0] not in ("certify", "score"):
            assert str(Path("runs/tiny-shipped", made)) in capsys.readouterr().out

    def test_new_figures_are_read_before_the_old(self, library):
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
    def test_data_are_looked_for_where_they_are_said_to_lie(self, words, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        assert call(*words, "--data-dir", "elsewhere") == 2
        text = capsys.readouterr().err
        assert "was not found in elsewhere" in text
        assert "Run `iresnet data download mnist`, or name the folder that holds it: --data-dir FOLDER." in text

    def test_the_data_of_a_run_may_lie_elsewhere(self):
        opened = Run.open(trained())
        assert opened.with_data_in(None) is opened
        assert opened.with_data_in(Path("there")).experiment.data.folder == "there"

    @pytest.mark.parametrize("words", [("certify", "tiny", "--tighten"), ("train", "--resume", "--out", "tiny")])
    def test_what_would_change_it_is_refused(self, library, words, capsys):
        before = state(library)
        assert call(*words) == 2
        assert "tiny comes with the library and stays as it is. Train a copy of your own" in capsys.readouterr().err
        assert state(library) == before
        with pytest.raises(ValueError, match="tiny comes with the library and stays as it is"):
            run.resume("tiny")

    def test_a_run_of_ones_own_is_written_to_as_before(self, tmp_path):
        own = Run.open(copy_of(trained(), tmp_path / "run"))
        assert own.own() is own
        assert own.output == own.folder


class TestShipping:
    def test_settings_hold_anywhere_and_training_state_stays_behind(self, library):
        opened = Run.open("tiny")
        assert opened.experiment.data.folder == "data"
        assert opened.experiment.name == "tiny"
        names = {p.name for p in (library / "tiny").iterdir()}
        assert names == {"config.toml", *ship.KEPT}

    def test_it_refuses(self, tmp_path, monkeypatch):
        monkeypatch.setattr(ship, "WEIGHTS", tmp_path / "weights")
        folder = copy_of(trained(), tmp_path / "source")
        with pytest.raises(FileNotFoundError, match="has no evaluation.json. Train it to the end, and evaluate it."):
            ship.ship(Run.open(folder), "tiny")
        (folder / "evaluation.json").write_text("{}")
        monkeypatch.setattr(ship, "LARGEST", 1000)
        with pytest.raises(ValueError, match="a model must take at most 1,000 bytes; got "):
            ship.ship(Run.open(folder), "tiny")
