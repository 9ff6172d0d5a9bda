"""The paper's tables and figures with the smoke budget: cells, stored metrics, plots and errors."""

import json
import math
import os
import sys
from dataclasses import replace
from itertools import combinations, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image
from torch import nn

from iresnet import Chain, InjectivePad, cli, presets, results
from iresnet.cli.console import console
from iresnet.cli.reproduce import show
from iresnet.data.builtin import schema_of
from iresnet.models.unconstrained import UnconstrainedBlock
from iresnet.plots import (
    DecayLine,
    ImageRow,
    SpectrumLine,
    images,
    lines,
    plot_image_rows,
    plot_reconstruction_error,
    plot_spectra,
)
from iresnet.reproduce import (
    RESULTS,
    Job,
    Reproduction,
    Stopped,
    Work,
    cells,
    classification,
    evaluation,
    figure6,
    find,
    reconstruction,
    record,
)
from iresnet.reproduce import job as jobs
from iresnet.reproduce.cells import DATASETS
from iresnet.reproduce.experiments import EPOCHS, experiment
from iresnet.reproduce.iteration import Algorithm1, _leaves
from iresnet.reproduce.reconstruction import _load_images, _remark, _save_images
from iresnet.results import Results, nonfinite_to_none
from iresnet.run import Run
from iresnet.run.releasing import publish
from iresnet.run.room import FILES
from iresnet.train import checkpoint
from tests.runs import copy_of

