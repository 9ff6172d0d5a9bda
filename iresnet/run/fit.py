"""From settings to a model: load the data, train, keep the best weights, release them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import data, lock
from ..base import FullMixture
from ..certificate import Certificate
from ..data import Dataset, Splits
from ..data.conversion import refuse_degenerate_columns, refuse_impossible_rows
from ..lipschitz import defer_norms
from ..model import Model
from ..models import Network
from ..presets import Experiment
from ..results import provenance
from ..spelling import quoted
from ..train import Report, TrainingError, train
from ..train.checkpoint import Checkpoint
from ..train.distributed import ALONE, Group
from ..tree import parameter_count
from .board import TensorBoard
from .callback import RunCallback, has_ended
from .folder import Run, fingerprints
from .logger import Logger, Loggers
from .memory import MemoryRun
from .pilot import build_start
from .releasing import certify_model, release, write_certificate
from .shared import SharedTraining, check_batch, make_batches, prepare

#: What tells the parts of a run apart that were trained by other code or on other hardware.
IDENTITY = ("commit", "versions", "hardware", "device")


@dataclass(frozen=True)
class FitResult:
    """The result of a training run: the last step, whether it finished, how the steps were taken, the certificate."""

    run: Run
    step: int
    finished: bool
    seconds: float
    certificate: Certificate | None = None
    tightened: tuple[str, ...] = ()
    engine: str = ""


@dataclass(frozen=True)
class Session:
    """How a training runs, beside its settings: where, who is told of the steps, what stops it, who shares it."""

    device: str
    report: Report | None = None
    stop: Callable[[], bool] = lambda: False
    group: Group = ALONE


def start(
    experiment: Experiment,
    folder: str | Path,
    *,
    device: str = "cpu",
    report: Report | None = None,
    stop: Callable[[], bool] = lambda: False,
    overwrite: bool = False,
    splits: Splits | None = None,
    loggers: Sequence[Logger] = (),
    group: Group = ALONE,
) -> FitResult:
    """Train an experiment in a new run folder. `splits` are its data, if they are already loaded.

    `loggers` get the metrics besides log.csv and TensorBoard's file. `group` are the processes that train it; this is
    rank 0, and the others call `follow`.
    """
    if not isinstance(experiment, Experiment):
        raise ValueError(f"experiment must be an Experiment; got {quoted(experiment)}. Use presets.find(name).")
    splits = data.load(experiment.data) if splits is None else splits
    if experiment.objective.kind != "classification":
        refuse_degenerate_columns(splits.train)
        if splits.held_out is not None:
            refuse_impossible_rows(splits.held_out)
    batches = make_batches(experiment, splits.train)
    check_batch(batches, group)
    experiment = replace(experiment, training=experiment.training.resolve_epochs(batches.per_epoch))
    experiment, model = initial_model(experiment, splits, stop)  # raises before anything is written
    # Absolute paths: the working directory may change.
    experiment = replace(experiment, data=experiment.data.resolved())
    with Run.lock_new_folder(folder):
        run = Run.create(folder, experiment, splits.schema, overwrite=overwrite)
        run.write_run_json("data.json", fingerprints(splits))
        return _fit(run, splits, Session(device, report, stop, group), loggers, model=model)


def initial_model(
    experiment: Experiment, splits: Splits, stop: Callable[[], bool] = lambda: False
) -> tuple[Experiment, Model]:
    """Build the untrained model of an experiment; return it with the settings that were chosen for these samples."""
    model = build_start(experiment, splits, stop)
    return replace(experiment, network=_with_components(experiment.network, model)), model


def _with_components(network: Network, model: Model) -> Network:
    """Return the settings with the number of components that was chosen for the model, without the wide one."""
    base = getattr(model, "base", None)
    return replace(network, components=base.components - 1) if isinstance(base, FullMixture) else network


def resume(
    folder: str | Path,
    *,
    device: str = "cpu",
    report: Report | None = None,
    stop: Callable[[], bool] = lambda: False,
    learning_rate: float | None = None,
    loggers: Sequence[Logger] = (),
    group: Group = ALONE,
) -> FitResult:
    """Resume the run in a folder from its last checkpoint. A finished run is not changed.

    `learning_rate` replaces the one in the settings, as is needed after divergence; the run folder notes the change.
    Nothing else can be changed.
    """
    with lock.lock_folder(Run.open(folder).require_writable().folder):
        run = Run.open(folder)
        last = run.folder / "last.safetensors"
        state = run.load_checkpoint(last) if last.is_file() else None
        step = state.read_count("step") if state else 0
        ended = state is not None and has_ended(run, state)
        if state is None or not (ended and (run.folder / "model.safetensors").is_file()):
            splits = run.splits()
            if not (run.folder / "data.json").is_file():  # the process was killed before it was written
                run.write_run_json("data.json", fingerprints(splits))
            run = run if learning_rate is None else run.with_learning_rate(learning_rate, step)
            check_batch(make_batches(run.experiment, splits.train), group)
            return _fit(run, splits, Session(device, report, stop, group), loggers, state=state)
        if learning_rate is not None:
            raise ValueError(
                f"{run.folder} is finished, so its learning rate cannot change. Start a new run with another --out."
            )
        group.share(None)
        certificate = _certificate_of(run)
        seconds = state.read_number("seconds", 0.0)
        return FitResult(run, step, True, seconds, certificate, tuple(run.tightened_layers()))


def _certificate_of(run: Run) -> Certificate | None:
    """Return the certificate of a finished run; write it if the process was killed before it did."""
    sha256, certificate = run.sha256(), certify_model(run.experiment, run.schema, run.model())
    if certificate is not None and not run.read_current_json("certificate.json"):
        write_certificate(run, certificate, sha256)
    return certificate


def _fit(
    run: Run,
    splits: Splits,
    session: Session,
    loggers: Sequence[Logger],
    *,
    state: Checkpoint | None = None,
    model: Model | None = None,
) -> FitResult:
    """Train the run's model from a checkpoint, or a model that was just built, and release it at the end."""
    if model is None:
        torch.manual_seed(run.experiment.seed)
        with defer_norms():  # the norms are estimated on the device
            rows = (splits.train.x, splits.validation.x) if state is None else ()  # a checkpoint has what was fitted
            model = run.untrained_model(*rows)

    def note(callback: RunCallback) -> None:
        _write_environment(run, environment(callback, model, session.device), resumed=state is not None)

    step = 0 if state is None else state.read_count("step")
    board = TensorBoard(run.folder / "tensorboard")
    with Loggers((board, *loggers)).logging(run.experiment, step, run.folder) as logs:
        parts = splits.train, splits.validation
        callback = train_model(run, model, *parts, session, logs, state=state, note=note)
        result = FitResult(run, callback.step, False, callback.seconds, engine=callback.engine)
        if callback.ended and not session.stop():  # if stopped during the last step, `resume` does the rest
            certificate, tightened = release(run, splits.validation, session.device)
            result = replace(result, finished=True, certificate=certificate, tightened=tuple(tightened))
        logs.end(result)
    return result


