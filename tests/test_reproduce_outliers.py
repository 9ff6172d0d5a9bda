"""Detection of out-of-distribution images by likelihood and typicality, with the smoke budget."""

import io
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from iresnet import cli
from iresnet.cli.console import Screen
from iresnet.cli.reproduce import show
from iresnet.data import Dataset
from iresnet.data.canonical import DATASETS
from iresnet.data.corruptions import CORRUPTIONS, SYNTHETIC
from iresnet.evaluate import auroc, log_likelihood, typicality
from iresnet.plots import Ridge, plot_ridges, ridges
from iresnet.presets import PRESETS
from iresnet.reproduce import RESULTS, Job, Stopped, Work, cells, outliers
from iresnet.run import Run

NAMES = [*CORRUPTIONS, *SYNTHETIC, "photographs"]
TILES = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
DATA = Ridge("digits", [1.0, 2.0, 3.0], 2.0, None, TILES)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outliers, "IMAGES", 160)  # a quarter of them for the budget smoke
        work = Work(Job(out=tmp_path_factory.mktemp("paper")), say=said.append)
        outcome = RESULTS["outliers"].run(work)
    return SimpleNamespace(work=work, out=work.job.out, outcome=outcome, said=said)


# The result


def test_rows_are_the_data_then_kinds_by_likelihood(made):
    own, *others = made.outcome.results.rows
    assert own["kind"] == "the data"
    assert all(own[k] is None for k in outliers.AREAS)
    assert sorted(r["kind"] for r in others) == sorted(NAMES)
    bits = [r["bits/dim"] for r in others]
    assert bits == sorted(bits)
    for r in others:
        assert "quantiles" not in r  # a row is for readers
        assert (r["images"], r["draws"], r["bias bound"]) == (40, outliers.DRAWS, 0.0)
        assert r["data bits/dim"] == own["bits/dim"]
        assert 0 < r["error of one image"] < 0.5
        assert all(0 <= r[k] <= 1 for k in outliers.AREAS)


def test_blank_images_are_more_likely_than_the_data_but_not_typical(made):
    rows = {r["kind"]: r for r in made.outcome.results.rows}
    blank, noise = rows["blank"], rows["noise"]
    assert blank["bits/dim"] < blank["data bits/dim"] < noise["bits/dim"]
    assert blank["by likelihood"] < 0.05
    assert min(blank["by typicality"], blank["by typicality of ten"], *(noise[k] for k in outliers.AREAS)) > 0.95
    assert any("of 13 kinds more likely than the data: blank" in text for text in made.said)


def test_metrics_are_those_of_the_final_weights(made):
    """Areas and bits of one kind from the run folder alone."""
    run = Run.open(made.out / "table4" / "digits-flow")
    model, splits = run.model(), run.splits()
    images = made.work.images(run, 160)
    own, held, turned = (
        log_likelihood(model, rows, draws=outliers.DRAWS).value
        for rows in (images, outliers.subsample(splits.validation, 40), outliers.corrupted_datasets(images)["turned"])
    )
    row = next(r for r in made.outcome.results.rows if r["kind"] == "turned")
    assert row["bits/dim"] == pytest.approx(-float(turned.mean()) / (64 * math.log(2)))
    assert row["entropy bits/dim"] == pytest.approx(-float(held.mean()) / (64 * math.log(2)))
    assert row["by likelihood"] == round(auroc(own, turned), 4)
    ten = auroc(-typicality(own, held, 10), -typicality(turned, held, 10))
    assert row["by typicality of ten"] == round(ten, 4)
    kept = json.loads((made.out / "outliers.json").read_text())["runs"][0]["details"]
    quantiles = {k["kind"]: k["quantiles"] for k in kept["kinds"]}["turned"]
    bits = -turned / (64 * math.log(2))
    assert quantiles[0] == pytest.approx(float(bits.min()), abs=1e-4)
    assert quantiles[20] == pytest.approx(float(bits.quantile(0.5)), abs=1e-4)


def test_nothing_is_evaluated_twice_and_a_stop_ends_the_evaluation(made, monkeypatch):
    monkeypatch.setattr(outliers, "IMAGES", 160)
    with monkeypatch.context() as patch:
        patch.setattr(outliers, "log_likelihood", lambda *_, **__: pytest.fail("judged twice"))
        again = RESULTS["outliers"].run(Work(made.work.job))
    assert again.results.rows == made.outcome.results.rows
    monkeypatch.setattr(outliers, "DRAWS", 2)  # asked for otherwise, they are made anew
    looks = iter([False, False, False, True])
    with pytest.raises(Stopped, match="the likelihood of pixel noise was not begun"):
        RESULTS["outliers"].run(Work(made.work.job, stop=lambda: next(looks)))


def test_the_table_fits_a_terminal(made):
    show(Screen(width=80, file=(text := io.StringIO())), made.outcome)
    assert "…" not in text.getvalue()
    assert "found by: area under the ROC curve; 1 perfect, 0.5 chance" in text.getvalue()
    assert "bits/dim with 4 draws of noise and probes" in text.getvalue()


