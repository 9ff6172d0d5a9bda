"""The demonstrations, at a size of seconds: what they show, and what the command prints of it."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from iresnet import cli, load
from iresnet.cli.demo import _anomalies, _densities, _metrics
from iresnet.data.corruptions import CORRUPTIONS
from iresnet.demo import digits, toy
from iresnet.train import Training
from tests.runs import tiny

QUICK = replace(toy.ToySettings(), blocks=2, width=16, held_out=1_000, training=Training(steps=5))


def printed(thing):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(thing)
    return console.export_text()


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return digits.run(folder / "run", tiny()), folder / "run"


class TestDigits:
    def test_one_network_does_everything(self, shown):
        outcome, folder = shown
        assert outcome.error.rows == outcome.density.rows == outcome.inverse.rows == 360
        assert outcome.error.low < outcome.error.value < outcome.error.high
        assert outcome.density.unit == "bits/dim"
        assert outcome.certificate.passed
        assert outcome.inverse.proven == 360
        assert outcome.inverse.measured_error < 1e-5
        assert [a["name"] for a in outcome.anomalies] == list(CORRUPTIONS)
        assert load(folder).logits is not None

    def test_writes_the_report_and_the_figures(self, shown):
        outcome, folder = shown
        assert outcome.page == folder / "report.html"
        assert "digits-hybrid" in outcome.page.read_text()
        content = json.loads((folder / "evaluation.json").read_text())
        assert content["error"]["wrong"] == outcome.error.wrong
        assert content["tightening"]["predictions_changed"] == outcome.changed

    def test_the_tables_fit_a_terminal(self, shown):
        metrics, anomalies = printed(_metrics(shown[0])), printed(_anomalies(shown[0]))
        assert f"({shown[0].error.wrong} of 360)" in metrics
        assert "360 of 360 images" in metrics
        assert "pixel noise" in anomalies
        assert "…" not in metrics + anomalies

    def test_stopped_before_the_end(self, tmp_path):
        assert digits.run(tmp_path / "run", tiny(), stop=lambda: True) is None
        assert (tmp_path / "run" / "last.safetensors").exists()


class TestToy:
    def test_writes_picture_figures_and_certificates(self, tmp_path):
        outcomes = toy.run(tmp_path / "run", ("moons", "checkerboard"), QUICK)
        assert {p.name for p in (tmp_path / "run").iterdir()} == {
            "toy.png",
            "toy.json",
            "moons-certificate.json",
            "checkerboard-certificate.json",
        }
        content = json.loads((tmp_path / "run" / "toy.json").read_text())
        assert [o["density"] for o in content["outcomes"]] == ["moons", "checkerboard"]
        assert json.loads((tmp_path / "run" / "moons-certificate.json").read_text())["passed"] is True
        for o in outcomes:
            assert o.certified
            assert o.nats > o.floor - 5 * o.nats_standard_error  # no model beats the entropy
            assert o.measured_error < 1e-4
            assert o.largest_block_bound < 1e-4

    def test_the_same_seed_gives_the_same_figures(self):
        first, second = (toy.run_density("moons", QUICK, seed=3)[0] for _ in range(2))
        assert first.nats == second.nats

    def test_table_shows_every_density_without_wrapping(self):
        outcome = replace(toy.run_density("moons", QUICK)[0], density="eight_gaussians")
        text = printed(_densities([outcome]))
        assert "eight_gaussians" in text
        assert f"{outcome.floor:.3f}" in text
        assert "…" not in text


class TestCommand:
    def run(self, *words):
        with pytest.raises(SystemExit) as stop:
            cli.main(list(words))
        return stop.value.code

    @pytest.mark.slow
    def test_digits_again_in_the_same_folder(self, capsys, shown, monkeypatch):
        (outcome, folder), run, again = shown, digits.run, []
        monkeypatch.setattr(digits, "experiment", lambda seed, steps: tiny())
        monkeypatch.setattr(digits, "run", lambda *a, **k: again.append(run(*a, **k)) or again[0])
        assert self.run("demo", "--out", str(folder)) == 0
        out = capsys.readouterr().out
        assert "classification error" in out
        assert "report.html" in out
        assert (again[0].error, again[0].density) == (outcome.error, outcome.density)

    def test_digits_without_a_certificate_is_exit_1(self, capsys, tmp_path, monkeypatch, shown):
        outcome = shown[0]
        block = replace(outcome.certificate.blocks[0], proven=False)
        spoilt = replace(outcome, certificate=replace(outcome.certificate, blocks=(block,)))
        monkeypatch.setattr(digits, "run", lambda *a, **k: spoilt)
        assert self.run("demo", "--out", str(tmp_path / "run")) == 1
        assert "not certified" in capsys.readouterr().err

    def test_digits_stopped_is_exit_130(self, capsys, tmp_path, monkeypatch):
        monkeypatch.setattr(digits, "run", lambda *a, **k: None)
        assert self.run("demo", "--out", str(tmp_path / "run")) == 130
        assert "iresnet train --resume --out" in capsys.readouterr().out

    def test_unknown_density_gets_a_sentence_and_exit_2(self, capsys, tmp_path):
        assert self.run("demo", "--only", "toy", "--density", "moon", "--out", str(tmp_path / "x")) == 2
        error = capsys.readouterr().err
        assert error.startswith("iresnet: ")
        assert "moons" in error
        assert not (tmp_path / "x").exists()

    def test_a_folder_that_cannot_be_made_is_exit_2(self, capsys, tmp_path):
        (tmp_path / "file").write_text("")
        words = ("--density", "moons", "--steps", "1", "--out", str(tmp_path / "file" / "x"))
        assert self.run("demo", "--only", "toy", *words) == 2
        assert "file" in capsys.readouterr().err

    def test_zero_steps_is_exit_2(self, capsys):
        assert self.run("demo", "--steps", "0") == 2
        assert "steps" in capsys.readouterr().err

    def test_toy(self, capsys, tmp_path, monkeypatch):
        monkeypatch.setattr(toy, "ToySettings", lambda: QUICK)
        assert self.run("demo", "--only", "toy", "--density", "moons", "--steps", "2", "--out", str(tmp_path)) == 0
        out = capsys.readouterr().out
        assert "moons" in out
        assert "toy.png" in out

    def test_toy_without_a_certificate_is_exit_1(self, capsys, tmp_path, monkeypatch):
        outcome = replace(toy.run_density("moons", QUICK)[0], certified=False)
        monkeypatch.setattr(toy, "run", lambda *a, **k: [outcome])
        assert self.run("demo", "--only", "toy", "--out", str(tmp_path)) == 1
        assert "not certified" in capsys.readouterr().err
