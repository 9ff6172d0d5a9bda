"""Loggers: what they are told and when, one that fails, and the trackers on stand-ins for their packages."""

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from sklearn.base import clone

from iresnet.estimators import FlowDensity
from iresnet.run import Logger, MLflow, Run, WeightsAndBiases, resume, start, train_in_memory
from iresnet.train.guard import TrainingError
from tests.runs import tiny

KIND = "digits-density"


class Recorder(Logger):
    def __init__(self):
        self.begun, self.rows, self.ended = [], [], []

    def begin(self, settings, step, folder):
        self.begun.append((settings, step, folder))

    def log(self, step, metrics):
        self.rows.append((step, dict(metrics)))

    def end(self, result):
        self.ended.append(result)


class Broken(Recorder):
    """Fails in one method."""

    def __init__(self, method):
        super().__init__()
        self.method = method

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "__dict__").get("method"):
            raise ConnectionError("the server is gone")
        return super().__getattribute__(name)


class TestRuns:
    def test_settings_rows_and_result(self, tmp_path):
        recorder = Recorder()
        outcome = start(tiny(KIND), tmp_path / "run", loggers=[recorder])
        ((settings, step, folder),) = recorder.begun
        assert (settings["training.steps"], settings["name"], step, folder) == (6, KIND, 0, tmp_path / "run")
        assert recorder.ended == [outcome]
        assert outcome.certificate.passed
        written = [{k: v for k, v in row.items() if v is not None} for row in Run.open(tmp_path / "run").log()]
        assert [step for step, _ in recorder.rows] == [row.pop("step") for row in written]
        for (_, metrics), row in zip(recorder.rows, written, strict=True):
            assert metrics == pytest.approx(row, rel=1e-5)

    def test_a_stopped_and_resumed_run(self, tmp_path):
        first, second, calls = Recorder(), Recorder(), iter(range(100))
        start(tiny(KIND), tmp_path / "run", loggers=[first], stop=lambda: next(calls) >= 2)
        assert [result.finished for result in first.ended] == [False]
        resume(tmp_path / "run", loggers=[second])
        assert second.begun[0][1] == first.rows[-1][0] == 3
        assert second.rows[0][0] > 3
        assert second.ended[0].finished

    def test_a_run_that_diverges_ends_with_none(self, tmp_path):
        recorder = Recorder()
        with pytest.raises(TrainingError):
            start(tiny(KIND, learning_rate=1e30, clip=math.inf, steps=30), tmp_path / "run", loggers=[recorder])
        assert recorder.ended == [None]

    def test_training_in_memory(self):
        recorder, experiment = Recorder(), tiny("points-density")
        from iresnet.data import load

        splits = load(experiment.data)
        trained = train_in_memory(experiment, splits.train, splits.validation, loggers=[recorder])
        assert recorder.begun[0][2] is None
        assert [step for step, _ in recorder.rows] == [row["step"] for row in trained.log]
        assert recorder.ended == [trained]

    def test_an_estimator(self):
        recorder = Recorder()
        x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0)).numpy()
        model = FlowDensity(max_steps=4, blocks=1, width=4, random_state=0, loggers=(recorder,))
        assert clone(model).loggers[0] is not recorder
        model.fit(x)
        assert recorder.ended == [model.trained_]


