"""Learning with few labels, and a probe of codes learned without any: with the smoke budget."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from iresnet import cli
from iresnet.cli.console import Screen
from iresnet.cli.reproduce import show
from iresnet.data import load
from iresnet.evaluate import probe as linear_probe
from iresnet.reproduce import RESULTS, Job, Work, cells, evaluation, job, probe, semi_supervised, table4
from iresnet.reproduce.experiments import experiment
from iresnet.run import Run
from tests.runs import copy_of

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    work = Work(Job(out=tmp_path_factory.mktemp("paper")))
    return SimpleNamespace(work=work, out=work.job.out, outcome=RESULTS["semi-supervised"].run(work))


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    work = Work(Job(out=tmp_path_factory.mktemp("paper")))
    return SimpleNamespace(work=work, out=work.job.out, outcome=RESULTS["probe"].run(work))


def fail(*_, **__):
    raise AssertionError("made twice")


def shown(outcome):
    show(Screen(width=80, file=(text := io.StringIO())), outcome)
    return text.getvalue()


# Few labels: the cells


@pytest.mark.parametrize("dataset", ["digits", "mnist"])
@pytest.mark.parametrize("labels", [10, 100, 1000])
def test_both_networks_differ_in_the_density_alone(dataset, labels):
    both = [cells.find_cell(dataset, f"{name} {labels}") for name in ("hybrid", "labels alone")]
    hybrid, alone = (experiment(cell, "short", "ours", seed=3).__dict__ for cell in both)
    assert [cell.purpose for cell in both] == ["semi-supervised"] * 2
    assert (hybrid["objective"].density, alone["objective"].density) == (1.0, 0.0)
    for part in ("network", "data", "training", "seed"):
        assert hybrid[part] == alone[part]
    data, training = hybrid["data"], hybrid["training"]
    assert (data.source, data.labelled, data.seed) == (dataset, labels, 3)
    assert (training.select, training.epochs) == ("last", 0)  # no label is used to select; as many steps
    assert training.labelled_batch > 0
    assert data.shifted == 0  # the batch is for the density; the images with a label are shifted by the objective
    assert experiment(both[0], "paper", "paper", seed=3) == experiment(both[0], "short", "ours", seed=3)


def test_the_cells_that_can_be_requested():
    plan = semi_supervised.PLAN
    assert [str(c) for c in plan.choose(Job(budget="short"))] == [
        f"mnist {name} {labels}" for labels in (10, 100, 1000) for name in ("hybrid", "labels alone")
    ]
    assert [c.label for c in plan.choose(Job())] == ["hybrid 10", "labels alone 10", "hybrid 100", "labels alone 100"]
    assert [str(c) for c in plan.choose(Job(budget="short", datasets=("digits",), models=("hybrid1000",)))] == [
        "digits hybrid 1000"
    ]
    folder = Job(budget="short").run_folder(cells.find_cell("mnist", "labels alone 10"), 1)
    assert folder.parts[-2:] == ("semi-supervised", "mnist-labels-alone-10-seed1")


@pytest.mark.parametrize("change", ["data.labelled=50", "data.seed=5", "objective.density=1.0", "kind=hybrid"])
def test_a_setting_must_not_turn_a_cell_into_another(change):
    with pytest.raises(ValueError, match=f"must not turn hybrid 10 into another cell; got --set {change}."):
        RESULTS["semi-supervised"].check(Job(overrides=(change,)))


# Few labels: the result


def test_a_row_for_every_number_of_labels_with_both_errors(few):
    rows = few.outcome.results.rows
    assert [(r["dataset"], r["labels"]) for r in rows] == [("digits", 10), ("digits", 100)]
    for row in rows:
        assert row["low"] < row["error %"] < row["high"]
        assert row["labels alone, low"] < row["labels alone, error %"] < row["labels alone, high"]
        assert 1 < row["bits/dim"] < 10
        assert (row["images"], row["blocks proven"], row["seeds"]) == (360, "2 of 2", 1)
    assert rows[1]["error %"] < rows[0]["error %"]  # more labels, fewer errors
    runs = few.outcome.results.runs
    for row in rows:
        assert [runs[i]["model"] for i in row["runs"]] == [f"hybrid {row['labels']}", f"labels alone {row['labels']}"]
    assert [r["labels"] for r in semi_supervised.paired_rows(runs[::-1])] == [
        10,
        100,
    ]  # in whatever order they are made


def test_seeds_are_averaged_and_other_settings_are_rows_of_their_own(few):
    runs = few.outcome.results.runs
    second = [{**e, "seed": 1, "row": {**e["row"], "error %": e["row"]["error %"] + 2}} for e in runs]
    other = [{**e, "settings": ["training.steps=3"]} for e in runs]
    rows = semi_supervised.paired_rows([*runs, *second, *other])
    assert [(r["labels"], r["seeds"]) for r in rows] == [(10, 2), (100, 2), (10, 1), (100, 1)]
    first = few.outcome.results.rows[0]
    assert rows[0]["labels alone, error %"] == pytest.approx(first["labels alone, error %"] + 1)
    assert rows[0]["spread"] == rows[0]["labels alone, spread"] == pytest.approx(2**0.5)
    assert rows[0]["low"] is None  # the interval of one network's error
    assert len(rows[0]["runs"]) == 4


def test_both_networks_have_the_same_labels_balanced_and_nothing_else(few):
    for labels in (10, 100):
        hybrid, alone = (
            Run.open(few.out / "semi-supervised" / f"digits-{n}-{labels}") for n in ("hybrid", "labels-alone")
        )
        y, same = (run.splits().train.y for run in (hybrid, alone))
        assert torch.equal(y, same)
        assert y[y >= 0].bincount().tolist() == [labels // 10] * 10
        last = [run.log()[-1] for run in (hybrid, alone)]
        assert [row["step"] for row in last] == [40, 40]
        assert last[0]["bits/dim"] > 0
        assert "bits/dim" not in last[1]


def test_errors_are_those_of_the_final_weights(few):
    for row in few.outcome.results.rows:
        for name, key in (("hybrid", "error %"), ("labels-alone", "labels alone, error %")):
            run = Run.open(few.out / "semi-supervised" / f"digits-{name}-{row['labels']}")
            model, test = run.model(), run.splits().test
            wrong = (model.logits(test.x.float() + 0.5).argmax(1) != test.y).float().mean()
            assert row[key] == pytest.approx(100 * float(wrong))


def test_nothing_is_computed_twice_and_one_cell_may_be_missing(few, monkeypatch, tmp_path):
    for module, name in ((job, "start"), (job, "resume"), (table4, "protocol"), (evaluation.evaluate, "error")):
        monkeypatch.setattr(module, name, fail)
    assert RESULTS["semi-supervised"].run(Work(few.work.job)).results.rows == few.outcome.results.rows
    runs = few.out / "semi-supervised"
    for models, missing in ((("hybrid 10",), "labels alone, error %"), (("labels alone 10",), "error %")):
        one = Job(out=tmp_path / models[0], runs=runs, models=models)
        (row,) = RESULTS["semi-supervised"].run(Work(one)).results.rows
        assert row[missing] is None
        assert row["labels"] == 10


def test_the_table_says_what_it_compares(few):
    text = shown(few.outcome)
    assert "…" not in text
    assert "alone: the same network, labels, augmentation and steps, without the likelihood" in text
    assert f"{few.outcome.results.rows[0]['labels alone, error %']:.2f}" in text


def test_seeds_have_labels_of_their_own():
    chosen = [
        load(experiment(cells.find_cell("digits", "hybrid 10"), "smoke", "ours", seed=s).data).train for s in (0, 1)
    ]
    assert not torch.equal(*(part.x[part.y >= 0] for part in chosen))


# The probe


def test_flows_and_a_classifier_are_probed():
    assert [str(c) for c in probe.PLAN.choose(Job(budget="short"))] == [
        "mnist flow",
        "mnist flow-released",
        "mnist flow-small",
        "mnist flow-noise",
        "mnist classifier",
    ]
    assert [str(c) for c in probe.PLAN.choose(Job(budget="short", datasets=("digits",)))] == [
        "digits flow",
        "digits classifier",
    ]
    short = experiment(cells.find_cell("digits", "classifier"), "short", "ours")
    assert (short.training.steps, short.training.epochs) == (1500, 0)


def test_the_rows_of_a_probe_say_what_the_network_was_trained_for(probed):
    rows = {r["model"]: r for r in probed.outcome.results.rows}
    assert {m: r["trained for"] for m, r in rows.items()} == {"classifier": "classification", "flow": "density"}
    flow, classifier = rows["flow"], rows["classifier"]
    assert flow["inputs, error %"] == classifier["inputs, error %"]  # the same pixels
    assert (flow["training rows"], flow["test rows"]) == (1221, 360)
    assert flow["numbers in a code"] == 64
    for published in json.loads((ROOT / "results" / "probe.json").read_text())["rows"]:
        assert set(published) <= {*flow, "settings"}  # the columns of the published table
    for row in (flow, classifier):
        run = Run.open(probed.out / ("table4" if row is flow else "table2") / f"digits-{row['model']}")
        splits = run.splits()
        found = linear_probe(run.model(), splits.train, splits.test)
        assert row["codes, error %"] == found.codes.value
        assert row["codes, 95 % interval"] == f"{found.codes.low:.2f} to {found.codes.high:.2f}"


def test_a_probe_is_not_repeated_and_is_that_of_the_command(probed, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(probe.evaluate, "probe", fail)
        again = RESULTS["probe"].run(Work(probed.work.job))
    assert again.results.rows == probed.outcome.results.rows
    folder = copy_of(probed.out / "table4" / "digits-flow", tmp_path / "run")
    before = json.loads((folder / "evaluation.json").read_text())["probe"]
    (folder / "evaluation.json").unlink()
    with pytest.raises(SystemExit) as stop:
        cli.main(["evaluate", str(folder), "--probe", "--rows", "360", "--draws", "2"])
    assert stop.value.code == 0
    assert json.loads((folder / "evaluation.json").read_text())["probe"] == before


def test_a_probe_of_fewer_images_is_made_again(probed, tmp_path):
    folder = copy_of(probed.out / "table4", tmp_path / "runs") / "digits-flow"
    known = json.loads((folder / "evaluation.json").read_text())
    known["probe"]["codes"] |= {"rows": 30, "value": 77.0}
    (folder / "evaluation.json").write_text(json.dumps(known))
    one = Job(out=tmp_path, runs=tmp_path / "runs", models=("flow",))
    (row,) = RESULTS["probe"].run(Work(one)).results.rows
    assert row["codes, error %"] == probed.outcome.results.rows[-1]["codes, error %"]


def test_the_table_of_the_probe_is_readable(probed):
    text = shown(probed.outcome)
    assert "…" not in text
    assert f"{probed.outcome.results.rows[0]['codes, error %']:.2f}" in text