@pytest.mark.parametrize(("dataset", "present"), [("mnist", False), ("cifar10", True)])
def test_images_of_other_datasets_are_used_where_downloaded(dataset, present, monkeypatch):
    """Those of scikit-learn always; downloaded sets where they are, and else a sentence."""
    sets = {name: Dataset(torch.full((30, *s.schema.shape), 7).byte(), None, s.schema) for name, s in DATASETS.items()}
    monkeypatch.setattr(outliers, "is_present", lambda name, folder: present)
    monkeypatch.setattr(outliers.canonical, "read_canonical", lambda name, folder, part: sets[name])
    preset, said = PRESETS[f"{dataset}-flow"], []
    run = SimpleNamespace(schema=DATASETS[dataset].schema, experiment=replace(preset, seed=1))
    made = outliers.other_images(
        Work(Job(data_dir="here"), say=said.append), run, cells.find_cell(dataset, "flow"), sets[dataset]
    )
    beside = outliers.OTHER_DATASETS[dataset]
    assert list(made) == [*NAMES, "8x8 digits", *(beside if present else ())]
    assert all(rows.schema == run.schema and len(rows) == 30 for rows in made.values())
    missing = "fashion-mnist is not in the folder here and is left out. Run `iresnet data download fashion-mnist`."
    assert said == ([] if present else [missing])


def test_cells_are_the_flows_of_table_4():
    asked = Job(budget="short", models=("flow-small", "flow", "w=1"), datasets=("mnist",))
    assert [str(c) for c in outliers.PLAN.choose(asked)] == ["mnist flow-small", "mnist flow"]
    on_digits = Job(budget="short", datasets=("digits",))
    assert [str(c) for c in outliers.PLAN.choose(on_digits)] == ["digits flow"]
    assert asked.run_folder(cells.find_cell("mnist", "flow"), 0).parts[-2:] == ("table4", "mnist-flow")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--cells", "c=0.9"), "outliers has no cell c=0.9 on digits. Its cells are flow."),
        (("--budget", "short", "--dataset", "cifar100"), "outliers uses mnist, cifar10, digits; got cifar100."),
        (("--budget", "short", "--dataset", "mnist", "--data-dir", "nowhere"), "mnist is not in the folder nowhere."),
    ],
)
def test_mistakes_exit_with_2_and_a_sentence_before_training(words, sentence, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        cli.main(["reproduce", "outliers", *words, "--out", str(tmp_path)])
    assert stop.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


# The picture


def test_the_plot_is_not_empty(made):
    assert made.outcome.files == (made.out / "outliers.json", made.out / "outliers-digits.png")
    with Image.open(made.out / "outliers-digits.png") as image:
        picture = np.asarray(image.convert("L"))
    assert picture.shape[1] > 1000
    assert 0.02 < (picture < 230).mean() < 0.9


def test_ridges_show_the_share_of_images_per_bin(figures, tmp_path):
    spike = Ridge("blank", [0.5, 0.5, 0.5], 0.5, (0.0, 1.0, 1.0), TILES)
    even = Ridge("noise", list(np.geomspace(4, 16, 41)), 9.0, (1.0, 1.0, 0.45), TILES)
    plot_ridges(DATA, [spike, even], tmp_path / "a.png", levels=17, images=500)
    axes = figures[0].axes[0]
    of_data, of_spike, of_even = (p.get_data() for p in axes.patches if hasattr(p, "get_data"))
    assert int((of_spike.values > of_spike.baseline).sum()) == 1
    assert int((of_spike.values > of_spike.baseline).argmax()) == int(np.searchsorted(of_spike.edges, 0.5)) - 1
    inside = (of_even.edges[:-1] > 4) & (of_even.edges[1:] < 16)
    assert np.allclose(of_even.values[inside], 0.86)  # equal shares of a logarithmic axis
    assert of_data.baseline == 2
    shown = {t.get_text(): t.get_color() for t in figures[0].texts}
    assert {"digits", "blank", "noise", "2.00", "9.00"} <= set(shown)
    assert (shown["0.00"], shown["0.45"], shown["1.00"]) == (ridges.WARM, ridges.INK, ridges.INK)


def test_a_kind_without_finite_likelihoods_is_an_empty_row(figures, tmp_path):
    lost = Ridge("noise", [None, None], None, (1.0, 1.0, 1.0), TILES)
    plot_ridges(DATA, [lost], tmp_path / "a.png", levels=17, images=500)
    assert sum(hasattr(p, "get_data") for p in figures[0].axes[0].patches) == 1
    assert "-" in {t.get_text() for t in figures[0].texts}


def test_colour_images_are_drawn_in_colour(tmp_path):
    red = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    red[:, 0] = 255
    kind = Ridge("red", [1.0, 2.0], 1.5, (0.5, 0.5, 0.5), red)
    path = plot_ridges(replace(DATA, images=red), [kind], tmp_path / "a.png", levels=256, images=500)
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    assert (pixels == (255, 0, 0)).all(1).sum() > 1000


def test_an_empty_plot_raises(tmp_path):
    with pytest.raises(ValueError, match="others must hold at least one kind of images; got none."):
        plot_ridges(DATA, [], tmp_path / "a.png", levels=17, images=500)
