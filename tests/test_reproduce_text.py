"""What the paper states in its text, with the smoke budget: padding (App. C.2), and SGD at 0.1 (Sec. 5.2)."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from iresnet import cli
from iresnet.reproduce import RESULTS, Job, Stopped, Work, cells, padding, sgd
from iresnet.reproduce import job as jobs
from iresnet.reproduce.experiments import BUDGETS, RECIPES
from iresnet.run import Run
from iresnet.train import TrainingError

#: Settings that no network survives.
DIVERGING = ("training.steps=12", "training.momentum=1e30")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Both results of the budget smoke; c=0.9 is shared."""
    work = Work(Job(out=tmp_path_factory.mktemp("text"), overrides=("training.steps=12",)))
    outcomes = {name: RESULTS[name].run(work) for name in ("padding", "sgd")}
    return SimpleNamespace(work=work, out=work.job.out, outcomes=outcomes)


def fail(*_, **__):
    raise AssertionError("made twice")


# Padding


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_two_networks_differ_in_their_padding_alone(budget, recipe):
    job = Job(budget=budget, recipe=recipe)
    with_zeros, without = (job.experiment(c, 0) for c in padding.RESULT.plan.choose(job))
    assert with_zeros.network.padding == (3 if budget == "smoke" else 13)
    assert without.network == replace(with_zeros.network, padding=0)
    assert (without.data, without.training) == (with_zeros.data, with_zeros.training)
    assert without.objective == with_zeros.objective


def test_the_difference_is_that_of_the_errors(made):
    with_zeros, without = made.outcomes["padding"].results.rows
    assert (with_zeros["model"], without["model"]) == ("c=0.9", "no padding")
    assert without["worse by"] == without["error %"] - with_zeros["error %"]
    assert with_zeros["worse by"] is None
    assert without["parameters"] < with_zeros["parameters"]
    assert without["paper, worse by"] is None  # the paper has no digits
    assert without["blocks proven"] == "3 of 3"


def test_networks_of_other_settings_are_not_compared():
    def entry(model, error, budget):
        keys = {"dataset": "cifar10", "model": model, "budget": budget, "recipe": "ours", "settings": [], "seed": 0}
        return {**keys, "row": {"error %": error}, "details": {}}

    runs = [entry("c=0.9", 6.0, "short"), entry("no padding", 8.5, "short"), entry("no padding", 9.0, "paper")]
    rows = padding.rows_with_difference(runs)
    assert [r["worse by"] for r in rows] == [None, 2.5, None]
    assert [r["paper, worse by"] for r in rows] == [None, "about 2", None]


# SGD


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("budget", BUDGETS)
def test_all_networks_are_trained_alike_by_sgd_at_a_tenth(budget, recipe):
    job = Job(budget=budget, recipe=recipe)
    experiments = [job.experiment(c, 0) for c in sgd.RESULT.plan.choose(job)]
    assert len(experiments) == 4
    assert len({(e.data, e.objective, e.training) for e in experiments}) == 1
    training = experiments[0].training
    assert (training.optimiser, training.learning_rate, training.momentum) == ("sgd", 0.1, 0.9)


@pytest.mark.parametrize("name", ["affine Glow", "additive Glow"])
def test_a_glow_trained_by_sgd_is_that_of_table_3(name):
    by_sgd, by_adam = (cells.find_cell("cifar10", label) for label in (f"{name} SGD", name))
    assert by_sgd.experiment.network == by_adam.experiment.network
    assert by_sgd.folder != by_adam.folder


def test_finished_trainings_have_an_error_and_their_losses(made):
    rows = made.outcomes["sgd"].results.rows
    assert [r["model"] for r in rows] == ["c=0.9", "i-ResNet Glow-style", "affine Glow SGD", "additive Glow SGD"]
    for row in rows:
        assert row["outcome"] == "finished"
        assert row["low"] < row["error %"] < row["high"]
        log = Run.open(made.work.job.run_folder(cells.find_cell("digits", row["model"]), 0)).log()
        assert (row["first loss"], row["last loss"]) == (log[0]["cross-entropy"], log[-1]["cross-entropy"])
        assert (row["optimiser"], row["rate"]) == ("sgd", 0.1)