FIGURES = ["figure3", "figure6", "figure7", "figure8"]  # those of flows: test_reproduce_flows.py
PLANS = [RESULTS[name].plan for name in ("table2", "figure3", "figure6", "figure7", "figure8")]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Every result of the budget smoke, its cells shared."""
    work = Work(Job(out=tmp_path_factory.mktemp("paper")))
    outcomes = {name: RESULTS[name].run(work) for name in ("table2", *FIGURES)}
    return SimpleNamespace(work=work, out=work.job.out, outcomes=outcomes)


def copied(made, tmp_path, *names):
    """A job whose folder begins with some of the results that are there already, and their runs."""
    for name in names:
        (tmp_path / f"{name}.json").write_bytes((made.out / f"{name}.json").read_bytes())
    return Job(out=tmp_path, runs=made.out / "table2")


# Algorithm 1


def linear(a):
    """The block x + a x on the line, with a channel of zeros beside it."""
    layer = nn.Conv2d(2, 2, 1, bias=False)
    layer.weight.data.copy_(a * torch.eye(2)[:, :, None, None])
    return SimpleNamespace(transform=Chain(InjectivePad(1), UnconstrainedBlock(nn.Sequential(layer))))


@pytest.mark.parametrize("n", [1, 3, 10])
@pytest.mark.parametrize("a", [0.5, -0.25, 2.0])
def test_the_error_of_a_linear_block_is_a_power_of_its_slope(a, n):
    x, algorithm = torch.ones(3, 1, 1, 1, dtype=torch.float64), Algorithm1(linear(a))
    errors = algorithm.decode(algorithm.encode(x), n).errors(x)
    assert errors.tolist() == pytest.approx([abs(a) ** (n + 1)] * 3, rel=1e-9)


@pytest.mark.parametrize(("a", "converged", "diverged"), [(0.5, True, False), (2.0, False, True), (0.99, False, False)])
def test_convergence_and_divergence_are_reported_per_sample(a, converged, diverged):
    algorithm = Algorithm1(linear(a))
    rebuilt = algorithm.decode(algorithm.encode(torch.ones(2, 1, 1, 1)), 100)
    assert rebuilt.converged.tolist() == [converged] * 2
    assert rebuilt.diverged.tolist() == [diverged] * 2


def test_an_overflow_in_one_sample_does_not_affect_the_others():
    algorithm = Algorithm1(linear(1e10))
    rebuilt = algorithm.decode(algorithm.encode(torch.tensor([1.0, 0.0]).reshape(2, 1, 1, 1)), 100)
    assert rebuilt.x.isnan().flatten().tolist() == [True, False]
    assert rebuilt.errors(torch.zeros(2, 1, 1, 1)).tolist() == [math.inf, 0]
    assert rebuilt.diverged.tolist() == [True, False]


def test_an_error_whose_square_overflows_is_infinite_and_not_the_largest_number():
    rebuilt = Algorithm1(linear(1e10)).decode(torch.ones(1, 2, 4, 4, dtype=torch.float64), 20)
    assert rebuilt.x.isfinite().all()
    assert rebuilt.errors(torch.zeros(1, 1, 4, 4)).tolist() == [math.inf]


def test_zero_iterations_and_transforms_that_are_no_chain_raise():
    with pytest.raises(ValueError, match="iterations must be at least 1; got 0."):
        Algorithm1(linear(0.5)).decode(torch.ones(1, 2, 1, 1), 0)
    composite = SimpleNamespace(parts=lambda: [1])
    with pytest.raises(ValueError, match="Algorithm 1 needs a chain of blocks; got a SimpleNamespace."):
        list(_leaves(composite))


@pytest.mark.parametrize(
    ("converged", "diverged", "sentence"),
    [
        (4, 0, "the iteration converges"),
        (1, 0, "the iteration converges for 1 of 4"),
        (1, 3, "the iteration diverges for 3 of 4"),
        (1, 2, "the iteration diverges for 2 of 4 and converges for 1"),
        (0, 2, "the iteration diverges for 2 of 4 and converges for none"),
        (0, 4, "the iteration diverges"),
    ],
)
def test_convergence_of_the_iteration_is_described_in_words(converged, diverged, sentence):
    assert evaluation.describe_iteration({"images": 4, "converged": converged, "diverged": diverged}) == sentence


# The paper's numbers and settings


def test_every_cell_of_table_2_has_the_papers_number():
    numbers = {(d, m): v for d, row in classification.PAPER2.items() for m, v in row.items() if v is not None}
    assert {(c.dataset, c.label) for c in classification.TABLE2.plan.choose(Job(budget="paper"))} == set(numbers)
    assert len(numbers) == 20
    assert [numbers[d, "c=0.9"] for d in DATASETS] == [0.40, 6.78, 24.58]
    assert [numbers[d, "vanilla"] for d in DATASETS] == [0.38, 6.69, 23.97]
    assert numbers["cifar10", "ResNet-164"] == 5.50
    assert round(sum(numbers.values()), 2) == 232.65  # the sum of the printed table


@pytest.mark.parametrize("budget", ["short", "paper"])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_every_cell_is_an_experiment(plan, budget):
    job = Job(budget=budget)
    for cell in plan.choose(job):
        made = job.experiment(cell, seed=3)
        assert (made.seed, made.data.source, made.training.epochs) == (3, cell.dataset, EPOCHS[budget][cell.dataset])
        if number := cells.parse_number(cell.label):
            assert made.network.lipschitz == pytest.approx(number[1] ** 3)


def test_the_papers_recipe_is_that_of_appendix_c2():
    made = experiment(cells.find_cell("cifar10", "c=0.9"), "paper", "paper")
    training = replace(made.training, steps=200)
    rates = [training.learning_rate_at(epoch) for epoch in (0, 9, 10, 59, 60, 119, 120, 159, 160, 199)]
    assert rates == pytest.approx([0.01, 0.1, 0.1, 0.1, 0.02, 0.02, 0.004, 0.004, 0.0008, 0.0008])
    assert (training.optimiser, training.momentum, training.nesterov) == ("sgd", 0.9, False)
    assert training.weight_decay == training.head_decay == training.other_decay == 5e-4
    small = experiment(cells.find_cell("digits", "c=0.9"), "smoke", "paper").training
    assert (small.nesterov, small.warmup, small.warmup_steps) == (False, 0.05, 2)
    assert experiment(cells.find_cell("digits", "c=0.9"), "smoke", "ours").training.warmup == 5
    mnist = experiment(cells.find_cell("mnist", "c=0.9"), "paper", "paper").data
    assert [(d.flip, d.shift, d.border) for d in (made.data, mnist)] == [(True, 4, "mirror"), (False, 2, "blank")]
    # The paper trains on all training images; a run needs some to validate on.
    assert made.data.validation == mnist.validation == 100
    # Neither cutout nor smoothing, which are ours; 8x8 digits would vanish behind the cutout of a photograph.
    assert (made.data.cutout, made.objective.label_smoothing) == (0, 0)
    ours = experiment(cells.find_cell("cifar10", "c=0.9"), "short", "ours")
    assert (ours.data.cutout, ours.objective.label_smoothing) == (8, 0.1)
    assert experiment(cells.find_cell("cifar10", "c=0.9"), "smoke", "ours").data.cutout == 0
    assert Job(budget="paper").recipe == "paper"
    assert Job(budget="short").recipe == "ours"


def test_overrides_of_the_user_are_applied_last():
    job = Job(budget="short", overrides=("training.epochs=7", "batch=64"), data_dir="/data/elsewhere")
    made = job.experiment(cells.find_cell("cifar100", "vanilla"), 0)
    assert (made.training.epochs, made.training.batch, made.data.folder) == (7, 64, "/data/elsewhere")


@pytest.mark.parametrize("budget", ["short", "paper"])
@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("figure3", ["c=0.9", "vanilla", "BatchNorm"]),
        ("figure6", ["vanilla", "BatchNorm", "c=0.9", "c=0.7", "c=0.5", "c=0.3"]),
        ("figure8", ["c=0.9", "c=0.8", "c=0.7", "c=0.6", "c=0.5"]),
    ],
)
def test_a_figure_shows_all_networks_of_the_paper(name, labels, budget):
    job = Job(budget=budget)
    chosen = RESULTS[name].plan.choose(job)
    assert [(c.dataset, c.label) for c in chosen] == [("cifar10", label) for label in labels]
    normalisations = {c.label: job.experiment(c, 0).network.normalisation for c in chosen}
    assert [label for label, word in normalisations.items() if word == "batchnorm"] == [
        label for label in labels if label == "BatchNorm"
    ]


def test_a_figure_uses_its_own_cells_among_those_requested_and_table_2_uses_all():
    job = Job(budget="short", models=("c=.9", "batchnorm", "c=0.3"))
    assert [str(c) for c in reconstruction.FIGURE8.plan.choose(job)] == ["cifar10 c=0.9"]
    assert [c.label for c in figure6.PLAN.choose(job)] == ["c=0.9", "BatchNorm", "c=0.3"]
    assert [str(c) for c in classification.TABLE2.plan.choose(job)][:3] == [
        "mnist c=0.9",
        "mnist c=0.3",
        "cifar10 c=0.9",
    ]
    on_mnist = figure6.PLAN.choose(Job(budget="short", datasets=("mnist",)))
    assert [c.label for c in on_mnist] == ["vanilla", "c=0.9", "c=0.7", "c=0.5", "c=0.3"]


# Every result at the size of seconds


def test_table_2_has_a_row_for_every_cell(made):
    rows = {r["model"]: r for r in made.outcomes["table2"].results.rows}
    assert list(rows) == ["ResNet-164", "vanilla", "c=0.9", "c=0.5"]
    for row in rows.values():
        assert row["low"] < row["error %"] < row["high"]
        assert row["paper"] is None  # it has no digits
        assert row["parameters"] > 1000
        assert row["steps"] == 30
    assert rows["c=0.9"]["blocks proven"] == "3 of 3"
    assert rows["c=0.9"]["largest Lip(g)"] <= 0.729
    assert rows["c=0.9"]["inverse"] == "32 of 32 proven, float64"
    assert rows["c=0.9"]["measured error"] < 1e-8
    assert rows["c=0.9"]["error after 100 steps"] < 1e-8
    assert rows["vanilla"]["error after 100 steps"] > 0
    assert (rows["vanilla"]["measured error"], rows["ResNet-164"]["error after 100 steps"]) == (None, None)
    assert rows["vanilla"]["largest Lip(g)"] > 1
    assert rows["vanilla"]["inverse"].startswith("the iteration ")
    assert rows["ResNet-164"]["inverse"].startswith("none")


def test_a_row_says_its_recipe_length_and_number_of_seeds(made):
    for row in made.outcomes["table2"].results.rows:
        assert (row["recipe"], row["epochs"], row["steps"], row["seeds"]) == ("ours", None, 30, 1)


def test_a_run_records_its_provenance(made):
    run = made.outcomes["table2"].results.runs[0]
    assert {"command", "commit", "seconds", "hardware", "versions", "date", "budget", "recipe", "settings"} <= set(run)


@pytest.mark.parametrize("name", ["table2", "figure8"])
def test_an_entry_holds_every_setting_of_its_run(made, name, tmp_path):
    for run in made.outcomes[name].results.runs:
        cell = cells.find_cell(run["dataset"], run["model"])
        trained = Run.open(made.work.job.run_folder(cell, run["seed"])).experiment
        (tmp_path / "again.toml").write_text("\n".join(run["experiment"]))
        assert presets.read(tmp_path / "again.toml") == replace(trained, data=replace(trained.data, folder="data"))


def test_every_setting_survives_except_the_folder_of_the_data(tmp_path):
    odd = experiment(cells.find_cell("cifar10", "c=0.5"), "paper", "paper", data_dir="/home/me/data", seed=7)
    lines = record.settings_lines(Run(tmp_path, odd, schema_of("cifar10")))
    assert (odd.training.clip, odd.data.folder) == (math.inf, "/home/me/data")
    assert not any("/home/me" in line for line in json.loads(json.dumps(lines, allow_nan=False)))
    (tmp_path / "again.toml").write_text("\n".join(lines))
    again = presets.read(tmp_path / "again.toml")
    assert again == replace(odd, data=replace(odd.data, folder="data"))
    assert len(lines) > sum(len(vars(getattr(odd, group))) for group in ("data", "network", "training"))


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_writes_a_results_file_and_a_plot_that_is_not_empty(made, name):
    assert json.loads((made.out / f"{name}.json").read_text())["name"] == name
    with Image.open(made.out / f"{name}.png") as image:
        picture = np.asarray(image.convert("L"))
    assert picture.shape[1] > 1000
    assert len(np.unique(picture)) > 20
    assert 0.01 < (picture < 200).mean() < 0.9
    assert made.outcomes[name].files == (made.out / f"{name}.json", made.out / f"{name}.png")


@pytest.mark.parametrize("name", ["figure3", "figure7"])
def test_an_i_resnet_reconstructs_its_images(made, name):
    rows = {r["model"]: r for r in made.outcomes[name].results.rows}
    assert rows["c=0.9"]["iteration"] == "converges"
    assert rows["c=0.9"]["largest error"] < 1e-9
    assert set(rows) == {"c=0.9", "vanilla"} | ({"BatchNorm"} if name == "figure3" else set())


def test_no_layer_of_an_i_resnet_exceeds_its_coefficient(made):
    for e in made.outcomes["figure6"].results.runs:
        layers = e["details"]["layers"]
        assert len(layers) == 9
        assert all(v["estimate"] <= v["bound"] * (1 + 1e-6) for v in layers)
        if e["model"].startswith("c="):
            assert max(v["bound"] for v in layers) <= float(e["model"][2:])
        # Of the three convolutions of a block the last has no BatchNorm after it.
        folded = [v["folded"] is not None for v in layers]
        assert folded == ([True, True, False] * 3 if e["model"] == "BatchNorm" else [False] * 9)


def test_batchnorm_is_folded_into_the_convolution_before_it():
    conv, norm = nn.Conv2d(2, 2, 1, bias=False), nn.BatchNorm2d(2, eps=0)
    conv.weight.data.copy_(torch.eye(2)[:, :, None, None])
    norm.running_var.copy_(torch.tensor([0.25, 4.0]))
    norm.weight.data.fill_(3.0)
    block = UnconstrainedBlock(nn.Sequential(conv, norm))
    (layer,) = figure6.convolution_norms(SimpleNamespace(transform=Chain(block)), (2, 4, 4))
    assert layer["bound"] == pytest.approx(1, rel=1e-6)
    assert layer["folded"] == pytest.approx(6, rel=1e-6)


def test_fewer_iterations_suffice_for_a_smaller_coefficient_and_errors_shrink_at_once(made):
    runs = {e["model"]: e for e in made.outcomes["figure8"].results.runs}
    for e in runs.values():
        errors, bound = e["details"]["mean_error"], e["row"]["largest Lip(g)"]
        assert e["details"]["iterations"][: len(errors)] == list(range(1, len(errors) + 1))
        assert all(b < a for a, b in pairwise(errors[:8]))
        assert errors[4] < errors[0] * bound**3
    assert runs["c=0.5"]["row"]["iterations to 1e-6"] < runs["c=0.9"]["row"]["iterations to 1e-6"]


def test_iterations_are_compared_with_those_at_a_larger_coefficient():
    def entry(c, iterations):
        return {
            **dict.fromkeys(record.KEYS, "x"), "model": f"c={c}", "settings": [],
            "row": {"iterations to 1e-6": iterations, "paper": "5 to 20"},
        }  # fmt: skip

    rows = reconstruction.rows_with_ratio([entry(0.9, 20), entry(0.8, 15), entry(0.7, 11)])
    assert [r["of those at c + 0.2"] for r in rows] == [None, None, 0.55]
    assert [r["paper, of those at c + 0.2"] for r in rows] == [None, None, "about 0.5"]


# What is kept


def test_nothing_is_trained_or_read_twice(made, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("made twice")

    for name in ("start", "resume"):
        monkeypatch.setattr(jobs, name, fail)
    monkeypatch.setattr(evaluation, "_evaluate", fail)
    again = RESULTS["table2"].run(Work(made.work.job))
    assert again.results.rows == made.outcomes["table2"].results.rows


def run_of(made, tmp_path, model="c=0.9"):
    """A job of one cell, whose run folder is a copy."""
    cell = cells.find_cell("digits", model)
    copy_of(made.work.job.run_folder(cell, 0), tmp_path / "runs" / cell.folder)
    return Job(out=tmp_path, runs=tmp_path / "runs", models=(model,)), tmp_path / "runs" / cell.folder


def test_metrics_of_a_subsample_are_not_used_for_the_table(made, tmp_path):
    job, folder = run_of(made, tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(["evaluate", str(folder), "--rows", "5", "--device", "cpu"])
    assert stop.value.code == 0
    assert json.loads((folder / "evaluation.json").read_text())["rows"] == 5
    (row,) = RESULTS["table2"].run(Work(job)).results.rows
    assert row == {**made.outcomes["table2"].results.rows[2], "run": 0}


def test_metrics_are_deleted_when_the_model_is_replaced(made, tmp_path):
    _, folder = run_of(made, tmp_path)
    run = Run.open(folder)
    publish(run, run.model(), None, run.splits().validation, {})
    assert not (folder / "reproduction.json").exists()
    assert "reproduction.json" in FILES


def test_metrics_under_their_former_file_name_are_read_and_deleted(made, tmp_path):
    _, folder = run_of(made, tmp_path)
    run = Run.open(folder)
    known = run.read_json("reproduction.json")
    assert known
    (folder / "reproduction.json").rename(folder / "judgement.json")
    assert run.read_json("reproduction.json") == known
    publish(run, run.model(), None, run.splits().validation, {})
    assert not (folder / "judgement.json").exists()
    assert run.read_json("reproduction.json") == {}


@pytest.mark.slow
def test_a_stopped_run_resumes_to_the_same_weights(made, tmp_path):
    cell, asked = cells.find_cell("digits", "c=0.9"), iter(range(1000))
    job = Job(out=tmp_path)
    with pytest.raises(Stopped, match=r"digits c=0.9 stopped and saved at step \d+ of 30"):
        Work(job, stop=lambda: next(asked) > 12).get_run(cell, 0)
    run = Work(job).get_run(cell, 0)
    there, here = (checkpoint.load(f / "model.safetensors").tensors["weights"]
                   for f in (made.work.job.run_folder(cell, 0), run.folder))  # fmt: skip
    assert all(torch.equal(there[name], here[name]) for name in there)


def test_a_finished_run_reads_the_requested_dataset_directory(made):
    job = replace(made.work.job, data_dir="elsewhere")
    run = Work(job).get_run(cells.find_cell("digits", "c=0.9"), 0)
    assert run.experiment.data.folder == "elsewhere"


def test_a_job_stopped_between_cells_names_the_next_cell(made):
    with pytest.raises(Stopped, match="digits ResNet-164 was not begun"):
        RESULTS["table2"].run(Work(made.work.job, stop=lambda: True))


def test_entries_of_other_machines_are_kept_and_entries_of_the_same_cell_are_replaced(made, tmp_path):
    job = copied(made, tmp_path, "table2")
    path = tmp_path / "table2.json"
    content = json.loads(path.read_text())
    other_machine = {**content["runs"][0], "dataset": "cifar10", "budget": "paper", "hardware": "another machine"}
    old = {**content["runs"][3], "row": {**content["runs"][3]["row"], "error %": -1.0}}
    path.write_text(json.dumps({**content, "runs": [*content["runs"][:3], old, other_machine]}))
    results = RESULTS["table2"].run(Work(replace(job, models=("c=0.5",)))).results
    assert [(r["dataset"], r["model"]) for r in results.rows][3:] == [("digits", "c=0.5"), ("cifar10", "ResNet-164")]
    assert results.rows[3] == made.outcomes["table2"].results.rows[3]
    assert results.runs[4]["hardware"] == "another machine"


def test_several_seeds_give_a_mean_and_a_standard_deviation():
    def entry(seed, error, bound):
        head = {"dataset": "cifar10", "model": "c=0.9", "budget": "short", "recipe": "ours", "settings": ["a=1"]}
        row = {
            "error %": error,
            "largest Lip(g)": bound,
            "paper": 6.78,
            "inverse": f"{seed}",
            "blocks proven": "3 of 3",
            "low": error - 0.5,
            "high": error + 0.5,
        }
        return {**head, "seed": seed, "row": row}

    row, other = record.rows_per_cell(
        [entry(0, 6.0, 0.7), entry(1, 8.0, 0.6), {**entry(0, 5.0, 0.1), "budget": "paper"}]
    )
    assert (row["error %"], row["spread"], row["seeds"]) == (7.0, pytest.approx(math.sqrt(2)), 2)
    assert (row["largest Lip(g)"], row["paper"], row["blocks proven"]) == (0.7, 6.78, "3 of 3")
    assert (row["inverse"], row["settings"], row["run"], row["runs"]) == ("0 / 1", "a=1", 0, [0, 1])
    assert (row["low"], row["high"]) == (None, None)  # no interval is the mean of others
    assert (other["spread"], other["seeds"], other["run"]) == (None, 1, 2)
    assert (other["low"], other["high"]) == (4.5, 5.5)


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("measured error", [3.270756796337088e-12, None, None], "3.271e-12 (1 of 3 seeds)"),
        ("measured error", [None, 1.0, 2.0], "2 (2 of 3 seeds)"),  # the worst
        ("error %", [1.0, 2.0, None], "1.5 (2 of 3 seeds)"),
        ("error %", [1.0, 2.0], 1.5),
        ("measured error", [1.0, 2.0], 2.0),
        ("paper", [None, None], None),
        ("inverse", ["proven", None], "proven / -"),
        ("inverse", ["proven", "proven"], "proven"),
        ("blocks proven", ["8 of 21", "9 of 21"], "8 of 21 / 9 of 21"),
        ("certified", [True, False], "yes / no"),
    ],
)
def test_values_of_several_seeds_read_well_where_some_are_missing(name, values, text):
    assert record._mean(name, values) == text


def test_the_printed_table_shows_budget_recipe_settings_and_the_spread_over_seeds(capsys):
    head = {"dataset": "cifar10", "model": "c=0.9", "budget": "short", "recipe": "ours", "run": 0}
    row = {
        **head, "error %": 7.0, "paper": 6.78, "spread": 0.25, "seeds": 3, "change by tightening": -0.01, "epochs": 200,
        "blocks proven": "54 of 54", "largest Lip(g)": 0.72891, "error after 100 steps": 1.23e-10,
    }  # fmt: skip
    show(
        console(),
        Reproduction(Results("table2", [row, {**row, "model": "ResNet-164"}], [{}]), classification.COLUMNS2, ()),
    )
    out = capsys.readouterr().out
    words = ("7.00", "± 0.25", "3 seeds", "-0.01", "6.78", "54 of 54", "1.2e-10", "cifar10", "ResNet-164")
    assert all(word in out for word in words)
    assert "…" not in out
    assert out.endswith("trained with budget short, recipe ours, settings unchanged\n")
    show(
        console(),
        Reproduction(Results("table2", [row, {**row, "settings": "epochs=7"}], [{}]), classification.COLUMNS2, ()),
    )
    out = capsys.readouterr().out
    assert "trained with a: budget short, recipe ours, settings unchanged; b: budget short, recipe ours" in out
    assert "…" not in out
    assert out.count("6.78") == 2


def test_a_figure_reports_that_it_uses_the_first_seed_alone(made):
    said = []
    RESULTS["figure8"].run(Work(replace(made.work.job, seeds=(0, 1), models=("c=0.9",)), say=said.append))
    assert said[0] == "figure8 uses the first seed alone, 0"


def test_json_has_none_for_values_that_are_not_finite():
    assert nonfinite_to_none({"a": [math.inf, 1.0], "b": (math.nan, "c")}) == {"a": [None, 1.0], "b": [None, "c"]}


def test_saved_images_of_another_job_are_dropped(tmp_path):
    path, originals = tmp_path / "a.npz", np.zeros((1, 1, 2, 2), np.uint8)
    _save_images(path, "short", originals, "vanilla", originals + 1)
    _save_images(path, "short", originals, "c=0.9", originals + 2)
    assert set(_load_images(path)) == {"mark", "originals", "vanilla", "c=0.9"}
    _save_images(path, "paper", originals, "c=0.9", originals)
    assert set(_load_images(path)) == {"mark", "originals", "c=0.9"}


# Pictures


def test_nan_pixels_are_grey_and_clipping_is_mentioned(tmp_path):
    original = torch.full((1, 3, 4, 4), 100, dtype=torch.uint8)
    rebuilt = torch.full((1, 3, 4, 4), math.nan)
    assert (images._tiles(rebuilt, 256, False) == images.GREY).all()
    assert (images._tiles(original, 256, False) == 100).all()
    said = [
        images._describe_outside([ImageRow("", "", t)], 256)
        for t in (original, original + 0.5, rebuilt, original + 300.0)
    ]
    assert [len(s) for s in said] == [0, 0, 1, 1]
    assert "Grey" in said[2][0]
    assert "clipped" in said[3][0]
    with pytest.raises(ValueError, match=r"rows must hold images of one shape; got \[\(1, 3, 4, 4\), \(1, 3, 4, 2\)\]"):
        plot_image_rows(
            [ImageRow("", "", original), ImageRow("", "", original[..., :2])], tmp_path / "a.png", levels=256
        )


def test_empty_plots_raise_and_large_norms_use_a_logarithmic_scale(tmp_path):
    with pytest.raises(ValueError, match="lines must hold at least one network; got none."):
        plot_spectra([], tmp_path / "a.png")
    with pytest.raises(ValueError, match="lines must hold at least one network; got none."):
        plot_reconstruction_error([], tmp_path / "a.png", images=1)
    path = plot_spectra([SpectrumLine("vanilla", None, [0.1, 100.0], [0.1, 99.0])], tmp_path / "a.png", dpi=50)
    with Image.open(path) as picture:
        assert picture.size == (235, 190)


@pytest.mark.parametrize("coefficients", [(None,), (0.9,), (None, 0.9)])
def test_texts_of_a_plot_do_not_overlap(coefficients, tmp_path, figures):
    plot_spectra([SpectrumLine("a", c, [0.1, 2.0], [0.1, 1.9]) for c in coefficients], tmp_path / "a.png")
    boxes = [text.get_window_extent(FigureCanvasAgg(figures[0]).get_renderer()) for text in figures[0].texts]
    assert len(boxes) == 2 + len(coefficients)
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


@pytest.mark.parametrize("top", [2.0, 200.0])
def test_names_of_all_networks_of_figure_6_have_room(top, tmp_path, figures):
    free = [SpectrumLine(name, None, [0.1, 1.0, top], [0.1, 1.0, top]) for name in ("vanilla", "BatchNorm")]
    constrained = [SpectrumLine(f"c={c}", c, [0.1, c, c], [0.1, c, c]) for c in (0.9, 0.7, 0.5, 0.3)]
    plot_spectra([*free, *constrained], tmp_path / "a.png")
    renderer = FigureCanvasAgg(figures[0]).get_renderer()
    names = [text.get_window_extent(renderer) for axes in figures[0].axes for text in axes.texts]
    others = [axes.get_window_extent(renderer) for axes in figures[0].axes]
    assert len(names) == 6
    assert not any(a.overlaps(b) for a, b in combinations([*names, *others], 2))
    assert max(box.x1 for box in names) <= figures[0].bbox.x1


def test_the_slope_is_not_called_a_proof_and_the_legend_is_above_the_axes(tmp_path, figures):
    shown = [DecayLine(f"c={c}", [1, 2, 50], [3.0, c, 1e-9], c**3) for c in (0.9, 0.8, 0.7, 0.6, 0.5)]
    plot_reconstruction_error(shown, tmp_path / "a.png", images=64)
    renderer, (axes,) = FigureCanvasAgg(figures[0]).get_renderer(), figures[0].axes
    words = " ".join(text.get_text() for text in figures[0].texts)
    assert "dashes: slope Lip(g) per step, for comparison" in words
    assert "proven" not in words
    legend = axes.get_legend().get_window_extent(renderer)
    assert legend.y0 >= axes.get_window_extent(renderer).y1 - 1
    assert legend.x0 > 0
    assert not any(legend.overlaps(text.get_window_extent(renderer)) for text in figures[0].texts)


def test_the_gap_to_the_estimates_is_rounded_up():
    assert "at most 0.22 lower" in lines._describe_gap([SpectrumLine("a", None, [1.0, 2.0], [0.789, 1.9])])


def test_a_plot_states_the_epochs_of_networks_that_differ_in_them():
    short, long = ({"epochs": n, "row": {"iteration": "converges", "median error": 0.5}} for n in (12, 110))
    assert _remark(short, [short, short]) == ["converges", "l2 error 5.0e-01"]
    assert _remark(short, [short, long])[2:] == ["trained for 12 epochs"]
    assert record.rows_per_run([{**dict.fromkeys(record.KEYS, "x"), "settings": [], **long}])[0]["epochs"] == 110


# What is refused


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("c=1.2", r"c is a layer's coefficient, in \(0, 1\); got 'c=1.2'"),
        ("c=0", r"c is a layer's coefficient, in \(0, 1\); got 'c=0'"),
        ("c=-0.9", r"c is a layer's coefficient, in \(0, 1\); got 'c=-0.9'"),
        ("c=nine", r"c is a layer's coefficient, in \(0, 1\); got 'c=nine'"),
        ("c=0.9999999", r"c is a layer's coefficient, in \(0, 1\); got"),  # six digits of it are 1
        ("w=-1", "w is the weight of the cross-entropy, a finite number above 0; got 'w=-1'. Use e.g. w=1."),
        *((f"w={w}", f"a finite number above 0; got 'w={w}'") for w in ("0", "nan", "inf", "1e-400", "")),
    ],
)
def test_labels_with_invalid_numbers_raise(word, sentence):
    with pytest.raises(ValueError, match=sentence):
        cells.to_label(word)


@pytest.mark.parametrize(
    ("name", "word", "sentence"),
    [
        ("table2", "vanila", "table2 has no cell 'vanila'. Did you mean 'vanilla'?"),
        ("table2", "c-0.9", "table2 has no cell 'c-0.9'. Did you mean 'c=0.9'?"),
        (
            "table3",
            "foo",
            "table3 has no cell 'foo'. Use one of affine Glow, additive Glow, i-ResNet Glow-style, c=0.9",
        ),
        ("table4", "Glov", "table4 has no cell 'Glov'. Did you mean 'Glow'?"),
        ("hybrid", "foo", "hybrid has no cell 'foo'. Use one of w=0.1, w=1, w=10."),
    ],
)
def test_an_unknown_label_raises_with_the_labels_of_the_result(name, word, sentence):
    with pytest.raises(ValueError, match=sentence):
        RESULTS[name].check(Job(models=("c=0.9", word)))


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        ({"budget": "papre"}, "budget must be one of smoke, short, paper; got 'papre'. Did you mean 'paper'?"),
        ({"recipe": "best"}, "recipe must be one of ours, paper; got 'best'.$"),
        ({"seeds": (1, 1)}, r"seeds must be distinct, at least one; got \[1, 1\]."),
    ],
)
def test_invalid_jobs_raise(wish, sentence):
    with pytest.raises(ValueError, match=sentence):
        Job(**wish)


def test_datasets_and_cells_that_a_result_does_not_have_raise():
    with pytest.raises(ValueError, match="figure7 uses mnist; got cifar10. Choose among those."):
        RESULTS["figure7"].check(Job(budget="short", datasets=("cifar10",)))
    with pytest.raises(ValueError, match="table2 with the budget smoke uses digits; got digits, mnist. Leave"):
        RESULTS["table2"].check(Job(datasets=("digits", "mnist")))
    with pytest.raises(ValueError, match="table2 uses mnist, .*; got cifar. Did you mean 'cifar10'?"):
        RESULTS["table2"].check(Job(budget="short", datasets=("mnist", "cifar")))
    with pytest.raises(ValueError, match="figure8 has no cell vanilla on cifar10. Its cells are c=0.9, c=0.8"):
        RESULTS["figure8"].check(Job(budget="short", models=("vanilla",)))
    with pytest.raises(ValueError, match="table2 has no cell ResNet-164 on mnist. Its cells are vanilla, c=0.9"):
        RESULTS["table2"].check(Job(budget="short", datasets=("mnist",), models=("resnet164",)))
    assert (
        cells.find_cell("mnist", "ResNet-164")
        is cells.find_cell("svhn", "vanilla")
        is cells.find_cell("svhn", "c=0.9")
        is None
    )
    with pytest.raises(ValueError, match="there is no result 'table22'. Did you mean 'table2'?"):
        find(["table22"])


@pytest.mark.parametrize(
    "change",
    [
        "seed=3", "data.source=mnist", "source=mnist", "network.family=resnet", "constrained=false",
        "network.lipschitz=0.5", "kernels=[3]", "normalisation=batch",
    ],
)  # fmt: skip
def test_an_override_that_makes_another_cell_raises(change):
    with pytest.raises(ValueError, match="--set must not turn c=0.9 into another cell; got --set .* Choose"):
        RESULTS["figure8"].check(Job(models=("c=0.9",), overrides=(change,)))


def test_invalid_requests_raise_before_training(tmp_path):
    with pytest.raises(ValueError, match="'trainin.steps'"):
        RESULTS["table2"].check(Job(overrides=("trainin.steps=3",)))
    with pytest.raises(ValueError, match="the paper's classifiers need factor_out=false; got factor_out=true. Leave"):
        RESULTS["figure8"].check(Job(overrides=("factor_out=true",)))
    with pytest.raises(FileNotFoundError, match=f"mnist is not in the folder {tmp_path}. Run `iresnet data download m"):
        RESULTS["table2"].check(Job(budget="short", data_dir=str(tmp_path)))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--out must be a folder; .*file is a file. Choose another --out."):
        RESULTS["table2"].check(Job(out=tmp_path / "file"))
    with pytest.raises(ValueError, match="--runs must be a folder; .*file is a file. Choose another --runs."):
        RESULTS["table2"].check(Job(out=tmp_path, runs=tmp_path / "file" / "runs"))


def test_a_trained_cell_needs_no_dataset_directory(tmp_path):
    job = Job(budget="short", out=tmp_path, data_dir=str(tmp_path), datasets=("mnist",), models=("c=0.9",))
    folder = job.run_folder(cells.find_cell("mnist", "c=0.9"), 0)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    RESULTS["table2"].check(job)


def test_a_run_with_other_settings_raises(made):
    job = replace(made.work.job, overrides=("training.batch=32",))
    with pytest.raises(ValueError, match="c0.9 holds a run with training.batch = 64; the job requests 32. Request"):
        Work(job).get_run(cells.find_cell("digits", "c=0.9"), 0)
    job = replace(made.work.job, overrides=("training.steps=31",))
    with pytest.raises(ValueError, match="holds a run with training.steps = 30; the job requests 31."):
        Work(job).get_run(cells.find_cell("digits", "c=0.9"), 0)


DAMAGED = ["[]", "{", '{"error": {}}', '{"error": 3}', '{"tightening": [1]}']


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_metrics_raise(made, tmp_path, text):
    job, folder = run_of(made, tmp_path)
    (folder / "reproduction.json").write_text(text)
    remedy = r"Remove it; (the command writes it again|it can be recreated)\."
    with pytest.raises(ValueError, match=rf"reproduction.json is damaged.*\. {remedy}"):
        RESULTS["table2"].run(Work(job))


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 and no more", b"\x80\x04K\x01."])
def test_damaged_image_files_raise(tmp_path, content):
    path = tmp_path / "figure3-digits.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^.*figure3-digits.npz is damaged. Remove it; the command writes it again.$"):
        _load_images(path)


def test_image_files_without_originals_raise(tmp_path):
    np.savez(tmp_path / "a.npz", mark=np.array("x"))
    with pytest.raises(ValueError, match="a.npz is damaged. Remove it; the command writes it again."):
        _load_images(tmp_path / "a.npz")


@pytest.mark.parametrize(
    "change", [{"dataset": None}, {"settings": "a"}, {"settings": [1]}, {"seed": "0"}, {"row": {}}, {"row": 3},
               {"model": 1}, {"details": []}]
)  # fmt: skip
def test_damaged_entries_raise(made, tmp_path, change):
    job = replace(copied(made, tmp_path, "table2"), models=("c=0.5",))
    content = json.loads((tmp_path / "table2.json").read_text())
    content["runs"][0] |= change
    (tmp_path / "table2.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"^.*table2.json is damaged. Remove it; the command writes it again.$"):
        RESULTS["table2"].run(Work(job))


@pytest.mark.parametrize("place", [("error", "low"), ("iteration", "images"), ("inverse", "composed_bound")])
def test_metrics_of_another_type_raise(made, tmp_path, place):
    job, folder = run_of(made, tmp_path)
    content = json.loads((folder / "reproduction.json").read_text())
    content[place[0]][place[1]] = "few"
    (folder / "reproduction.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="reproduction.json is damaged. Remove it; the command writes it again."):
        RESULTS["table2"].run(Work(job))


# The command


def command(*words):
    with pytest.raises(SystemExit) as stop:
        cli.main(["reproduce", *words])
    return stop.value.code


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project whose working tree has changes, and its folder of published results."""
    monkeypatch.setattr(results, "ROOT", tmp_path.resolve())
    monkeypatch.setattr(results, "_commit", lambda: "0123-dirty")
    return tmp_path / "results"


