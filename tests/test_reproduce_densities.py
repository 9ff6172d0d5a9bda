"""Other flows of Table 4, trained with the budget of our flow, with the smoke budget."""

import importlib
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from iresnet import cli
from iresnet.base import DiagonalNormal
from iresnet.chain import Chain
from iresnet.data import Dataset, Schema
from iresnet.flow import Flow
from iresnet.presets import PRESETS
from iresnet.reproduce import RESULTS, Job, Work, cells, table4
from iresnet.reproduce.cells import OTHER_FLOW_LABELS, OTHER_FLOWS
from iresnet.reproduce.experiments import experiment
from iresnet.run import Run
from iresnet.transforms import ffjord, maf
from iresnet.transforms.elementary import Flatten
from iresnet.transforms.preprocess import dequantise

zuko = pytest.mark.skipif(not importlib.util.find_spec("zuko"), reason="MADE, MAF and FFJORD are zuko's")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Our flow, and NICE and Glow with two seeds, a few steps each."""
    changes = ("training.steps=4", "training.warmup=1")
    job = Job(out=tmp_path_factory.mktemp("densities"), models=("flow",), overrides=changes)
    for part in (job, replace(job, models=("NICE", "glow"), seeds=(0, 1))):
        RESULTS["table4"].check(part)
        outcome = RESULTS["table4"].run(Work(part))
    return SimpleNamespace(job=job, outcome=outcome)


def command(*words):
    with pytest.raises(SystemExit) as stop:
        cli.main(["reproduce", *words])
    return stop.value.code


# What is trained


def test_the_label_glow_means_another_network_on_every_kind_of_data():
    image, plane, classifier = (
        cells.find_cell("digits", "Glow"),
        cells.find_cell("moons", "Glow"),
        cells.find_cell("cifar10", "affine Glow"),
    )
    assert (image.preset, plane.preset, classifier.preset) == ("digits-glow", "toy-glow", "cifar10-glow-classifier")
    assert [c.purpose for c in (image, plane, classifier)] == ["density", "plane", "classification"]
    words = ("nice", "Made", "maf", "real-nvp", "GLOW", "Additive", "ffjord")
    assert [cells.to_label(w) for w in words] == list(OTHER_FLOW_LABELS)
    assert cells.to_label("additive glow") == "additive Glow"


def test_every_rival_of_table_4_has_a_preset_on_digits_and_mnist():
    assert set(table4.PAPER) - {"i-ResNet"} <= set(OTHER_FLOW_LABELS)
    on = {dataset: {c.label for c in OTHER_FLOWS if c.dataset == dataset} for dataset in ("digits", "mnist", "cifar10")}
    assert on["digits"] == on["mnist"] == set(OTHER_FLOW_LABELS)
    assert {label.lower() for label in set(OTHER_FLOW_LABELS) - on["cifar10"]} == set(table4.IMPORTED)


@pytest.mark.parametrize(("dataset", "model"), [(c.dataset, c.label) for c in OTHER_FLOWS])
@pytest.mark.parametrize("budget", ["smoke", "short", "paper"])
def test_the_budget_is_that_of_our_flow(dataset, model, budget):
    dataset = "digits" if budget == "smoke" else dataset
    recipe = "paper" if budget == "paper" else "ours"
    other, ours = (experiment(cells.find_cell(dataset, m), budget, recipe, seed=3) for m in (model, "flow"))
    assert (other.data, other.seed, other.objective) == (ours.data, ours.seed, ours.objective)
    for name in ("steps", "epochs", "batch"):
        assert getattr(other.training, name) == getattr(ours.training, name)
    preset = PRESETS[cells.find_cell(dataset, model).preset]
    assert other.network.family == preset.network.family
    assert (other.training.optimiser, other.training.learning_rate) == ("adam", preset.training.learning_rate)
    assert budget == "smoke" or other.network == preset.network


def test_table_4_uses_digits_on_request():
    short = Job(budget="short")
    assert [str(c) for c in table4.PLAN.choose(short)] == ["mnist flow", "cifar10 flow"]
    asked = replace(short, datasets=("digits",), models=("flow", "MAF", "c=0.9"))
    assert [str(c) for c in table4.PLAN.choose(asked)] == ["digits flow", "digits MAF"]
    made = asked.experiment(cells.find_cell("digits", "flow"), 0)
    assert made.training == PRESETS["digits-density"].training
    assert [str(c) for c in table4.PLAN.choose(replace(short, models=("MADE",)))] == ["mnist MADE"]


# What is measured


def test_a_row_for_every_flow_with_mean_and_spread(made):
    rows = made.outcome.results.rows
    assert [(r["dataset"], r["model"], r["seeds"]) for r in rows] == [
        ("digits", "NICE", 2), ("digits", "Glow", 2), ("digits", "flow", 1)
    ]  # fmt: skip
    values = [e["row"]["bits/dim"] for e in made.outcome.results.runs if e["model"] == "Glow"]
    assert rows[1]["bits/dim"] == pytest.approx(sum(values) / 2)
    assert rows[1]["spread"] == pytest.approx(abs(values[0] - values[1]) / math.sqrt(2))
    for row in rows:
        assert (row["method"], row["bias bound"], row["solver error"]) == ("exact", 0.0, None)
        assert (row["steps"], row["batch"], row["images"]) == (4, 64, 360)
        assert 0 < row["estimator error"] <= 1e-2
        assert row["training s"] > 0
        assert row["paper"] is None  # digits are not in the paper
    assert rows[0]["largest Lip(g)"] is None
    assert rows[2]["largest Lip(g)"] < 1


def test_nice_preserves_volume_so_that_its_bits_follow_from_its_base_alone(made):
    run = Run.open(made.job.run_folder(cells.find_cell("digits", "NICE"), 0))
    flow, test = run.model(), run.splits().test
    with torch.no_grad():
        x = dequantise(test.x, test.schema.levels, torch.Generator().manual_seed(7))
        logit, *couplings = flow.transform.transforms
        y, volume = logit.forward_and_logdet(x)
        z, logdet = Chain(*couplings).forward_and_logdet(y)
        bits = -(flow.base.log_prob(z) + volume) / (64 * math.log(2))
    assert torch.equal(logdet, torch.zeros(len(x)))
    (row,) = (e["row"] for e in made.outcome.results.runs if (e["model"], e["seed"]) == ("NICE", 0))
    one_draw = row["error of one image"] * math.sqrt(row["draws"])
    assert float(bits.mean()) == pytest.approx(row["bits/dim"], abs=4 * one_draw * math.sqrt(2 / 360))


def test_flows_are_compared_in_words_including_losses_and_ties():
    head = {"dataset": "digits", "budget": "short", "recipe": "ours", "estimator error": 1e-3}

    def row(model, bits, spread=None, **other):
        return {**head, "model": model, "bits/dim": bits, "spread": spread, **other}

    rows = [row("MADE", 2.1), row("MAF", 1.8), row("Glow", 1.905, 0.01), row("NICE", 1.0, settings="steps=9")]
    (sentence,) = table4.compare_flows([*rows, row("flow", 1.9, 0.004), {**row("Glow", None), "budget": "published"}])
    assert sentence == (
        "digits, budget short: the flow has fewer bits than MADE; more bits than MAF; as many, within noise, as Glow"
    )
    assert table4.compare_flows(rows) == table4.compare_flows([row("flow", 1.9)]) == []


def solved(dimension, tolerance):
    torch.manual_seed(0)
    shape = (1, 1, dimension)
    chain = Chain(Flatten(shape), *ffjord(dimension, 1, (16,), absolute=tolerance, relative=tolerance))
    flow = Flow(chain, DiagonalNormal(dimension)).eval()
    return table4._measure_solver(
        flow, Dataset(torch.randint(0, 17, (40, *shape), dtype=torch.uint8), None, Schema(shape, levels=17))
    )


@zuko
def test_the_error_of_a_solver_is_measured_and_not_called_a_bound():
    coarse, fine = solved(3, 1e-2), solved(3, 1e-6)
    assert 1e-9 < fine["error"] < coarse["error"] / 10
    assert fine["method"] == "whole trace"
    assert fine["remark"].startswith("whole trace, Dormand-Prince to 1e-06, ln det to 0.0001: off by up to")
    assert solved(70, 1e-2) == {
        "method": "one probe",
        "error": None,
        "remark": "one probe, Dormand-Prince to 0.01, ln det to 1",
    }
    assert table4._measure_solver(Flow(Chain(*maf(3)), DiagonalNormal(3)).eval(), None) is None


@zuko
@pytest.mark.slow
def test_ffjord_reports_the_error_of_its_solver(tmp_path):
    job = Job(out=tmp_path, models=("FFJORD",), overrides=("training.steps=2", "training.warmup=1"))
    (row,) = RESULTS["table4"].run(Work(job)).results.rows
    assert (row["method"], row["bias bound"]) == ("whole trace", None)
    assert 0 < row["solver error"] < 1e-3
    assert "Dormand-Prince to 1e-05" in row["remark"]


# The command


def test_the_command_trains_another_flow_and_merges_it_into_the_file(made, tmp_path, capsys):
    words = ["--out", str(tmp_path), "--runs", str(made.job.run_folder(cells.find_cell("digits", "NICE"), 0).parent)]
    words += ["--set", "training.steps=4", "--set", "training.warmup=1", "--device", "cpu"]
    assert command("table4", "--cells", "flow", *words) == 0
    assert command("table4", "--cells", "nice", "--seed", "0", "--seed", "1", *words) == 0
    out = capsys.readouterr().out
    assert "table4  digits NICE: " in out
    assert "bias 0 (exact determinants)" in out
    assert "parameters, 4 steps in" in out
    assert "2 seeds" in out
    assert "…" not in out
    assert "digits, budget smoke: the flow has fewer bits than NICE" in out


def test_without_zuko_nothing_is_trained(monkeypatch, capsys, tmp_path):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    assert command("table4", "--cells", "flow,MAF", "--out", str(tmp_path / "x")) == 2
    assert "come from zuko, which is not installed. Run `pip install 'iresnet[flows]'`" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("name", "wish", "sentence"),
    [
        ("table4", {"models": ("MADE",), "datasets": ("cifar10",)}, "no MADE on cifar10. Flows: digits MADE, mnist"),
        ("table4", {"models": ("flow", "MADE"), "datasets": ("cifar10",)}, "there is no MADE on cifar10."),
        ("table4", {"models": ("flow-small",), "datasets": ("digits",)}, "no flow-small on digits. Flows: digits flow"),
        ("table4", {"models": ("i-ResNet",), "datasets": ("digits",)}, "table4 has no cell i-ResNet on digits."),
        ("table4", {"models": ("affine Glow",)}, "table4 has no cell affine Glow on mnist, cifar10."),
        ("table4", {"models": ("Glow",), "overrides": ("network.family=maf",)}, "must not turn Glow into another cell"),
        ("figure4", {"models": ("Glow",)}, "figure4 has no cell Glow on mnist. Its cells are flow."),
        ("table2", {"models": ("Glow",), "datasets": ("mnist",)}, "table2 has no cell Glow on mnist."),
        ("table2", {"datasets": ("digits",)}, "table2 uses mnist, cifar10, cifar100; got digits. Choose among those."),
    ],
)  # fmt: skip
def test_cells_that_do_not_exist_raise_before_training(name, wish, sentence):
    with pytest.raises(ValueError, match=sentence):
        RESULTS[name].check(Job(budget="short", **wish))


def test_flows_that_do_not_exist_on_a_dataset():
    assert cells.find_cell("cifar100", "Glow") is cells.find_cell("moons", "MAF") is None
    with pytest.raises(ValueError, match="figure2 has no cell MAF on moons. Its cells are Glow, i-ResNet."):
        RESULTS["figure2"].check(Job(datasets=("moons",), models=("MAF",)))