def test_c09_is_trained_once_for_both(made):
    folders = {p.name for p in (made.out / "table2").iterdir()}
    assert folders == {
        "digits-c0.9", "digits-no-padding", "digits-iresnet-glowstyle", "digits-affine-glow-sgd",
        "digits-additive-glow-sgd",
    }  # fmt: skip


@pytest.fixture(scope="module")
def diverged(tmp_path_factory):
    """A Glow that diverges: its job, what the command recorded, and the run folder."""
    job = Job(out=tmp_path_factory.mktemp("diverged"), models=("affine Glow SGD",), overrides=DIVERGING)
    results = RESULTS["sgd"].run(Work(job)).results
    folder = job.run_folder(cells.find_cell("digits", "affine Glow SGD"), 0)
    return SimpleNamespace(job=job, results=results, folder=folder)


def test_a_divergence_is_a_result_with_its_step_and_provenance(diverged):
    (row,), (run,) = diverged.results.rows, diverged.results.runs
    step = run["details"]["diverged"]["step"]
    assert row["outcome"] == f"diverged at step {step}"
    assert 1 < step <= 12
    assert run["details"]["diverged"]["why"].startswith("the ")
    assert row["error %"] is None
    assert {"command", "commit", "seconds", "hardware", "versions", "date", "parameters"} <= set(run)
    assert not (diverged.folder / "model.safetensors").exists()


def test_a_diverged_training_is_not_repeated(diverged, monkeypatch):
    for name in ("start", "resume"):
        monkeypatch.setattr(jobs, name, fail)
    again = RESULTS["sgd"].run(Work(diverged.job)).results
    assert again.rows == diverged.results.rows


def test_a_diverged_run_of_other_settings_is_refused(diverged):
    with pytest.raises(ValueError, match=r"holds a run with training.momentum = .*; the job requests 0.9"):
        RESULTS["sgd"].run(Work(replace(diverged.job, overrides=())))


def test_other_results_raise_the_error_of_a_divergence(tmp_path):
    with pytest.raises(TrainingError, match=r"of step \d+ is"):
        RESULTS["table2"].run(Work(Job(out=tmp_path, models=("vanilla",), overrides=DIVERGING)))


def test_errors_that_are_no_divergence_are_raised(monkeypatch, tmp_path):
    def no_batch(*_, **__):
        raise TrainingError("training needs at least one batch; got none.")

    monkeypatch.setattr(jobs, "start", no_batch)
    with pytest.raises(TrainingError, match="training needs at least one batch"):
        RESULTS["sgd"].run(Work(Job(out=tmp_path, models=("c=0.9",))))


def test_a_stopped_training_is_no_divergence_and_resumes(tmp_path):
    asked, job = iter(range(1000)), Job(out=tmp_path, models=("affine Glow SGD",), overrides=("training.steps=12",))
    with pytest.raises(Stopped, match="digits affine Glow SGD stopped and saved at step"):
        RESULTS["sgd"].run(Work(job, stop=lambda: next(asked) > 5))
    assert RESULTS["sgd"].run(Work(job)).results.rows[0]["outcome"] == "finished"


# The command


@pytest.mark.parametrize(
    ("name", "change"), [("padding", "network.padding=5"), ("sgd", "learning_rate=0.01"), ("sgd", "optimiser=adam")]
)
def test_what_a_cell_is_about_cannot_be_set(name, change):
    with pytest.raises(ValueError, match="--set must not turn .* into another cell; got --set"):
        RESULTS[name].check(Job(overrides=(change,)))


def test_the_command_says_which_training_diverged(diverged, capsys):
    words = ["--cells", "affine Glow SGD", "--out", str(diverged.job.out), "--device", "cpu"]
    with pytest.raises(SystemExit) as stop:
        cli.main(["reproduce", "sgd", *words, *(word for change in DIVERGING for word in ("--set", change))])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    step = json.loads((diverged.job.out / "sgd.json").read_text())["runs"][0]["details"]["diverged"]["step"]
    assert f"digits affine Glow SGD: diverged at step {step}" in out
    assert "…" not in out