@pytest.mark.parametrize("name", ["table1", "table2", "figure1", "table5"])
def test_a_changed_tree_publishes_nothing_and_trains_nothing(project, capsys, monkeypatch, name):
    monkeypatch.setattr(sys.modules["iresnet.cli.reproduce"], "Work", lambda *_, **__: pytest.fail("it began to work"))
    assert command(name, "--out", str(project), "--device", "cpu") == 2
    said = capsys.readouterr()
    assert " ".join(said.err.split()) == (
        "iresnet: a published result must come from a commit without changes; got 0123-dirty. "
        "Commit the changes and run the command again, or write to another folder than results."
    )
    assert said.out == ""
    assert not project.exists()


def test_a_model_that_was_trained_by_a_changed_tree_is_not_published(project, made, monkeypatch):
    monkeypatch.setattr(results, "_commit", lambda: "0123")
    folder = made.work.job.run_folder(cells.find_cell("digits", "c=0.9"), 0)
    copy_of(folder, project.parent / "runs" / folder.name)
    job = Job(out=project, runs=project.parent / "runs", models=("c=0.9",))
    path = job.runs / folder.name / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "commit": "4567-dirty"}))
    with pytest.raises(ValueError, match="a commit without changes; got 4567-dirty"):
        RESULTS["table2"].check(job)
    RESULTS["table2"].check(replace(job, out=project.parent / "elsewhere"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "commit": "4567"}))
    RESULTS["table2"].check(job)