def train_model(
    run: Run | MemoryRun,
    model: Model,
    samples: Dataset,
    validation: Dataset,
    session: Session,
    loggers: Loggers,
    *,
    state: Checkpoint | None = None,
    note: Callable[[RunCallback], None] = lambda callback: None,
    seconds: float = 0.0,
) -> RunCallback:
    """Train a model on datasets in memory, from a checkpoint if given; return how far it came.

    `seconds` are those that building the model took, which count. The run keeps the best weights. `note` is called
    after the first step, in case the process is killed, and at the end, also that of a run that diverged.
    """
    experiment, device, group = run.experiment, session.device, session.group
    begin = Checkpoint({}, {"step": 0, "seconds": seconds}) if state is None else state
    group.share(None if has_ended(run, begin) else SharedTraining.of(experiment, samples, model, state, device))
    objective, batches, generator = prepare(experiment, samples, model, device)
    on_device = validation.repeated().to(device)
    callback = RunCallback(run, model, on_device, begin, lambda: group.any(session.stop()), loggers)
    first = callback.step

    def on_step(step: int, steps: int, metrics: Mapping[str, Tensor]) -> None:
        if callback.step == first:
            note(callback)
        callback.collect(metrics)
        if session.report is not None:
            session.report(step, steps, metrics)

    try:
        if state is None and isinstance(getattr(model, "base", None), FullMixture):
            callback.validate_initial(model)
        if not callback.ended:
            train(
                objective, batches.starting_at(begin.read_count("step")), experiment.training, generator=generator,
                acceleration=experiment.acceleration, report=on_step, resume=state, group=group,
                callback=lambda state: group.decide(callback(state)),
            )  # fmt: skip
            group.leave()
    except TrainingError:
        note(callback)
        raise
    finally:
        callback.close()
    note(callback)
    return callback


def environment(callback: RunCallback, model: Model, device: str) -> dict[str, Any]:
    """Return how a model was trained, up to the current step: the content of environment.json."""
    experiment = callback.run.experiment
    return {"device": device, "engine": callback.engine, "step": callback.step} | provenance(
        seeds=[experiment.seed],
        seconds=callback.seconds,
        precision=callback.precision,
        epochs=experiment.training.epochs or None,
        parameters=parameter_count(model),
    )


def _write_environment(run: Run, content: dict[str, Any], *, resumed: bool) -> None:
    if changes := run.changes():
        content["changes"] = changes
    if resumed and (earlier := _earlier_parts(run.read_json("environment.json"), content)):
        content["earlier"] = earlier
    run.write_run_json("environment.json", content)


def _earlier_parts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return how the earlier parts of a run were made, if it was resumed on other hardware or by other code."""
    parts = list(before.get("earlier", []))
    if any(before[key] != now[key] for key in IDENTITY if key in before):
        parts.append({key: before[key] for key in (*IDENTITY, "engine", "precision", "step", "date") if key in before})
    return parts
