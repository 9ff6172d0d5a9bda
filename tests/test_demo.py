"""The demonstration and the command, at a size of seconds."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from iresnet import __version__, cli, demo
from iresnet.cli.demo import _table
from iresnet.training import Training

QUICK = replace(demo.DemoSettings(), blocks=2, width=16, held_out=1_000, training=Training(steps=5))


def test_writes_picture_figures_and_certificates(tmp_path):
    outcomes = demo.run(tmp_path / "run", ("moons", "checkerboard"), QUICK)
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


def test_the_same_seed_gives_the_same_figures():
    first, second = (demo.run_density("moons", QUICK, seed=3)[0] for _ in range(2))
    assert first.nats == second.nats


def test_table_shows_every_density_without_wrapping():
    outcome = replace(demo.run_density("moons", QUICK)[0], density="eight_gaussians")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(_table([outcome]))
    text = console.export_text()
    assert "eight_gaussians" in text
    assert f"{outcome.floor:.3f}" in text
    assert "…" not in text


class TestCommand:
    def run(self, *words):
        with pytest.raises(SystemExit) as stop:
            cli.main(list(words))
        return stop.value.code

    def test_version(self, capsys):
        assert self.run("--version") == 0
        assert capsys.readouterr().out.strip() == f"iresnet {__version__}"

    def test_help_has_an_example(self, capsys):
        assert self.run("demo", "--help") == 0
        assert "Example: iresnet demo" in capsys.readouterr().out

    def test_unknown_density_gets_a_sentence_and_exit_2(self, capsys, tmp_path):
        assert self.run("demo", "--density", "moon", "--out", str(tmp_path / "x")) == 2
        error = capsys.readouterr().err
        assert error.startswith("iresnet: ")
        assert "moons" in error
        assert "Traceback" not in error
        assert not (tmp_path / "x").exists()

    def test_debug_shows_the_traceback(self):
        with pytest.raises(ValueError, match="moon"):
            cli.main(["demo", "--density", "moon", "--debug"])

    def test_a_folder_that_cannot_be_made_is_exit_2(self, capsys, tmp_path):
        (tmp_path / "file").write_text("")
        assert self.run("demo", "--density", "moons", "--steps", "1", "--out", str(tmp_path / "file" / "x")) == 2
        assert "file" in capsys.readouterr().err

    def test_zero_steps_is_exit_2(self, capsys):
        assert self.run("demo", "--steps", "0") == 2
        assert "steps" in capsys.readouterr().err

    def test_runs(self, capsys, tmp_path, monkeypatch):
        monkeypatch.setattr(demo, "DemoSettings", lambda: QUICK)
        assert self.run("demo", "--density", "moons", "--steps", "2", "--out", str(tmp_path)) == 0
        out = capsys.readouterr().out
        assert "moons" in out
        assert "toy.png" in out

    def test_a_failed_certificate_is_exit_1(self, capsys, tmp_path, monkeypatch):
        outcome = replace(demo.run_density("moons", QUICK)[0], certified=False)
        monkeypatch.setattr(demo, "run", lambda *a, **k: [outcome])
        assert self.run("demo", "--out", str(tmp_path)) == 1
        assert "no certificate" in capsys.readouterr().err