def test_without_a_name_the_command_lists_results_and_costs(capsys):
    assert command() == 0
    out = capsys.readouterr().out
    for result in RESULTS.values():
        assert result.says in out
        assert all(cost in out for cost in result.costs.values())


def test_the_command_prints_tables_and_file_names(made, capsys, tmp_path):
    words = ("--out", str(tmp_path), "--runs", str(made.out / "table2"), "--cells", "c=0.9,vanilla", "--device", "cpu")
    assert command("table2", "figure8", *words) == 0
    out = capsys.readouterr().out
    assert "table2  digits c=0.9: error" in out
    assert "3 of 3" in out
    assert out.count("trained with budget smoke, recipe ours, settings unchanged") == 2
    assert "tightening: change of the error" in out
    assert str(tmp_path / "figure8.png") in out
    assert "…" not in out
    assert {p.name for p in tmp_path.iterdir()} == {"table2.json", "figure8.json", "figure8.png"}


def test_a_stopped_job_exits_with_130(made, capsys, monkeypatch):
    def stopped(work):
        raise Stopped("digits c=0.9 stopped and saved at step 3 of 30")

    monkeypatch.setitem(RESULTS, "table2", replace(RESULTS["table2"], run=stopped))
    assert command("table2", "--out", str(made.out)) == 130
    assert "step 3 of 30. Run the same command again to resume." in capsys.readouterr().out


@pytest.mark.parametrize("words", [("tabel2",), ("table2", "--budget", "x"), ("figure8", "--cells", "vanilla")])
def test_mistakes_exit_with_2_before_training(words, capsys, tmp_path):
    assert command(*words, "--out", str(tmp_path / "x")) == 2
    assert capsys.readouterr().err.startswith("iresnet: ")
    assert not (tmp_path / "x").exists()


def test_a_results_file_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "table2.json")
    with pytest.raises(ValueError, match=r"table2.json is not a results file: it must be a file"):
        record.merge_entries("table2", [], tmp_path, record.rows_per_run)
