"""Weights & Biases and MLflow as loggers. Both packages are optional, and imported when a logger is made.

Where and as whom they log is up to their own environment variables (WANDB_MODE, MLFLOW_TRACKING_URI and so on). A run
folder keeps the tracker's id, so that a resumed run goes on in the same place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..spelling import hint
from .board import plain_name
from .logger import Logger

if TYPE_CHECKING:
    from .logger import Result

#: The project or experiment that runs are logged to, unless another is named.
PROJECT = "iresnet"


class WeightsAndBiases(Logger):
    """Logs to Weights & Biases; `options` are those of `wandb.init`."""

    def __init__(self, project: str = PROJECT, **options: Any) -> None:
        self.wandb, self.options = _import("wandb"), {"project": project, **options}
        self.run: Any = None

    def begin(self, settings: Mapping[str, Any], step: int, folder: Path | None) -> None:
        known: dict[str, Any] = {"name": settings["name"], "config": dict(settings)}
        known |= {"dir": str(folder)} if folder else {}
        known |= {"id": earlier, "resume": "allow"} if (earlier := _read_id("wandb", step, folder)) else {}
        self.run = self.wandb.init(**(known | self.options))
        _keep_id("wandb", self.run.id, folder)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def end(self, result: Result | None) -> None:
        if self.run is not None:
            self.run.summary.update(_summary(result))
            self.run.finish(exit_code=int(result is None))

    def __str__(self) -> str:
        return "Weights & Biases"


class MLflow(Logger):
    """Logs to MLflow, into an experiment of this name."""

    def __init__(self, experiment: str = PROJECT) -> None:
        self.client, self.experiment = _import("mlflow").MlflowClient(), experiment
        self.id = ""

    def begin(self, settings: Mapping[str, Any], step: int, folder: Path | None) -> None:
        self.id = _read_id("mlflow", step, folder)
        if self.id:
            return
        known = self.client.get_experiment_by_name(self.experiment)
        where = self.client.create_experiment(self.experiment) if known is None else known.experiment_id
        self.id = self.client.create_run(where, run_name=settings["name"]).info.run_id
        for name, value in settings.items():
            self.client.log_param(self.id, name, value)
        _keep_id("mlflow", self.id, folder)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.client.log_metric(self.id, plain_name(name), value, step=step)

    def end(self, result: Result | None) -> None:
        if not self.id:
            return
        for name, value in _summary(result).items():
            self.client.set_tag(self.id, name, value)
        stopped = not getattr(result, "finished", True)
        self.client.set_terminated(self.id, "FAILED" if result is None else "KILLED" if stopped else "FINISHED")


#: The trackers that the command knows.
TRACKERS = {"tensorboard": None, "wandb": WeightsAndBiases, "mlflow": MLflow}


def make_loggers(names: Iterable[str]) -> list[Logger]:
    """Return the loggers of these names; TensorBoard's file is always written if it can be."""
    loggers: list[Logger] = []
    for name in dict.fromkeys(names):
        if name not in TRACKERS:
            raise ValueError(f"unknown tracker {name!r}. {hint(name, TRACKERS)}")
        tracker = TRACKERS[name]
        if tracker is None:
            _import(name)
        else:
            loggers.append(tracker())
    return loggers


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        why = "which is not installed" if error.name == name else f"which cannot be imported ({error})"
        raise ValueError(f"logging to {name} needs the package {name}, {why}. Use: pip install {name}") from None


def _read_id(name: str, step: int, folder: Path | None) -> str:
    """Return the tracker's id of a run that is resumed; empty if it has none."""
    file = None if folder is None or not step else folder / f"{name}-id.txt"
    return file.read_text(encoding="utf-8").strip() if file is not None and file.is_file() else ""


def _keep_id(name: str, id_: str, folder: Path | None) -> None:
    if folder is not None:
        (folder / f"{name}-id.txt").write_text(f"{id_}\n", encoding="utf-8")


def _summary(result: Result | None) -> dict[str, Any]:
    """Return what is known at the end only."""
    certificate = getattr(result, "certificate", None)
    return {} if certificate is None else {"certified": certificate.passed, "certificate": certificate.summary()}
