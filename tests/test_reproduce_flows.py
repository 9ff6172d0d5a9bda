"""The paper's results about flows with the smoke budget: Table 4, Figures 4, 5 and 9."""

import io
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from iresnet import cli, terms_needed
from iresnet.cli.console import Screen
from iresnet.cli.reproduce import show
from iresnet.data.builtin import schema_of
from iresnet.plots import SeriesLine, plot_bias, plot_convergence, series
from iresnet.presets import PRESETS
from iresnet.reproduce import RESULTS, Job, Work, cells, classification, figure5, job, record, table4
from iresnet.reproduce import series as shared
from iresnet.reproduce.cells import FLOWS
from iresnet.reproduce.experiments import experiment
from iresnet.run import Run

NAMES = ("table4", "figure4", "figure5", "figure9")
LINE = SeriesLine("a flow", (1, 2, 3), (0.1, -0.01, 0.0), (0.2, 0.2, 0.2), (1.0, 0.5, 0.2))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Every result of the budget smoke; its flow is shared."""
    work = Work(Job(out=tmp_path_factory.mktemp("paper")))
    return SimpleNamespace(work=work, out=work.job.out, outcomes={name: RESULTS[name].run(work) for name in NAMES})


# The paper's numbers and settings


def test_table_4_is_as_printed():
    assert {d: round(sum(v[d] for v in table4.PAPER.values()), 2) for d in ("mnist", "cifar10")} == {
        "mnist": 12.45,
        "cifar10": 28.15,
    }
    assert table4.PAPER["i-ResNet"] == {"mnist": 1.06, "cifar10": 3.45}
    entries = {e["model"]: e for e in table4.published_entries("cifar10")}
    assert entries["NICE"]["row"]["remark"] == "ZCA-whitened: not directly comparable"
    assert entries["Glow"]["row"] == {"bits/dim": None, "paper": 3.35, "remark": None}
    assert entries["Residual Flow"]["details"]["source"] == "published after the paper"
    assert "i-DenseNet" not in {e["model"] for e in table4.published_entries("mnist")}


def test_every_flow_has_a_preset_and_only_those_are_cells():
    for cell in FLOWS:
        assert PRESETS[cell.preset].objective.kind == cell.purpose == "density"
        assert cells.to_label(cell.label.upper()) == cell.label
    asked = Job(budget="short", datasets=("cifar10",), models=("flow-small",))
    with pytest.raises(ValueError, match="there is no flow-small on cifar10. Flows: digits flow, mnist flow"):
        RESULTS["table4"].check(asked)


def test_the_papers_recipe_is_that_of_appendix_c3():
    for dataset, terms in (("mnist", 10), ("cifar10", 5)):
        made = experiment(cells.find_cell(dataset, "flow"), "paper", "paper")
        t = made.training
        assert (t.optimiser, t.learning_rate, t.epochs, t.average, t.clip) == ("adamax", 0.003, 200, 0.0, math.inf)
        assert (made.network.estimator, made.network.terms, made.data.source) == ("series", terms, dataset)
        assert (made.network.probe, made.network.norm, made.network.norm_iterations) == (
            "gaussian",
            "power-iteration",
            5,
        )
        assert (made.network.activation, made.network.dequantiser, t.betas) == ("elu", 0, (0.9, 0.999))


def test_the_short_budget_is_the_unchanged_preset():
    made = experiment(
        cells.find_cell("mnist", "flow"), "short", "ours", seed=3, data_dir="here", overrides=["training.batch=32"]
    )
    preset = PRESETS["mnist-flow"]
    assert made.network == preset.network
    assert made.training == replace(preset.training, batch=32)
    assert (made.seed, made.data.folder) == (3, "here")


def test_results_of_flows_use_no_other_cells():
    short = Job(budget="short")
    assert [str(c) for c in table4.PLAN.choose(short)] == ["mnist flow", "cifar10 flow"]
    assert [str(c) for c in RESULTS["figure4"].plan.choose(short)] == ["mnist flow"]
    small = replace(short, models=("flow-small", "c=0.9"))
    assert [str(c) for c in table4.PLAN.choose(small)] == ["mnist flow-small"]
    assert [c.label for c in classification.TABLE2.plan.choose(small) if c.dataset == "mnist"] == ["c=0.9"]
    with pytest.raises(ValueError, match="table4 has no cell c=0.9 on mnist, cifar10. Its cells are flow."):
        RESULTS["table4"].check(replace(short, models=("c=0.9",)))
    with pytest.raises(ValueError, match="figure9 uses mnist; got cifar10."):
        RESULTS["figure9"].check(replace(short, datasets=("cifar10",)))


def test_unknown_settings_raise_before_training():
    with pytest.raises(ValueError, match="stepz"):
        RESULTS["figure5"].check(Job(overrides=("training.stepz=3",)))


# Every result at the size of seconds


def test_a_row_of_table_4_has_all_errors(made):
    (row,) = made.outcomes["table4"].results.rows
    assert (row["dataset"], row["model"], row["paper"], row["images"]) == ("digits", "flow", None, 360)
    assert 1 < row["bits/dim"] < math.log2(17)  # below 17 levels with equal chances
    assert 0 < row["estimator error"] <= 1e-2
    assert row["error of one image"] == pytest.approx(row["estimator error"] * math.sqrt(360))
    assert (row["method"], row["bias bound"]) == ("exact", 0.0)
    assert row["draws"] >= 2


def test_figures_4_and_9_share_one_measurement(made):
    four, nine = (made.outcomes[name].results.runs[0]["details"] for name in ("figure4", "figure9"))
    assert four == nine
    assert four["rows"] == 50
    row = made.outcomes["figure4"].results.rows[0]
    assert row["bias with 10 terms"] == four["bias"][9]
    assert abs(row["bias with 20 terms"]) < abs(row["bias with 5 terms"])
    assert row["deviation"] < row["Gaussian deviation"]
    nine_row = made.outcomes["figure9"].results.rows[0]
    assert nine_row["terms to 1e-4"] >= row["terms to 1e-3"]
    assert nine_row["largest bias with 20 terms"] <= four["bound"][19]
    assert nine_row["proven terms to 1e-4"] > nine_row["terms to 1e-4"]


def test_proven_terms_are_those_of_the_worst_block():
    def run(*blocks):
        content = {"blocks": [{"lipschitz": b, "input_shape": [4, 4, 4]} for b in blocks]}
        return SimpleNamespace(read_json=lambda name: content, schema=SimpleNamespace(dimension=64))

    share = 1e-4 * 64 * math.log(2) / 2
    assert shared.terms_proven(run(0.5, 0.9), 1e-4) == terms_needed(0.9, 64, share) > terms_needed(0.5, 64, share)
    assert shared.terms_proven(run(0.5, 1.2), 1e-4) is shared.terms_proven(run(None), 1e-4) is None


def test_every_sample_is_proven(made):
    row = made.outcomes["figure5"].results.rows[0]
    assert (row["samples"], row["proven"]) == (100, 100)
    assert 0 < row["largest block bound"] <= 1e-4
    assert row["seconds"] > 0
    with np.load(made.out / "figure5-digits-flow.npz") as kept:
        assert kept["x"].shape == (100, 1, 8, 8)


def test_samples_have_the_codes_that_were_drawn(made):
    run = Run.open(made.out / "table4" / "digits-flow")
    flow = run.model()
    with np.load(made.out / "figure5-digits-flow.npz") as kept, torch.no_grad():
        z = flow.double().transform(torch.from_numpy(kept["x"]).double())
    expected = run.model().base.rsample(100, torch.Generator().manual_seed(0)).detach()
    torch.testing.assert_close(z.float(), expected, atol=5e-3, rtol=0)


@pytest.mark.parametrize("name", ["figure4", "figure5", "figure9"])
def test_every_figure_writes_a_results_file_and_a_plot_that_is_not_empty(made, name):
    assert json.loads((made.out / f"{name}.json").read_text())["name"] == name
    with Image.open(made.out / f"{name}.png") as image:
        picture = np.asarray(image.convert("L"))
    assert picture.shape[1] > 1000
    assert len(np.unique(picture)) > 20
    assert 0.01 < (picture < 230).mean() < 0.9
    assert made.outcomes[name].files == (made.out / f"{name}.json", made.out / f"{name}.png")


def test_nothing_is_trained_or_measured_twice(made, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("made twice")

    for module, name in ((job, "start"), (job, "resume"), (table4, "protocol"), (shared, "truncation")):
        monkeypatch.setattr(module, name, fail)
    for name in ("table4", "figure4", "figure9"):
        again = RESULTS[name].run(Work(made.work.job))
        assert again.results.rows == made.outcomes[name].results.rows


def test_a_smaller_target_error_evaluates_again(made, monkeypatch):
    asked = []

    def watched(model, data, **limits):
        asked.append(limits)
        raise RuntimeError("enough")

    monkeypatch.setattr(table4, "protocol", watched)
    monkeypatch.setitem(table4.ERROR, "smoke", 1e-5)
    with pytest.raises(RuntimeError, match="enough"):
        RESULTS["table4"].run(Work(made.work.job))
    assert asked == [{"error": 1e-5}]


def test_published_values_are_added_to_the_file(made, tmp_path, monkeypatch):
    monkeypatch.setattr(table4, "cells_by_dataset", lambda cells: ["cifar10"])
    outcome = table4.RESULT.run(Work(Job(out=tmp_path, runs=made.out / "table4")))
    rows = outcome.results.rows
    assert [r["model"] for r in rows] == ["flow", *table4.PAPER, *table4.LATER]
    assert [r["budget"] for r in rows] == ["smoke", *["published"] * 9]
    assert all(r["bits/dim"] is None for r in rows[1:])
    assert rows[1 + list(table4.PAPER).index("Glow")]["paper"] == 3.35


@pytest.mark.parametrize(
    ("dataset", "label", "recipe", "overrides", "own"),
    [
        ("mnist", "flow", "paper", (), True),
        ("cifar10", "flow-appendix", "paper", ("training.epochs=80",), True),
        ("mnist", "flow", "ours", (), False),
        ("mnist", "flow-noise", "paper", (), False),
        ("cifar10", "flow-principal", "paper", (), False),
        ("cifar10", "flow", "paper", ("network.activation=sine",), False),
        ("mnist", "Glow", "paper", (), False),
        ("mnist", "flow", "paper", ("lipschitz=0.5",), False),
        ("mnist", "flow", "paper", ("terms=3",), False),
        ("mnist", "flow", "paper", ("learning_rate=0.1",), False),
        ("mnist", "flow", "paper", ("epochs=80", "validation=1000"), True),
    ],
)
def test_the_papers_value_stands_beside_its_own_network_and_recipe_alone(dataset, label, recipe, overrides, own):
    job = Job("paper", recipe=recipe, overrides=overrides)
    assert table4.is_papers_own(job, cells.find_cell(dataset, label)) == own


def test_a_row_says_whose_network_it_is_and_how_it_is_trained(made):
    cell = cells.find_cell("digits", "flow")
    row, _, _ = table4.measure_flow(made.work, made.work.get_run(cell, 0), cell)
    assert {key: row[key] for key in ("network", "activation", "estimator", "noise", "paper")} == {
        "network": "ours",
        "activation": "sine",
        "estimator": "series, 4 terms, rademacher",
        "noise": "uniform",
        "paper": None,
    }
    wanted = experiment(cells.find_cell("mnist", "flow-released"), "paper", "paper")
    run = SimpleNamespace(experiment=wanted, schema=schema_of("mnist"))
    assert table4.network_columns(run, cells.find_cell("mnist", "flow-released")) == {
        "network": "paper's script",
        "activation": "elu",
        "estimator": "series, 10 terms, gaussian",
        "noise": "uniform",
    }
    run = SimpleNamespace(experiment=replace(wanted, network=replace(wanted.network, width=8)), schema=run.schema)
    assert table4.network_columns(run, cells.find_cell("mnist", "flow-released"))["network"] == "ours"


def test_the_papers_words_are_given_for_its_own_dataset_alone(made):
    for measure, said in (
        (shared.measure_bias, "5 to 10"),
        (shared.measure_convergence, "negligible after 10, zero after 20"),
    ):
        run = Run.open(made.out / "table4" / "digits-flow")
        assert measure(made.work, run, replace(cells.find_cell("mnist", "flow"), paper=said))[0]["paper"] == said
        assert measure(made.work, run, cells.find_cell("digits", "flow"))[0]["paper"] is None
    assert figure5.PAPER.startswith("0.15 to 0.75 s")


# Pictures


def test_plots_of_series_have_one_panel_per_flow_and_at_least_one(tmp_path):
    for draw in (plot_bias, plot_convergence):
        with pytest.raises(ValueError, match="lines must hold at least one flow; got none."):
            draw([], tmp_path / "a.png", images=1)
        path = draw([LINE, LINE], tmp_path / "a.png", images=1000, dpi=50)
        with Image.open(path) as picture:
            assert picture.size == (2 * 280, 195)


def test_the_plot_shows_the_given_numbers(tmp_path, figures):
    plot_bias([LINE], tmp_path / "a.png", images=1000)
    plot_convergence([LINE], tmp_path / "a.png", images=1000)
    linear, sizes = (f.axes[0] for f in figures)
    assert list(linear.lines[-1].get_ydata()) == list(LINE.bias)
    assert sizes.get_yscale() == "log"
    bound, deviation, bias = (list(drawn.get_ydata()) for drawn in sizes.lines)
    assert (bound, deviation) == ([1.0, 0.5, 0.2], [0.2, 0.2, 0.2])
    assert bias == [0.1, 0.01, series.FLOOR]
    assert "1,000 test images" in figures[0].texts[1].get_text()


# The command


def test_the_command_prints_the_table(made, capsys, tmp_path):
    words = ["reproduce", "table4", "figure9", "--out", str(tmp_path), "--runs", str(made.out / "table4")]
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--device", "cpu"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "table4  digits flow: " in out
    assert f"{made.outcomes['table4'].results.rows[0]['bits/dim']:.4f}" in out
    assert str(tmp_path / "figure9.png") in out
    assert "…" not in out


def shown(outcome):
    show(Screen(width=80, file=(text := io.StringIO())), outcome)
    return text.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_a_table_fits_on_a_screen_with_the_papers_words(made, name):
    results = made.outcomes[name].results
    said = {"table4": 3.45, "figure5": figure5.PAPER, **shared.PAPER}[name]
    row = {**results.rows[0], "dataset": "cifar10", "model": "flow-appendix", "paper": said, "bias bound": 4.9e-5}
    text = shown(replace(made.outcomes[name], results=replace(results, rows=[row])))
    assert "…" not in text
    assert f"{said}".split()[0] in text
    assert name != "table4" or "4.9e-05" in text


def test_published_rows_do_not_widen_the_table(made):
    results = made.outcomes["table4"].results
    rows = [*results.rows, *record.rows_per_run(table4.published_entries("cifar10"))]
    runs = [*results.runs, *table4.published_entries("cifar10")]
    text = shown(replace(made.outcomes["table4"], results=replace(results, rows=rows, runs=runs)))
    assert "published" not in text.partition("bits per dimension; paper")[0]
    assert "Residual Flow" in text
    assert "3.28" in text
