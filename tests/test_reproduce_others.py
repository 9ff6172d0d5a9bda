"""What the paper compares with, with the smoke budget: Figures 1 and 2, Tables 1, 3 and 5."""

import json
import math
import shutil
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from iresnet import Chain, ResidualBlock, config, contractive_mlp, evaluate
from iresnet.data import toy
from iresnet.data.builtin import schema_of
from iresnet.models import build
from iresnet.models.unconstrained import UnconstrainedBlock
from iresnet.plots import Crossing, Dynamics, Plane, planes, plot_paths, plot_planes
from iresnet.plots.paths import group_crossings
from iresnet.reproduce import (
    Job,
    Stopped,
    Work,
    cells,
    classification,
    figure1,
    figure2,
    properties,
    systems,
    table1,
    table5,
)
from iresnet.reproduce.cells import DENSITIES
from iresnet.reproduce.experiments import BUDGETS, EPOCHS, RECIPES, experiment
from iresnet.results import Results, write
from iresnet.transforms import AdditiveCoupling
from iresnet.transforms.elementary import ActNorm

RESULTS = {r.name: r for r in (figure1.RESULT, figure2.RESULT, table1.RESULT, classification.TABLE3, table5.RESULT)}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Every result of the budget smoke; the five classifiers of Table 3 with a few steps."""
    work = Work(Job(out=tmp_path_factory.mktemp("others")))
    few = Work(replace(work.job, overrides=("training.steps=6",)))
    outcomes = {name: result.run(few if name == "table3" else work) for name, result in RESULTS.items()}
    return SimpleNamespace(work=work, few=few, out=work.job.out, outcomes=outcomes)


def drawn(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("L"))


# Figure 1


def test_the_crossing_of_two_lines_is_where_they_meet():
    paths = np.array([[0.0, 1.0, 10.0], [4.0, 2.0, 10.0]])
    (crossing,) = figure1.find_crossings(paths)
    assert crossing.pair == (0, 1)
    assert crossing.depth == pytest.approx(1 / 3)  # x = 4 t and x = 1 + t
    assert crossing.value == pytest.approx(4 / 3)


def test_crossings_are_those_of_a_search_along_the_paths():
    paths = np.random.default_rng(0).normal(size=(4, 7))
    found = figure1.find_crossings(paths)
    fine = np.concatenate(
        [(1 - u) * a + u * b for a, b in pairwise(paths) for u in [np.linspace(0, 1, 4001)[:-1, None]]]
    )
    changes = 0
    for i in range(7):
        for j in range(i + 1, 7):
            changes += int((np.diff(np.sign(fine[:, i] - fine[:, j])) != 0).sum())
    assert len(found) == changes
    assert [c.depth for c in found] == sorted(c.depth for c in found)
    for c in found:  # both paths are there
        t = int(c.depth)
        values = paths[t] + (c.depth - t) * (paths[t + 1] - paths[t])
        assert values[list(c.pair)] == pytest.approx([c.value] * 2)


def test_paths_that_touch_do_not_cross_and_those_that_meet_in_a_layer_do():
    touching = np.array([[0.0, 1.0], [1.0, 1.0], [0.0, 1.0]])
    through = np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
    assert figure1.find_crossings(touching) == []
    assert [(c.depth, c.value) for c in figure1.find_crossings(through)] == [(1.0, 1.0)]
    assert figure1.find_crossings(np.array([[1.0, 1.0], [2.0, 3.0]])) == []  # one path, twice, that parts


def test_the_constraint_keeps_the_order_of_all_paths(made):
    free, ours = (e["row"] for e in made.outcomes["figure1"].results.runs)
    assert free["crossings"] > 10
    assert free["smallest gap"] < 0
    assert ours["crossings"] == 0
    assert ours["proven free of crossings"]
    assert not free["proven free of crossings"]
    assert ours["largest Lip(g)"] < 1
    # The theorem: gaps shrink by at most the product of 1 - L.
    assert ours["smallest gap"] >= ours["smallest gap, proven"] > 0
    assert [ours["paper"], free["paper"]] == ["none cross", "cross"]


def test_the_paths_hold_every_setting_of_their_networks(made):
    for entry in made.outcomes["figure1"].results.runs:
        assert config.parse(figure1.Setting, "\n".join(entry["details"]["setting"])) == figure1.setting(made.work.job)


def test_a_block_that_folds_the_line_crosses_paths():
    fold = nn.Linear(1, 1, bias=False)
    fold.weight.data.fill_(-3.0)  # x - 3 x
    row, dynamics = figure1.measure_crossings(
        "vanilla", replace(figure1.Setting(), blocks=2), Chain(UnconstrainedBlock(fold))
    )
    n = figure1.PATHS
    assert row["crossings"] == n * (n - 1) // 2  # x -> -2 x: all of them
    assert all(c.value == pytest.approx(0, abs=1e-9) for c in dynamics.crossings)
    assert row["first after block"] == pytest.approx(1 / 3)
    assert row["smallest gap"] == pytest.approx(-2)
    assert row["smallest gap, proven"] is None


def test_both_networks_learn_the_same_points():
    x, y = figure1.noisy_targets(60, 0.0, seed=0)
    assert torch.allclose(y, torch.cat([x**3, x], dim=1))
    a, b = (figure1.noisy_targets(60, 0.5, seed=3)[1] for _ in range(2))
    assert torch.equal(a, b)
    s = figure1.Setting()
    sizes = [sum(p.numel() for p in figure1.build_network(name, s, 0).parameters()) for name in ("vanilla", "i-ResNet")]
    assert sizes[0] == sizes[1]
    loss, metrics = figure1.Waypoints(Chain(UnconstrainedBlock(nn.Identity()), UnconstrainedBlock(nn.Identity())))(
        torch.ones(2, 1), torch.tensor([[2.0, 4.0], [2.0, 4.0]])
    )
    assert float(loss) == 0.0  # 1, 2, 4
    assert set(metrics) == {"squared error"}
    with pytest.raises(ValueError, match=r"y must hold the two states to reach, \(n, 2\); got none. Train on batches"):
        figure1.Waypoints(Chain(UnconstrainedBlock(nn.Identity())))(torch.ones(2, 1))


def test_crossings_close_together_share_a_circle():
    points = [(0.5, 0.0), (0.6, 0.1), (0.7, 3.0), (1.5, 0.1)]
    groups = group_crossings([Crossing(d, v, (0, 1)) for d, v in points], near=0.5)
    assert [[c.depth for c in g] for g in groups] == [[0.5, 0.6], [0.7], [1.5]]


def test_plotted_paths_fill_one_panel_per_network(tmp_path):
    with pytest.raises(ValueError, match="dynamics must hold at least one network; got none."):
        plot_paths([], tmp_path / "a.png")
    paths = np.array([[-1.0, 0.0, 1.0], [1.0, 0.0, -1.0], [2.0, 0.0, -2.0]])
    crossing = Dynamics("crossing", paths, figure1.find_crossings(paths))
    straight = Dynamics("straight", np.tile(paths[:1], (3, 1)), [])
    one, two = (
        drawn(plot_paths(d, tmp_path / f"{i}.png", dpi=60)) for i, d in enumerate(([straight], [crossing, straight]))
    )
    assert two.shape[1] > one.shape[1]
    assert one.max() > 150


# Figure 2


def test_nats_are_exact_and_above_the_floor(made):
    results = made.outcomes["figure2"].results
    glow, ours, sine = results.rows
    assert (glow["model"], ours["model"], sine["model"]) == ("Glow", "i-ResNet", "i-ResNet sine")
    for row in (glow, ours, sine):
        assert row["floor"] == toy.entropy(row["dataset"])
        assert row["above the floor"] == pytest.approx(row["nats"] - row["floor"])
        assert row["above the floor"] > 0
        assert row["points"] == 10_000
        assert row["steps"] == 30
    assert glow["blocks proven"] is None
    assert ours["blocks proven"] == sine["blocks proven"] == "4 of 4"
    run = made.work.get_run(cells.find_cell(ours["dataset"], "i-ResNet"), 0)
    x = made.work.splits(run).test.x[:50]
    flow = made.work.model(run)
    with torch.enable_grad():
        exact = properties.log_volume(flow.transform.double(), x.double())
    z = flow.transform(x.double())
    value = flow.double().base.log_prob(z) + exact
    kept = np.load(run.folder / "figure2.npz")["values"][:50]
    assert value.detach().numpy() == pytest.approx(kept, abs=1e-3)
    flow.float()


def test_the_difference_to_glow_is_paired(made):
    glow, *others = made.outcomes["figure2"].results.rows
    assert glow["nearer than Glow by"] is None
    for ours in others:
        assert ours["nearer than Glow by"] == pytest.approx(glow["nats"] - ours["nats"], abs=1e-6)
        unpaired = math.hypot(glow["error over points"], ours["error over points"])
        assert 0 < ours["error of the difference"] < unpaired


def test_a_density_is_evaluated_once(made, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("made twice")

    monkeypatch.setattr(figure2, "_save_arrays", fail)
    again = figure2.RESULT.run(Work(made.work.job)).results.rows
    assert again == made.outcomes["figure2"].results.rows


def test_networks_of_figure_2_are_the_papers_and_no_larger_than_glow():
    made, schema = {}, schema_of("rings")
    for model in figure2.MODELS:
        made[model] = e = Job(budget="short").experiment(cells.find_cell("rings", model), 0)
        assert (e.network.width, e.network.depth, e.data.source) == (64, 3, "rings")
    networks = {model: build(e.network, schema, "density", torch.randn(8, 2)) for model, e in made.items()}
    sizes = {model: sum(p.numel() for p in network.parameters()) for model, network in networks.items()}
    assert 0.99 * sizes["Glow"] < sizes["i-ResNet"] == sizes["i-ResNet sine"] <= sizes["Glow"]
    assert made["i-ResNet"].network.activation == "elu"
    assert len({(e.training.steps, e.training.batch, e.data) for e in made.values()}) == 1
    assert Job(budget="paper").experiment(cells.find_cell("rings", "Glow"), 0).training.steps == 20_000
    assert len(figure2.RESULT.plan.choose(Job(budget="short"))) == 12
    only = figure2.RESULT.plan.choose(Job(budget="short", datasets=("moons",), models=("i-resnet",)))
    assert [str(c) for c in only] == ["moons i-ResNet"]


@pytest.mark.parametrize(
    ("differences", "sentence"),
    [
        ({"a": 0.1, "b_c": 0.2}, "i-ResNet is closer to the floor than Glow on a, b c"),
        ({"a": 0.1, "b": -0.2}, "i-ResNet is closer to the floor than Glow on a; it is not on b"),
        ({"a": -0.1}, "Glow is closer to the floor than i-ResNet on a"),
        ({"a": 0.001}, "i-ResNet and Glow do not differ significantly on a"),
        ({"a": 0.1, "b": 0.019, "c": -0.019},
         "i-ResNet is closer to the floor than Glow on a; there is no significant difference on b, c"),
        ({"a": -0.021, "b": 0.0},
         "Glow is closer to the floor than i-ResNet on a; there is no significant difference on b"),
        ({"a": math.nan}, "i-ResNet and Glow do not differ significantly on a"),
        ({"a": None}, "one of the models is missing: nothing to compare"),
    ],
)  # fmt: skip
def test_models_are_compared_in_words_including_losses_and_ties(differences, sentence):
    def rows(model):
        found = {d: None if v is None else figure2.nearer(model, v, 0.01) for d, v in differences.items()}
        return [{"dataset": d, "model": model, "nearer": who} for d, who in found.items()]

    assert figure2.compare_models(rows("i-ResNet")) == sentence
    if differences["a"] is not None:
        both = f"{sentence}. {sentence.replace('i-ResNet', 'i-ResNet sine')}"
        assert figure2.compare_models([*rows("i-ResNet sine"), *rows("i-ResNet")]) == both


def test_published_rows_follow_the_same_rule():
    results = json.loads((Path(__file__).parents[1] / "results" / "figure2.json").read_text())
    compared = [(e["model"], e["row"]) for e in results["runs"] if e["row"]["nearer"] is not None]
    assert len(compared) >= 4
    for model, r in compared:
        assert r["nearer"] == figure2.nearer(model, r["nearer than Glow by"], r["error of the difference"])
    assert results["rows"] == figure2.sort_rows(results["runs"])


def test_a_row_is_over_seeds_and_a_model_is_nearer_if_it_is_in_all_of_them():
    def entry(model, seed, nats, nearer):
        row = {"nats": nats, "nearer": nearer, "nearer than Glow by": None if nearer is None else 3.5 - nats}
        keys = {"dataset": "rings", "model": model, "budget": "short", "recipe": "ours", "settings": [], "seed": seed}
        return {**keys, "row": row, "details": {}}

    entries = [
        *(entry("Glow", seed, 3.5, None) for seed in (0, 1)),
        *(entry("i-ResNet", seed, nats, who) for seed, nats, who in ((0, 3.4, "i-ResNet"), (1, 3.6, "Glow"))),
        *(entry("i-ResNet sine", seed, nats, "i-ResNet sine") for seed, nats in ((0, 3.2), (1, 3.3))),
    ]
    rows = figure2.sort_rows(entries)
    assert [(r["model"], r["seeds"], r["nearer"]) for r in rows] == [
        ("Glow", 2, None), ("i-ResNet", 2, "neither"), ("i-ResNet sine", 2, "i-ResNet sine"),
    ]  # fmt: skip
    assert rows[2]["nats"] == pytest.approx(3.25)
    assert rows[2]["spread"] == pytest.approx(0.1 / math.sqrt(2))
    first = {"rings": [e for e in entries if e["seed"] == 0]}
    assert figure2.compare_groups(first).startswith("i-ResNet is closer to the floor than Glow on rings.")
    assert figure2.compare_groups(first, rows).startswith("i-ResNet and Glow do not differ significantly on rings.")


@pytest.mark.parametrize(
    ("errors", "nearer", "painted", "sentence"),
    [
        (2.1, "i-ResNet", ["1.998 nats"], "i-ResNet is closer to the floor than Glow on eight gaussians"),
        (-2.1, "Glow", ["2.000 nats"], "Glow is closer to the floor than i-ResNet on eight gaussians"),
        (1.9, "neither", [], "i-ResNet and Glow do not differ significantly on eight gaussians"),
    ],
)
def test_a_difference_within_two_standard_errors_is_a_tie(made, tmp_path, figures, errors, nearer, painted, sentence):
    """From the likelihoods of the points to the table, the colours of the picture and its caption."""
    shutil.copytree(made.out / "figure2", tmp_path / "figure2")
    noise = np.random.default_rng(0).normal(size=(2, 10_000))
    noise = (noise - noise.mean(1, keepdims=True)) / noise.std(1, ddof=1, keepdims=True)
    theirs = -2 + noise[0]
    ours = theirs + 0.1 * (noise[1] + errors / 100)  # 0.1 / 100 is the standard error
    for path in (tmp_path / "figure2").glob("*/figure2.npz"):
        kept = dict(np.load(path))
        np.savez(path, **{**kept, "values": ours if "iresnet" in path.parent.name else theirs})
    outcome = figure2.RESULT.run(Work(replace(made.work.job, out=tmp_path, models=("Glow", "i-ResNet"))))
    assert [r["nearer"] for r in outcome.results.rows] == [None, nearer]
    assert outcome.notes[-1] == sentence
    texts = {t.get_text(): t.get_color() for t in figures[0].texts}
    assert [text for text, colour in texts.items() if colour == planes.BEST] == painted
    assert sentence in " ".join(texts)


def test_the_best_of_three_is_highlighted_unless_it_ties_with_another():
    noise = np.random.default_rng(0).normal(size=(4, 10_000))
    base, (a, b, c) = noise[0], 0.1 * noise[1:]  # standard error of a difference: 0.0014
    for values, nearest in (
        ((base, base + a, base + b + 0.1), "i-ResNet sine"),
        ((base, base + a + 0.1, base + b + 0.1), None),
        ((base + 0.1, base + a, base + c), "Glow"),
        ((base,), None),
    ):
        assert figure2.find_nearest(dict(zip(figure2.MODELS, values, strict=False))) == nearest


def test_a_glow_with_other_settings_is_not_compared(made, tmp_path):
    work = Work(Job(out=tmp_path, models=("i-resnet",), overrides=("training.steps=3",)))
    (row,) = figure2.RESULT.run(work).results.rows
    assert row["nearer than Glow by"] is None
    glow = Work(Job(out=tmp_path, models=("glow",), overrides=("training.steps=2",)))
    figure2.RESULT.run(glow)
    both = figure2.RESULT.run(work).results.rows
    assert [r["nearer than Glow by"] for r in both] == [None, None]


def test_a_stopped_run_resumes(tmp_path):
    asked = iter(range(1000))
    job = Job(out=tmp_path, models=("i-resnet",))
    with pytest.raises(Stopped, match=r"eight_gaussians i-ResNet stopped and saved at step \d+ of 30"):
        figure2.RESULT.run(Work(job, stop=lambda: next(asked) > 12))
    assert figure2.RESULT.run(Work(job)).results.rows[0]["steps"] == 30


def test_plotted_planes_show_densities_and_highlight_the_nearest_model(tmp_path):
    with pytest.raises(ValueError, match="planes must hold at least one density; got none."):
        plot_planes([], tmp_path / "a.png")
    data = np.random.default_rng(0).normal(size=(50, 2))
    half = np.zeros((8, 8))
    half[:, :4] = 1.0  # mass on the left
    plane = Plane("one", data, (-1, 1, -1, 1), 1.0, {"Glow": (half, 1.2), "i-ResNet": (half[:, ::-1], 1.1)})
    picture = drawn(plot_planes([plane], tmp_path / "planes.png", dpi=60))
    assert len(drawn(plot_planes([plane], tmp_path / "said.png", caption="words " * 20, dpi=60))) > len(picture)
    rows = np.split(picture[: 3 * (len(picture) // 3)], 3)
    middle = picture.shape[1] // 2 + 20  # the labels are on the left
    glow, ours = (r[:, middle - 40 : middle + 80].astype(float).mean(0) for r in rows[1:])
    assert glow[:30].mean() > glow[-30:].mean()
    assert ours[:30].mean() < ours[-30:].mean()
    highlighted = drawn(plot_planes([replace(plane, nearest="Glow")], tmp_path / "nearest.png", dpi=60))
    assert (highlighted != picture).any()


# Table 1


def test_a_resnet_without_a_turn_has_no_marks(monkeypatch):
    assert systems.count_turns() > 0
    monkeypatch.setattr(table1, "count_turns", lambda: 0)
    with pytest.raises(RuntimeError, match="the marks of a ResNet need a block that turns around, .*; got one without"):
        table1.find_marks("ResNet", 10)


def test_the_papers_table_1():
    assert [sum(m == mark for marks in table1.PAPER.values() for m in marks) for mark in "✓✗–"] == [18, 11, 7]
    assert table1.PAPER["i-ResNet"] == ("✓", "✓", "✗", "✓", "✗", "✗")


def test_our_marks_of_table_1(made):
    rows = {r["model"]: r for r in made.outcomes["table1"].results.rows}
    imported = ["FFJORD", "MAF"] if find_spec("zuko") else ["FFJORD"]
    assert list(rows) == ["ResNet", "NICE / i-RevNet", "Real NVP", "Glow", *imported, "i-ResNet"]
    assert rows["i-ResNet"]["free-form"] == "✓ / ✓"
    assert rows["i-ResNet"]["analytic inverse"] == "✗ / ✗"
    assert rows["i-ResNet"]["exact likelihood"] == "✗ / d ≤ 64"
    assert rows["i-ResNet"]["unbiased estimator"] == "✗ / ✓"
    assert rows["Glow"]["analytic inverse"] == "✗ / ✓"
    assert rows["Glow"]["zeros in a layer's Jacobian"] == "21 of 36"  # I, 0; T, a diagonal
    if find_spec("zuko"):
        assert (rows["MAF"]["evaluations of a layer"], rows["MAF"]["evaluations of its inverse"]) == ("1", "6")
    assert (rows["ResNet"]["evaluations of its inverse"], rows["ResNet"]["inverse off by"]) == (None, None)
    notes = made.outcomes["table1"].notes[1:]
    assert len(notes) == 3  # elsewhere ours are the paper's
    assert notes[0] == "Glow, analytic inverse: ✗ in the paper, ✓ here"


def test_the_measurements_behind_the_marks_are_in_the_file(made):
    found = {e["model"]: e["details"]["instance 1"] for e in made.outcomes["table1"].results.runs if e["details"]}
    assert found["NICE / i-RevNet"]["largest |ln det|"] < 1e-12
    assert found["Glow"]["inverse"]["error"] < 1e-9
    assert found["Glow"]["inverse"]["most"] == 1
    assert found["i-ResNet"]["inverse"]["most"] > found["i-ResNet"]["inverse"]["fewest"] > 1
    estimators = found["i-ResNet"]["estimators"]
    assert estimators["series of 5 terms"]["standard errors off"] > 4
    assert estimators["roulette"]["standard errors off"] < 4
    assert found["ResNet"]["turns of a block on the line"] > 0


def test_without_zuko_its_marks_are_as_published(monkeypatch):
    monkeypatch.setattr(table1, "find_spec", lambda name: None)
    entry, _ = table1.measure_system("FFJORD", Job())
    assert entry["row"]["established"] == "as published"
    assert entry["row"]["free-form"] == "✓ / pub."
    assert table1.list_differences([{"model": "FFJORD", **entry["row"]}]) == []


def test_a_coupling_has_a_zero_pattern_and_a_linear_map_is_no_layer():
    x = torch.randn(8, 4, dtype=torch.float64)
    shift = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    coupling = AdditiveCoupling(shift).double()
    found = properties.zero_pattern([coupling, coupling], x)
    assert (found.entries, found.always_zero, found.free) == (16, 2 + 2 + 4, False)  # I, 0; T, I
    scale = ActNorm(4).double()
    scale.initialised.fill_(True)
    block = ResidualBlock(contractive_mlp(4, (8,))).double()
    assert properties.zero_pattern([Chain(scale, block)], x).free


def test_the_jacobian_and_volume_of_a_linear_map():
    a = torch.randn(3, 3, dtype=torch.float64)
    x = torch.randn(5, 3, dtype=torch.float64)
    assert torch.allclose(properties.jacobian(lambda x: x @ a.T, x), a.expand(5, 3, 3))
    assert torch.allclose(properties.log_volume(lambda x: x @ a.T, x), torch.linalg.slogdet(a)[1].expand(5))


def test_biased_and_unbiased_estimates_are_distinguished():
    generator = torch.Generator().manual_seed(0)

    def noise(x):
        return torch.randn(len(x), generator=generator)

    x = torch.zeros(1, 2)
    assert properties.measure_bias(noise, 0.0, x, 4000).unbiased
    assert not properties.measure_bias(noise, 0.1, x, 40_000).unbiased
    assert properties.measure_bias(lambda x: torch.ones(len(x)), 0.0, x, 10).distance == math.inf


# Table 3


def test_the_papers_table_3():
    assert list(classification.PAPER3.values()) == [12.63, 12.36, 8.03, 6.78, 5.6]
    job = Job(budget="short")
    experiments = {c.label: job.experiment(c, 0) for c in classification.TABLE3.plan.choose(job)}
    assert {e.training.epochs for e in experiments.values()} == {EPOCHS["short"]["cifar10"]}
    assert {(e.data.source, e.data.flip, e.data.shift) for e in experiments.values()} == {("cifar10", True, 4)}
    assert [experiments[m].training.optimiser for m in classification.PAPER3] == ["adam", "adam", "sgd", "sgd", "sgd"]
    styles = [experiments[m].network for m in ("affine Glow", "i-ResNet Glow-style")]
    assert (styles[0].blocks, styles[0].width) == (styles[1].blocks, styles[1].width) == ((32, 32, 32), 512)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("budget", BUDGETS)
def test_all_cells_of_table_3_share_data_objective_and_budget(budget, recipe):
    job = Job(budget=budget, recipe=recipe)
    made = {c.label: job.experiment(c, 0) for c in classification.TABLE3.plan.choose(job)}
    assert list(made) == list(classification.PAPER3)
    ours = shared_settings(made["c=0.9"])
    assert {label: differing(shared_settings(e), ours) for label, e in made.items()} == {label: {} for label in made}


def shared_settings(e):
    """The settings of an experiment by name, except its network and how its optimiser takes a step."""
    own = {"optimiser", "learning_rate", "betas", "momentum", "nesterov", "weight_decay", "head_decay", "other_decay"}
    own |= {"clip", "schedule", "warmup", "cooldown", "milestones", "decay"}
    parts = {"data": asdict(e.data), "objective": asdict(e.objective), "training": asdict(e.training)}
    return {f"{part}.{name}": v for part, values in parts.items() for name, v in values.items() if name not in own}


def differing(a, b):
    return {name: (a.get(name), b.get(name)) for name in {**a, **b} if a.get(name) != b.get(name)}


def test_couplings_keep_adam_and_nothing_else_under_the_papers_recipe():
    glow, ours = (experiment(cells.find_cell("cifar10", m), "paper", "paper") for m in ("affine Glow", "c=0.9"))
    assert (glow.training.optimiser, ours.training.optimiser) == ("adam", "sgd")
    assert (glow.training.learning_rate, ours.training.learning_rate) == (1e-4, 0.1)
    assert (glow.data.cutout, glow.objective.label_smoothing, glow.training.epochs) == (0, 0, 200)


def test_every_classifier_reconstructs_its_images(made):
    rows = made.outcomes["table3"].results.rows
    assert [r["model"] for r in rows] == list(classification.PAPER3)
    for row in rows:
        assert row["low"] < row["error %"] < row["high"]
        assert row["measured error"] < 1e-6
        assert (row["recipe"], row["steps"], row["seeds"], row["batch"]) == ("ours", 6, 1, 64)
        assert (row["cutout"], row["smoothing"]) == (0, 0.1)
        assert row["paper"] is None  # digits
        assert row["parameters"] > 1000
    assert [r["blocks proven"] for r in rows] == [None, None, "3 of 3", "3 of 3", None]


def test_test_images_are_read_once(made, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("read twice")

    monkeypatch.setattr(evaluate, "error", fail)
    assert classification.TABLE3.run(Work(made.few.job)).results.rows == made.outcomes["table3"].results.rows


# Table 5


def test_networks_of_table_5_have_the_same_layers():
    s = table5.Size()
    made = {name: table5.network(cell, s) for name, cell in table5.CELLS.items()}
    assert {(n.blocks, n.width, n.kernels, n.factor_out, n.squeeze_first) for n in made.values()} == {
        ((32, 32, 32), 512, (3, 1, 3), True, True)
    }
    assert [n.constrained for n in made.values()] == [True, False, True, True, True]
    assert made["i-ResNet SN log-det"].terms == 5
    assert (table5.size(Job(budget="short")).batch, table5.size(Job(budget="short", device="cuda")).batch) == (4, 128)


def test_times_are_relative_to_glow_of_the_same_purpose(made):
    rows = {r["model"]: r for r in made.outcomes["table5"].results.rows}
    assert list(rows) == list(table5.CELLS)
    for row in rows.values():
        glow = rows["Glow" if row["job"] == "classification" else "Glow log-det"]
        assert row["to Glow"] == pytest.approx(row["ms"] / glow["ms"])
        assert row["operations, 1e9"] > 0
        assert row["settings"] == "on a CPU engine plain"
    assert [round(r["paper, to Glow"], 2) for r in rows.values()] == [1, 0.43, 0.79, 1, 2.61]
    plain, normalised = rows["i-ResNet"], rows["i-ResNet SN"]
    assert plain["parameters"] == normalised["parameters"]
    assert normalised["operations, 1e9"] > plain["operations, 1e9"]  # power iteration
    assert rows["i-ResNet SN log-det"]["operations, 1e9"] > 2 * normalised["operations, 1e9"]


def test_operations_of_a_linear_layer_are_counted():
    class Squares(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Linear(10, 20, bias=False)

        def forward(self, x, y, generator=None):
            return self.model(x).square().sum(), {}

    count = table5.count_operations(Squares(), torch.ones(3, 10), None, torch.Generator())
    assert count * 1e9 == 2 * 2 * 3 * 10 * 20  # forward, and the gradient of the weight


@pytest.mark.parametrize(("commit", "again"), [("1234567", 0), ("7654321", 5), ("1234567-dirty", 5)])
def test_entries_of_the_same_machine_versions_and_commit_are_kept(made, tmp_path, monkeypatch, commit, again):
    now = [{**e, "commit": "1234567"} for e in made.outcomes["table5"].results.runs]
    write(Results("table5", table5.rows_with_ratio(now), now), tmp_path)
    rows, measured = {e["model"]: e["row"] for e in now}, []
    monkeypatch.setattr(table5, "measure_step", lambda cell, *_: measured.append(cell) or rows[cell.label])
    monkeypatch.setattr(table5, "provenance", lambda **_: {**now[0], "commit": commit})
    found = table5.run(Work(Job(out=tmp_path))).results
    assert len(measured) == again
    assert [r["ms"] for r in found.rows] == [r["ms"] for r in made.outcomes["table5"].results.rows]


@pytest.mark.parametrize(("make", "places"), [(nn.Conv2d, 6 * 6), (nn.ConvTranspose2d, 8 * 8)])
def test_operations_of_grouped_convolutions_are_counted(make, places):
    """A kernel is applied at every place of the output; transposed, of the input."""

    class Squares(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = make(8, 12, 3, groups=4, bias=False)

        def forward(self, x, y, generator=None):
            return self.model(x.requires_grad_()).square().sum(), {}

    count = table5.count_operations(Squares(), torch.ones(3, 8, 8, 8), None, torch.Generator())
    assert count * 1e9 == pytest.approx(3 * 2 * 3 * places * 8 * 12 / 4 * 9)  # forward, and two gradients


def test_rows_of_two_devices_are_compared_separately(made, tmp_path):
    entries = made.outcomes["table5"].results.runs
    on_gpu = [{**e, "settings": ["on a GPU", "engine compiled"], "row": {**e["row"], "ms": 1.0}} for e in entries]
    rows = table5.rows_with_ratio([*entries, *on_gpu])
    assert [r["settings"] for r in rows] == ["on a CPU engine plain"] * 5 + ["on a GPU engine compiled"] * 5
    assert [r["to Glow"] for r in rows[5:]] == [1.0] * 5


# All of them


@pytest.mark.parametrize("name", RESULTS)
def test_every_results_file_records_provenance(made, name):
    content = json.loads((made.out / f"{name}.json").read_text())
    assert content["name"] == name
    assert len(content["rows"]) == len(content["runs"])
    assert {"command", "commit", "seconds", "hardware", "versions", "date", "budget"} <= set(content["runs"][0])
    assert set(made.outcomes[name].columns.values()) <= set(content["rows"][0])
    assert all(path.is_file() for path in made.outcomes[name].files)


@pytest.mark.parametrize("name", ["figure1", "figure2"])
def test_every_plot_has_content(made, name):
    picture = drawn(made.out / f"{name}.png")
    assert len(np.unique(picture)) > 20
    assert 0.005 < (picture > 60).mean() < 0.9


@pytest.mark.parametrize(
    ("result", "job", "message"),
    [
        ("figure1", {"overrides": ("steps=3",)}, "figure1 trains two networks of its own .*; got steps=3. Leave --set"),
        ("figure1", {"datasets": ("mnist",)}, "figure1 trains two networks of its own on points of a line; got"),
        ("figure1", {"models": ("vanilla",)}, "figure1 trains two networks of its own on points of a line; got"),
        ("figure2", {"datasets": ("digits",)}, "figure2 uses densities in the plane; got digits. Choose among"),
        ("figure2", {"models": ("vanilla",)}, "figure2 has no cell vanilla on eight_gaussians. Its cells are Glow"),
        ("figure2", {"datasets": ("moonz",)}, "figure2 uses densities in the plane; got moonz. Choose among"),
        ("table1", {"datasets": ("mnist",)}, "table1 runs systems of its own with random weights; got"),
        ("table5", {"datasets": ("mnist",)}, "table5 measures networks of its own on random images; got mnist. Leave"),
        ("table1", {"models": ("glow",)}, "table1 runs systems of its own with random weights; got"),
        ("table3", {"datasets": ("moons",)}, "table3 with the budget smoke uses digits; got moons."),
        ("table5", {"overrides": ("batch=3",)}, "table5 measures networks of its own .*; got batch=3. Leave --set"),
    ],
)  # fmt: skip
def test_invalid_requests_raise_before_training(result, job, message):
    with pytest.raises(ValueError, match=message):
        RESULTS[result].check(Job(**job))


@pytest.mark.parametrize(
    ("dataset", "label"), [("moons", "vanilla"), ("moons", "c=0.9"), ("cifar10", "i-ResNet"), ("mnist", "affine Glow")]
)
def test_cells_that_do_not_exist(dataset, label):
    assert cells.find_cell(dataset, label) is None


def test_words_of_users_map_to_labels():
    words = ("glow", "I-ResNet", "affine-glow", "AdditiveGlow", "i-resnet glow-style", "irevnet")
    models = ["Glow", "i-ResNet", "affine Glow", "additive Glow", "i-ResNet Glow-style", "i-RevNet"]
    assert [cells.to_label(w) for w in words] == models
    assert cells.find_cell("cifar10", "i-ResNet Glow-style").folder == "cifar10-iresnet-glowstyle"
    assert set(figure2.DEFAULT) <= set(DENSITIES)
    assert len(figure2.DEFAULT) >= 4


@pytest.mark.parametrize("name", RESULTS)
def test_a_stopped_job_raises_stopped(made, name, tmp_path):
    with pytest.raises(Stopped):
        RESULTS[name].run(Work(Job(out=tmp_path), stop=lambda: True))
