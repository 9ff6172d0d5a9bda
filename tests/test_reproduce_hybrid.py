"""Hybrid models at three weights, with the smoke budget."""

import io
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from iresnet.cli.console import Screen
from iresnet.cli.reproduce import show
from iresnet.plots import HybridPoint, plot_tradeoff
from iresnet.presets import PRESETS
from iresnet.reproduce import RESULTS, Job, Stopped, Work, cells, classification, evaluation, hybrid, job, table4
from iresnet.reproduce.cells import HYBRIDS
from iresnet.reproduce.experiments import experiment
from iresnet.results import Results, write
from iresnet.run import Run

POINT = HybridPoint("w=1", 2.0, 1.5, 2.5, 3.0, 0.1)
CLASSIFIER = {"error %": 1.25, "low": 1.0, "high": 1.5, "inverse": "not shown here"}
FLOW = {"bits/dim": 1.5, "bias bound": 0.0, "estimator error": 1e-3, "error over images": 0.01}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    work = Work(Job(out=tmp_path_factory.mktemp("paper")))
    return SimpleNamespace(work=work, out=work.job.out, outcome=RESULTS["hybrid"].run(work))


def entry(model, row, **more):
    named = {"dataset": "digits", "budget": "smoke", "recipe": "ours", "settings": [], "seed": 0}
    return {**named, "model": model, "row": row, "details": {}, **more}


# Cells


def test_a_cell_is_its_preset_with_another_weight():
    for dataset, preset in HYBRIDS.items():
        made = experiment(cells.find_cell(dataset, "w=10"), "short", "ours", seed=2)
        expected = PRESETS[preset]
        assert made.objective == replace(expected.objective, weight=10.0)
        assert (made.network, made.training, made.seed) == (expected.network, expected.training, 2)
        assert made.objective.kind == "hybrid"
    assert cells.to_label("W=.10") == "w=0.1"
    assert Job(out=Job().out).run_folder(cells.find_cell("mnist", "w=0.1"), 1).parts[-2:] == (
        "hybrid",
        "mnist-w0.1-seed1",
    )


def test_weights_of_the_plan():
    assert [str(c) for c in hybrid.PLAN.choose(Job(budget="short", datasets=("cifar10",)))] == [
        "cifar10 w=0.1",
        "cifar10 w=1",
        "cifar10 w=10",
    ]
    assert [str(c) for c in hybrid.PLAN.choose(Job(models=("w=3",)))] == ["digits w=3"]
    both = Job(budget="short", models=("w=3", "c=0.9", "flow"), datasets=("mnist",))
    assert [c.label for c in classification.TABLE2.plan.choose(both)] == ["c=0.9"]
    assert [c.label for c in table4.PLAN.choose(both)] == ["flow"]
    assert [c.label for c in hybrid.PLAN.choose(both)] == ["w=3"]


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        ({"models": ("c=0.9",)}, "hybrid has no cell c=0.9 on digits. Its cells are w=0.1, w=1, w=10."),
        ({"budget": "short", "datasets": ("cifar100",)}, "hybrid uses mnist, cifar10; got cifar100."),
        (
            {"overrides": ("objective.weight=3",)},
            "must not turn w=0.1 into another cell; got --set objective.weight=3.",
        ),
        ({"overrides": ("training.stepz=3",)}, "stepz"),
    ],
)
def test_invalid_requests_raise_before_training(job, sentence):
    with pytest.raises(ValueError, match=sentence):
        RESULTS["hybrid"].check(Job(**job))


def test_there_is_no_hybrid_on_cifar100():
    assert cells.find_cell("cifar100", "w=1") is None
    assert [cells.find_cell(dataset, "w=1").purpose for dataset in HYBRIDS] == ["hybrid"] * 3


# The result


def test_error_and_bits_of_one_network_for_every_weight(made):
    rows = {r["model"]: r for r in made.outcome.results.rows}
    assert list(rows) == ["w=0.1", "w=1", "w=10"]
    assert [r["weight"] for r in rows.values()] == [0.1, 1.0, 10.0]
    for row in rows.values():
        assert row["low"] < row["error %"] < row["high"]
        assert 1 < row["bits/dim"] < 2 * math.log2(17)
        assert 0 < row["estimator error"] <= table4.ERROR["smoke"]
        assert (row["images"], row["blocks proven"], row["bias bound"]) == (360, "2 of 2", 0.0)
    assert rows["w=0.1"]["bits/dim"] < rows["w=10"]["bits/dim"]  # what is asked for more is got