class TestFailures:
    """A logger that raises is dropped with one warning: the run, its log and the other loggers are complete."""

    @pytest.mark.parametrize("method", ["begin", "log", "end"])
    def test_the_run_is_not_lost(self, tmp_path, method):
        broken, good = Broken(method), Recorder()
        sentence = r"cannot log to Broken: the server is gone. Training continues without it; the run's own log has"
        with pytest.warns(UserWarning, match=sentence) as seen:
            outcome = start(tiny(KIND), tmp_path / "run", loggers=[broken, good])
        assert len([w for w in seen if "Broken" in str(w.message)]) == 1
        assert outcome.finished
        assert (tmp_path / "run" / "model.safetensors").is_file()
        assert [step for step, _ in good.rows] == [row["step"] for row in outcome.run.log()]
        assert good.ended == [outcome]
        assert broken.ended == ([] if method == "end" else [None])


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package wandb: the runs that were begun."""
    runs = []

    def init(**options):
        run = SimpleNamespace(id=options.get("id", f"id{len(runs)}"), options=options, rows=[], summary={}, codes=[])
        run.log = lambda metrics, step: run.rows.append((step, metrics))
        run.finish = lambda exit_code: run.codes.append(exit_code)
        runs.append(run)
        return run

    module = ModuleType("wandb")
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


class TestWeightsAndBiases:
    def test_a_run(self, tmp_path, wandb):
        outcome = start(tiny(KIND), tmp_path / "run", loggers=[WeightsAndBiases("mine", mode="offline")])
        (run,) = wandb
        assert run.options["project"] == "mine"
        assert run.options["mode"] == "offline"
        assert run.options["name"] == KIND
        assert run.options["dir"] == str(tmp_path / "run")
        assert run.options["config"]["training.steps"] == 6
        assert "id" not in run.options
        assert [step for step, _ in run.rows] == [row["step"] for row in outcome.run.log()]
        assert "validation bits/dim" in run.rows[-1][1]
        assert run.summary["certified"] is True
        assert run.codes == [0]

    def test_a_resumed_run_goes_on_in_the_same_place(self, tmp_path, wandb):
        calls = iter(range(100))
        start(tiny(KIND), tmp_path / "run", loggers=[WeightsAndBiases()], stop=lambda: next(calls) >= 2)
        resume(tmp_path / "run", loggers=[WeightsAndBiases()])
        assert (wandb[1].options["id"], wandb[1].options["resume"]) == ("id0", "allow")

    def test_a_new_run_in_the_folder_of_another_has_an_id_of_its_own(self, tmp_path, wandb):
        for _ in range(2):
            start(tiny(KIND), tmp_path / "run", loggers=[WeightsAndBiases()], overwrite=True)
        assert "id" not in wandb[1].options


@pytest.fixture
def mlflow(monkeypatch):
    """A stand-in for the package mlflow: everything its client was told."""
    told = SimpleNamespace(params={}, metrics=[], tags={}, status=[], runs=[])

    class Client:
        def get_experiment_by_name(self, name):
            return None

        def create_experiment(self, name):
            return f"experiment {name}"

        def create_run(self, experiment_id, run_name):
            told.runs.append((experiment_id, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id=f"id{len(told.runs)}"))

        def log_param(self, run_id, key, value):
            told.params[key] = value

        def log_metric(self, run_id, key, value, step):
            assert all(c.isalnum() or c in "_-./" for c in key), key
            told.metrics.append((run_id, key, step))

        def set_tag(self, run_id, key, value):
            told.tags[key] = value

        def set_terminated(self, run_id, status):
            told.status.append(status)

    module = ModuleType("mlflow")
    module.MlflowClient = Client
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return told


class TestMLflow:
    def test_a_run(self, tmp_path, mlflow):
        start(tiny("digits-hybrid"), tmp_path / "run", loggers=[MLflow()])
        assert mlflow.runs == [("experiment iresnet", "digits-hybrid")]
        assert mlflow.params["training.steps"] == 6
        assert ("id1", "validation_error_percent", 6) in mlflow.metrics
        assert mlflow.tags["certified"] is True
        assert mlflow.status == ["FINISHED"]

    def test_a_resumed_run_goes_on_in_the_same_place(self, tmp_path, mlflow):
        calls = iter(range(100))
        start(tiny(KIND), tmp_path / "run", loggers=[MLflow()], stop=lambda: next(calls) >= 2)
        resume(tmp_path / "run", loggers=[MLflow()])
        assert len(mlflow.runs) == 1
        assert mlflow.status == ["KILLED", "FINISHED"]

    def test_a_run_that_diverges(self, tmp_path, mlflow):
        with pytest.raises(TrainingError):
            start(tiny(KIND, learning_rate=1e30, clip=math.inf, steps=30), tmp_path / "run", loggers=[MLflow()])
        assert mlflow.status == ["FAILED"]


SMALL = ("--set", "steps=2", "--set", "width=4", "--set", "blocks=[1]", "--device", "cpu")


class TestCommand:
    def test_log_to(self, call, tmp_path, wandb, mlflow):
        out = tmp_path / "run"
        code, _ = call("train", "points-density", *SMALL, "--out", out, "--log-to", "wandb", "--log-to", "mlflow")
        assert code == 0
        assert wandb[0].codes == [0]
        assert mlflow.status == ["FINISHED"]

    @pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
    def test_a_missing_package_is_refused_before_training(self, call, tmp_path, monkeypatch, name):
        monkeypatch.setitem(sys.modules, name, None)
        code, text = call("train", "points-density", *SMALL, "--out", tmp_path / "run", "--log-to", name)
        assert code == 2
        assert f"logging to {name} needs the package {name}" in text
        assert f"Use: pip install {name}" in text
        assert not (tmp_path / "run").exists()

    def test_an_unknown_tracker(self, call):
        code, text = call("train", "points-density", "--log-to", "wandv")
        assert (code, text) == (2, "iresnet: unknown tracker 'wandv'. Did you mean 'wandb'?\n")
