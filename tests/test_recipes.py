"""The tools that search for good settings: pilots (short trainings), and the record of trials."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from iresnet.evaluate import density
from iresnet.presets import find
from iresnet.results import Results, read, write
from iresnet.run import Run
from iresnet.train import Training, checkpoint
from tests.runs import copy_of, tiny, trained
from tools import pilots, tables, trial
from tools.pilots import Budget, Clock, Pilot

ROOT = Path(__file__).resolve().parent.parent
SMALL = "blocks=[1,1] width=4"


def call(tool, *words):
    return tool.main([str(w) for w in words])


class TestPilot:
    def test_a_line_names_settings_and_optionally_a_preset(self):
        made = Pilot.parse("digits-classifier width=8 # why not", "digits-density")
        assert made == Pilot("digits-classifier", ("width=8",))
        assert Pilot.parse("", "digits-density") == Pilot("digits-density")
        assert made.experiment("there").network.width == 8
        assert made.experiment("there").data.folder == "there"
        assert made.experiment(None) == replace(
            find("digits-classifier"), network=replace(find("digits-classifier").network, width=8)
        )

    @pytest.mark.parametrize(
        ("name", "about"),
        [
            ("mnist", ("mnist", "density")),
            ("cifar10", ("cifar10", "density")),
            ("classifiers", ("cifar10", "classification")),
        ],
    )
    def test_every_pilot_in_the_lists_is_a_valid_experiment(self, name, about):
        lines = (ROOT / "tools" / f"pilots-{name}.txt").read_text().splitlines()
        made = [Pilot.parse(line, "none").experiment(None) for line in lines if not line.startswith("#")]
        assert len(made) > 10
        assert {(e.data.source, e.objective.kind) for e in made} == {about}


class TestClock:
    def test_it_starts_after_the_warm_up_steps(self, monkeypatch):
        now = [100.0]
        monkeypatch.setattr(pilots.time, "time", lambda: now[0])
        clock = Clock(Budget(seconds=10, end=1000), first=2)
        assert [clock.part(0), clock.part(1)] == [0.0, 0.0]
        now[0] = 140.0  # it took long to compile
        assert clock.part(2) == 0.0
        now[0] = 145.0
        assert clock.part(3) == 0.5
        assert clock.elapsed == 5.0

    def test_a_late_pilot_is_shortened_to_leave_time_for_its_evaluation(self, monkeypatch):
        now = [0.0]
        monkeypatch.setattr(pilots.time, "time", lambda: now[0])
        clock = Clock(Budget(seconds=60, end=pilots.RESERVE + 20), first=0)
        assert clock.part(0) == 0.0
        now[0] = 10.0
        assert clock.part(9) == pytest.approx(0.5)

    def test_the_limit_on_steps_may_end_it_first(self, monkeypatch):
        monkeypatch.setattr(pilots.time, "time", lambda: 0.0)
        clock = Clock(Budget(seconds=60, steps=10), first=1)
        assert [clock.part(n) for n in (0, 1, 6, 11)] == [0.0, 0.0, 0.5, 1.0]

    def test_the_schedule_is_stretched_over_the_pilots_time(self):
        settings = Training(learning_rate=1.0, warmup=10, cooldown=0.5, steps=77)
        assert pilots.rate(settings, 0, 0.0) == pytest.approx(0.1)
        assert pilots.rate(settings, 50, 0.25) == 1.0
        assert pilots.rate(settings, 50, 0.75) == pytest.approx(0.5, abs=1e-5)
        assert 0 < pilots.rate(settings, 5000, 1.0) < 1e-5


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("pilots")
    words = ["--try", SMALL, "--try", f"digits-hybrid {SMALL}", "--try", f"{SMALL} learning_rate=1e9 clip=1e9"]
    limits = ["--steps", 8, "--seconds", 60, "--out", out, "--name", "first", "--device", "cpu"]
    assert call(pilots, "digits-density", *words, *limits) == 0
    return out


class TestRunning:
    def test_every_pilot_has_a_row_and_an_environment(self, made):
        found = read(made / "first.json")
        density, hybrid, failed = found.rows
        assert (density["preset"], density["settings"]) == ("digits-density", SMALL)
        assert (density["dataset"], density["task"], hybrid["task"]) == ("digits", "density", "hybrid")
        assert density["training rows"] == 1221 // 3
        assert (density["steps"], density["method"]) == (9, "exact")  # one warm-up step
        assert 2 < density["bits/dim"] < 6
        assert 0 < density["±"] < 0.2
        assert (density["error %"], 0 <= hybrid["error %"] <= 100) == (None, True)
        assert failed["note"].startswith("failed: the loss of step")
        assert [r["run"] for r in found.rows] == [0, 1, 2]
        assert all({"command", "hardware", "versions", "seconds"} <= set(r) for r in found.runs)
        assert {r["purpose"] for r in found.runs} == {"pilot"}
        assert found.runs[0]["engine"].startswith("eager")

    def test_later_pilots_are_appended(self, made, capsys):
        words = ("--try", f"{SMALL} seed=1", "--steps", 2, "--out", made, "--name", "first", "--device", "cpu")
        before = read(made / "first.json").rows
        assert call(pilots, "digits-density", *words) == 0
        rows = read(made / "first.json").rows
        assert rows[:-1] == before
        assert rows[-1]["settings"] == f"{SMALL} seed=1"
        out = capsys.readouterr().out
        assert f"digits-density  {SMALL} seed=1  {rows[-1]['bits/dim']:.4f} bits/dim  3 steps in " in out
        shown = [line for line in out.splitlines() if line.startswith("| digits")]
        assert len(shown) == 4
        assert "failed" in shown[-1]  # the best first

    def test_bits_per_dim_are_measured_on_validation_samples(self):
        experiment = tiny("digits-density")
        model, splits = Run.open(trained("digits-density")).model(), Run.open(trained("digits-density")).splits()
        found = pilots.validation_metrics(model, splits.validation, experiment)
        assert found["bits/dim"] == pytest.approx(density(model, splits.validation).value, abs=4 * found["±"])
        assert found["held-out rows"] == len(splits.validation)

    def test_beyond_64_dimensions_a_series_is_used(self, monkeypatch):
        model, splits = Run.open(trained("digits-density")).model(), Run.open(trained("digits-density")).splits()
        exact = pilots.validation_metrics(model, splits.validation, tiny("digits-density"))
        monkeypatch.setattr(pilots, "EXACT_UP_TO", 10)
        made = pilots.validation_metrics(model, splits.validation, tiny("digits-density"))
        assert made["method"] == "series of 30 terms"
        assert made["bits/dim"] == pytest.approx(exact["bits/dim"], abs=0.02)

    def test_a_pilot_without_time_left_is_not_started(self):
        row, _ = pilots.run(Pilot("digits-density"), Budget(end=time.time() + pilots.RESERVE - 1))
        assert row["note"] == "not started: no time left"

    @pytest.mark.slow
    def test_several_pilots_in_parallel(self, tmp_path):
        words = ["--try", SMALL, "--try", f"{SMALL} seed=1", "--steps", 2, "--jobs", 2, "--device", "cpu"]
        assert call(pilots, "digits-density", *words, "--out", tmp_path) == 0
        assert {r["settings"] for r in read(tmp_path / "pilots.json").rows} == {SMALL, f"{SMALL} seed=1"}

    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            (("digits-densty",), "unknown preset 'digits-densty'"),
            (("digits-density", "--try", "widht=3"), "widht"),
            (("digits-density", "--try", "a b"), "a pilot names at most one preset; got a, b. Settings are KEY=VALUE."),
            (("digits-density", "--jobs", "0"), "--jobs must be at least 1; got 0."),
            (("digits-density", "--part", "0"), "--part must be at least 1; got 0."),
            (("digits-density", "--seconds", "0"), "--seconds must be positive; got 0."),
            (("digits-density", "--list", "none.txt"), "none.txt"),
            (("mnist-flow", "--data-dir", "nowhere"), "was not found in nowhere"),
        ],
    )
    def test_a_mistake_exits_with_2_and_one_message(self, words, sentence, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        assert call(pilots, *words, "--out", tmp_path / "out", "--device", "cpu") == 2
        text = capsys.readouterr().err
        assert text.startswith("pilots: ")
        assert sentence in text
        assert not (tmp_path / "out").exists()


class TestTrial:
    def test_a_run_is_recorded_with_its_changed_settings(self, tmp_path, capsys):
        run = Run.open(trained("digits-density"))
        assert call(trial, run.folder, "--note", "a first try", "--results", tmp_path) == 0
        path = tmp_path / "recipes-digits-density.json"
        assert f"1 new in {path}" in capsys.readouterr().out
        (row,) = read(path).rows
        assert (row["preset"], row["note"], row["on"]) == ("digits-density", "a first try", "CPU")
        changes = row["settings"].split()
        assert {"network.blocks=[1,1]", "network.width=4", "training.steps=6", "training.batch=16"} <= set(changes)
        assert not any(c.startswith(("data.folder", "name", "about", "training.learning_rate")) for c in changes)
        assert (row["training rows"], row["steps"]) == (1389, 6)
        assert read(path).runs[0] == {**run.read_json("environment.json"), "purpose": "pilot"}

    def test_its_bits_per_dim_are_those_that_selected_its_weights(self, monkeypatch):
        run = Run.open(trained("digits-density"))
        row, _ = trial.of_run(run)
        validation = run.splits().validation
        assert row["bits/dim"] == run.best_metrics()["validation bits/dim"]
        assert row["bits/dim"] == pytest.approx(density(run.model("best"), validation).value, abs=0.03)
        assert (row["held-out rows"], row["method"], row["error %"]) == (len(validation), "exact", None)
        monkeypatch.setattr(trial, "EXACT_UP_TO", 8)
        assert trial.of_run(run)[0]["method"] == "a series whose rest is below 0.001 bits/dim"

    def test_a_classifier_has_an_error_and_a_hybrid_both(self):
        classifier, _ = trial.of_run(Run.open(trained("digits-classifier")))
        hybrid, _ = trial.of_run(Run.open(trained()))
        kept = checkpoint.load(trained("digits-classifier") / "best.safetensors").state
        assert classifier["error %"] == kept["validation error %"]
        assert classifier["bits/dim"] is None
        assert hybrid["bits/dim"] > 0
        assert hybrid["error %"] is not None

    def test_an_experiment_without_a_preset_lists_all_its_settings(self):
        own = replace(tiny("digits-density"), name="mine", training=replace(tiny().training, epochs=3, steps=99))
        preset, changes = trial.settings_of(own)
        assert preset == "none"
        assert "training.epochs=3" in changes
        assert not any(c.startswith("training.steps") for c in changes)
        assert trial.settings_of(find("iresnet164-c0.7")) == ("iresnet164-c0.7", [])
        assert trial._word((0.5, True)) == "[0.5,true]"

    def test_each_pilot_is_recorded_once(self, tmp_path):
        rows = [
            {"dataset": "mnist", "task": "density", "preset": "a", "settings": None, "bits/dim": 1.0, "run": 0},
            {"dataset": "mnist", "task": "density", "preset": "a", "settings": "b=1", "note": "failed: c", "run": 1},
            {"dataset": "cifar10", "task": "hybrid", "preset": "d", "settings": None, "error %": 9.0, "run": 2},
        ]
        runs = [{"date": i, "hardware": {"gpu": "a GPU"}} for i in range(3)]
        write(Results("pilots", rows, runs), tmp_path / "made")
        for _ in range(2):
            assert call(trial, tmp_path / "made" / "pilots.json", "--note", "n", "--results", tmp_path) == 0
        kept = read(tmp_path / "recipes-mnist-density.json")
        assert [(r["bits/dim"], r["note"], r["run"]) for r in kept.rows] == [(1.0, "n", 0), (None, "failed: c; n", 1)]
        assert {r["on"] for r in kept.rows} == {"a GPU"}
        assert read(tmp_path / "recipes-cifar10-hybrid.json").runs == [{**runs[2], "purpose": "pilot"}]
        # rows recorded on another machine are added unchanged
        assert call(trial, tmp_path / "recipes-mnist-density.json", "--results", tmp_path / "here") == 0
        assert read(tmp_path / "here" / "recipes-mnist-density.json") == kept

    def test_the_page_can_show_every_recorded_row(self, tmp_path):
        """Even if every trial failed: each column in the page's markers exists."""
        page = (ROOT / "docs" / "results" / "recipes.md").read_text()
        names = {line.split(":", 1)[1].split()[0] for line in page.splitlines() if line.startswith("<!-- results:rec")}
        assert "recipes-mnist-density" in names
        for name in names:
            _, dataset, task = name.split("-")
            row = {"dataset": dataset, "task": task, "preset": "p", "settings": None, "note": "failed: it is so"}
            trial.record([(row, {"hardware": {}})], tmp_path)
        (tmp_path / "table2.json").write_text((ROOT / "results" / "table2.json").read_text())
        assert tables.render(page, tmp_path).count("failed: it is so") == len(names) >= 6

    @pytest.mark.parametrize(
        ("name", "content", "sentence"),
        [
            ("x.json", json.dumps({"name": "x", "rows": [{"run": 0}], "runs": [{}]}), "is not a file of tools.pilots"),
            ("x.json", "{", "is not a results file"),
            ("nothing", None, "does not exist"),
        ],
    )
    def test_a_mistake_exits_with_2_and_one_message(self, name, content, sentence, tmp_path, capsys):
        if content is not None:
            (tmp_path / name).write_text(content)
        assert call(trial, tmp_path / name, "--results", tmp_path / "results") == 2
        text = capsys.readouterr().err
        assert text.startswith("trial: ")
        assert sentence in text
        assert not (tmp_path / "results").exists()

    def test_an_unfinished_run_is_rejected(self, tmp_path, capsys):
        folder = copy_of(trained("digits-density"), tmp_path / "run")
        (folder / "model.safetensors").unlink()
        assert call(trial, folder, "--results", tmp_path) == 2
        assert "is not finished. Resume it: iresnet train --resume --out" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_pilot_on_a_gpu():
    row, about = pilots.run(Pilot("digits-density", ("blocks=[1,1]", "width=16")), Budget(steps=30, device="cuda"))
    assert row.get("note") is None
    assert row["bits/dim"] < 4
    assert about["engine"].startswith("one CUDA graph")