def test_metrics_are_those_of_the_final_weights(made):
    run = Run.open(made.out / "hybrid" / "digits-w1")
    kept = run.read_json("evaluation.json")
    row = made.outcome.results.rows[1]
    assert (kept["error"]["value"], kept["protocol"]["value"]) == (row["error %"], row["bits/dim"])
    model, test = run.model(), run.splits().test
    wrong = (model.logits(test.x.float() + 0.5).argmax(1) != test.y).float().mean()
    assert row["error %"] == pytest.approx(100 * float(wrong))


@pytest.mark.slow
def test_nothing_is_computed_twice_and_a_stopped_job_resumes(made, monkeypatch, tmp_path):
    def fail(*_, **__):
        raise AssertionError("made twice")

    with monkeypatch.context() as patch:
        for module, name in ((job, "start"), (job, "resume"), (table4, "protocol"), (evaluation.evaluate, "error")):
            patch.setattr(module, name, fail)
        again = RESULTS["hybrid"].run(Work(made.work.job))
    assert again.results.rows == made.outcome.results.rows
    one = Job(out=tmp_path, models=("w=1",), overrides=("training.steps=12",))
    looks = iter([False] * 4 + [True] * 100)  # before the cell, and after every step
    with pytest.raises(Stopped, match="digits w=1 stopped and saved at step 4 of 12"):
        RESULTS["hybrid"].run(Work(one, stop=lambda: next(looks)))
    assert RESULTS["hybrid"].run(Work(one)).results.rows[0]["steps"] == 12


def test_pure_networks_are_added_where_they_exist(made, tmp_path):
    out, runs = tmp_path, made.out / "hybrid"
    write(Results("table2", [], [entry("c=0.9", CLASSIFIER), entry("c=0.5", CLASSIFIER)]), out)
    flows = [entry("flow", {**FLOW, "bits/dim": 1.0}, budget="paper"), entry("flow", {**FLOW, "bits/dim": 9.0})]
    write(Results("table4", [], [*flows, entry("flow-small", FLOW)]), out)
    outcome = RESULTS["hybrid"].run(Work(Job(out=out, runs=runs)))
    rows = {r["model"]: r for r in outcome.results.rows}
    assert list(rows) == ["c=0.9", "flow-small", "w=0.1", "w=1", "w=10"]
    assert (rows["c=0.9"]["error %"], rows["c=0.9"].get("bits/dim")) == (1.25, None)
    assert (rows["flow-small"]["bits/dim"], rows["flow-small"].get("error %")) == (1.5, None)  # the best of its budget
    assert "inverse" not in rows["c=0.9"]
    kept = json.loads((out / "hybrid.json").read_text())["runs"]
    assert [r["details"].get("file") for r in kept[:2]] == ["table2.json", "table4.json"]
    show(Screen(width=80, file=(text := io.StringIO())), outcome)
    assert "…" not in text.getvalue()
    assert "the others are networks for one task each" in text.getvalue()


# The picture


def test_the_plot_is_not_empty(made):
    assert made.outcome.files == (made.out / "hybrid.json", made.out / "hybrid.png")
    with Image.open(made.out / "hybrid.png") as image:
        picture = np.asarray(image.convert("L"))
    assert picture.shape[1] > 1000
    assert 0.005 < (picture < 230).mean() < 0.9


def test_the_plot_shows_the_given_numbers(tmp_path, figures):
    other = HybridPoint("w=10", 1.0, 0.8, 1.2, 4.0, 0.1)
    plot_tradeoff([POINT, other], tmp_path / "a.png", images=100, classifier=("pure", 0.5), flow=("alone", 2.5))
    axes = figures[0].axes[0]
    assert [list(axes.lines[0].get_xdata()), list(axes.lines[0].get_ydata())] == [[2.0, 1.0], [3.0, 4.0]]
    assert {t.get_text() for t in axes.texts} == {"w=1", "w=10"}
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["pure", "alone"]
    lines = {line.get_label(): line for line in axes.lines}
    assert set(lines["pure"].get_xdata()) == {0.5}
    assert set(lines["alone"].get_ydata()) == {2.5}
    plot_tradeoff([POINT], tmp_path / "a.png", images=100)
    assert figures[1].axes[0].get_legend() is None


def test_an_empty_plot_raises(tmp_path):
    with pytest.raises(ValueError, match="points must hold at least one hybrid; got none."):
        plot_tradeoff([], tmp_path / "a.png", images=1)
