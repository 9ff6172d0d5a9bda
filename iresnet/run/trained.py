"""A trained model with what a run folder stores about it: trained in memory, saved as a folder, or opened from one."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..certificate import Certificate, tighten_
from ..data import Dataset, Schema, Splits
from ..model import Model
from ..presets import Experiment
from ..train import Report, checkpoint
from .board import TensorBoard
from .fit import Session, environment, initial_model, train_model
from .folder import Run, fingerprint
from .logger import Logger, Loggers
from .memory import MemoryRun
from .releasing import certify_model, reference_likelihoods, write_model
from .shared import make_batches


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A model in eval mode, with its settings, its log and the log-likelihoods of validation samples."""

    experiment: Experiment
    schema: Schema
    model: Model
    reference: Tensor | None
    log: Sequence[Mapping[str, float | None]] = ()
    tightened: tuple[str, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    _weights: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_weights", self._digest())

    def _digest(self) -> str:
        """Return the digest of the weights, if there is a reference that belongs to them."""
        return "" if self.reference is None else checkpoint.digest(self.model.state_dict())

    @property
    def certificate(self) -> Certificate | None:
        """What is proven of the model as it is now; None for a family without residual blocks."""
        return certify_model(self.experiment, self.schema, self.model)

    @classmethod
    def open(cls, folder: str | Path) -> TrainedModel:
        """Open a run folder, or the shipped model of this name."""
        run = Run.open(folder)
        model = run.model()
        has_reference = "reference" in run.load_checkpoint(run.folder / "model.safetensors").tensors
        return cls(
            run.experiment, run.schema, model, run.reference() if has_reference else None, run.log(),
            tuple(run.tightened_layers()), run.read_json("data.json"), run.read_json("environment.json"),
        )  # fmt: skip

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Run:
        """Write a run folder; one that holds a run is refused, unless `overwrite` removes that run.

        The samples are not saved, so commands that need some must be given them with --data. A warning says if the
        weights have changed since this was made, as `reference` is then that of another model.
        """
        if self._digest() != self._weights:
            warnings.warn(
                "the weights have changed since the log-likelihoods of validation samples were computed, so anomaly "
                "scores are relative to another model. Replace them: dataclasses.replace(trained, reference=...), with "
                "evaluate.log_likelihood(trained.model, validation).value.",
                stacklevel=2,
            )
        with Run.lock_new_folder(folder):
            run = Run.create(folder, self.experiment, self.schema, overwrite=overwrite)
            for name, content in (("data.json", self.data), ("environment.json", self.environment)):
                run.write_run_json(name, content)
            log = run.open_log(0, [name for row in self.log for name in row if name.startswith("validation ")])
            with Loggers([TensorBoard(run.folder / "tensorboard")]).logging(self.experiment, 0, run.folder) as logs:
                for row in self.log:
                    log.write(row)
                    logs.log({name: value for name, value in row.items() if value is not None})
                logs.end(self)
            log.close()
            state = {"tightened": list(self.tightened)}
            write_model(run, self.model, self.certificate, self.reference, state)
        return run


def train_in_memory(
    experiment: Experiment,
    samples: Dataset,
    validation: Dataset,
    *,
    device: str = "cpu",
    report: Report | None = None,
    loggers: Sequence[Logger] = (),
) -> TrainedModel:
    """Train an experiment on datasets in memory: the best weights, tightened and certified."""
    training = experiment.training.resolve_epochs(make_batches(experiment, samples).per_epoch)
    splits = Splits(samples.repeated(), validation.repeated(), None)
    begin = time.perf_counter()

    def is_late() -> bool:
        return 0 < training.max_seconds <= time.perf_counter() - begin

    experiment, model = initial_model(replace(experiment, training=training), splits, is_late)
    run, seconds = MemoryRun(experiment, samples.schema), time.perf_counter() - begin
    with Loggers(loggers).logging(experiment, 0) as logs:
        callback = train_model(run, model, samples, validation, Session(device, report), logs, seconds=seconds)
        model = run.model(device)
        tightened = tighten_(model, run.schema.shape)
        reference = reference_likelihoods(model, splits.validation)
        trained = TrainedModel(
            run.experiment,
            run.schema,
            model.cpu(),
            None if reference is None else reference.cpu(),
            run.log.rows,
            tuple(tightened),
            {"train": fingerprint(samples), "validation": fingerprint(validation)},
            environment(callback, model, device),
        )
        logs.end(trained)
    return trained
