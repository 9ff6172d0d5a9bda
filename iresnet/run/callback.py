"""The callback of a run: after each step it may log metrics, validate the averaged weights and save checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from .. import evaluate
from ..certificate import residual_blocks
from ..data import Dataset, Schema, subsample
from ..data.units import nats_per_bit_per_dim, nats_per_unit, unit_name
from ..evaluate.chunks import chunk_size, in_chunks
from ..flow import Flow
from ..logdet import EXACT_UP_TO, AdaptiveSeries, Estimator, PowerSeries
from ..model import Model
from ..precision import full_precision
from ..residual import ResidualBlock
from ..spectral import NoBoundKnown
from ..spelling import counted
from ..train import State
from ..train.average import Average
from ..train.checkpoint import Checkpoint
from ..train.guard import REMEDY, TrainingError
from ..train.objective import ObjectiveSettings, cross_entropy
from ..transforms.dequantisation import dequantise_for
from .folder import Run
from .logger import Loggers
from .made_with import made_with
from .memory import MemoryRun

LOG_EVERY = 10

#: Truncation error of the power series used for validation, in bits per dimension for all blocks together; and its
#: number of terms if no constant below 1 was requested, so that no number of terms can be derived.
BIAS, TERMS = 1e-3, 20

#: Number of samples that validate a density during training; the final metrics use all of them.
VALIDATION_SAMPLES = 1000

#: The metric for how much the truncated series of training overestimates likelihoods; and the value above which the
#: user is warned, in bits per dimension. Smaller values are the usual error of a short series, before a network learns
#: to exploit it.
TRUNCATION = "validation truncation bits/dim"
TRUNCATION_WARNED = 0.01


class RunCallback:
    """The callback of a run: logs, validates the averaged weights and saves the best and last checkpoints.

    The last checkpoint is not saved for a run without a folder, which cannot be resumed.
    """

    def __init__(
        self,
        run: Run | MemoryRun,
        model: Model,
        validation: Dataset,
        state: Checkpoint,
        stop: Callable[[], bool],
        loggers: Loggers,
    ) -> None:
        self.run, self.validation, self.stop, self.loggers = run, validation, stop, loggers
        self.step, self.seconds_before = state.read_count("step"), state.read_number("seconds", 0.0)
        self.best = state.read_number("best", math.inf)
        #: Validations since the best one; and whether training has ended, by its number of steps or early.
        self.waited, self.ended = int(state.read_number("waited", 0.0)), has_ended(run, state)
        self.start = time.perf_counter()
        self.log = run.open_log(self.step, _validation_columns(run.experiment.objective, run.schema, model))
        self._made_with = made_with(run.experiment, run.schema)
        self.unlogged: list[Mapping[str, Tensor]] = []
        #: The row of step 0, if the initial model was validated; written before the first other row.
        self.initial: dict[str, float] = {}
        self.engine, self.precision = "", "float32"

    @property
    def seconds(self) -> float:
        """Training time so far, earlier sessions included."""
        return self.seconds_before + time.perf_counter() - self.start

    def collect(self, metrics: Mapping[str, Tensor]) -> None:
        """Keep the metrics of a step for the mean in the next row of the log."""
        self.unlogged.append(metrics)

    def __call__(self, state: State) -> bool:
        settings, self.step = self.run.experiment.training, state.step
        self.engine, self.precision = str(state.engine), state.engine.precision
        done, halt = state.step >= settings.steps or self._is_late(), self.stop()
        metrics: dict[str, float] = {}
        if done or state.step % settings.validate_every == 0:
            metrics = self._validate(cast(Model, state.averaged_model()), state.step, last=done)
        self.ended = done or 0 < settings.patience <= self.waited
        save = self.ended or halt or state.step % settings.save_every == 0
        if save or metrics or state.step % LOG_EVERY == 0:
            means = {k: float(torch.stack([f[k].float() for f in self.unlogged]).mean()) for k in self.unlogged[0]}
            self.unlogged.clear()
            learning_rate = settings.learning_rate_at(state.step - 1)
            row = {"step": state.step, "seconds": round(self.seconds, 2), "learning_rate": learning_rate}
            whole = {**row, **means, **metrics}
            if self.initial:
                self.log.write(dict.fromkeys(whole) | self.initial)
                self.loggers.log(self.initial)
                self.initial = {}
            self.log.write(whole)
            self.loggers.log(whole)
        if save and self.run.resumable:
            self._save(state)
        return halt or self.ended

    def _is_late(self) -> bool:
        return 0 < self.run.experiment.training.max_seconds <= self.seconds

    def _save(self, state: State) -> None:
        """Save the training state to resume from."""
        snapshot, extra = state.snapshot(), {"seconds": self.seconds, "made_with": self._made_with}
        extra["waited"] = self.waited
        if self.ended:
            extra["ended"] = state.step
        if math.isfinite(self.best):
            extra["best"] = self.best
        self._write_checkpoint(replace(snapshot, state={**snapshot.state, **extra}), "last.safetensors", state.step)

    def _write_checkpoint(self, content: Checkpoint, name: str, step: int) -> None:
        """Write a checkpoint, unless it is not finite: on a GPU the guards only run every few steps."""
        if not all(bool(t.isfinite().all()) for group in content.tensors.values() for t in group.values()):
            raise TrainingError(
                f"the weights of step {step} are not finite; the last checkpoint is kept. {REMEDY} "
                f"Then train again, or resume from it."
            )
        self.run.save_checkpoint(content, name)

    def validate_initial(self, model: Model) -> None:
        """Validate the model before its first step: if no step improves it, it is the one that is released."""
        metrics = self._validate(Average(model, 0.0).result(model), 0, last=False)
        self.initial = {"step": 0, "seconds": round(self.seconds, 2), **metrics}

    def _validate(self, model: Model, step: int, *, last: bool) -> dict[str, float]:
        metrics, criterion = validate(model, self.validation, self.run.experiment.objective)
        criterion = criterion if math.isfinite(criterion) else math.inf
        select_last = self.run.experiment.training.select == "last"
        self.waited += 1
        if select_last and not last:
            return metrics
        if select_last or criterion < self.best or not self.run.has_checkpoint("best.safetensors"):
            self.best, self.waited = criterion, 0
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            content = {"step": step, **finite, "made_with": self._made_with}
            best = Checkpoint({"weights": dict(model.state_dict())}, content)
            self._write_checkpoint(best, "best.safetensors", step)
        return metrics

    def close(self) -> None:
        """Close the log."""
        self.log.close()


def has_ended(run: Run | MemoryRun, state: Checkpoint) -> bool:
    """Whether the training of a checkpoint has ended, by its number of steps or early."""
    step = state.read_count("step")
    return step >= run.experiment.training.steps or state.read_number("ended", -1.0) == step


def _validation_columns(objective: ObjectiveSettings, schema: Schema, model: Model) -> list[str]:
    names = [] if objective.kind == "classification" else [f"validation {unit_name(schema.levels)}"]
    names += [TRUNCATION] if isinstance(getattr(model, "estimator", None), PowerSeries) else []
    return names if objective.kind == "density" else [*names, "validation cross-entropy", "validation error %"]


def truncation_warning(run: Run) -> str:
    """Return a warning if the network has learned to exploit the truncation of training's series; empty if not."""
    found = run.best_metrics().get(TRUNCATION, 0.0)
    terms = counted(run.experiment.network.terms, "term")
    return "" if not found > TRUNCATION_WARNED else (
        f"Training's series of {terms} overestimates likelihoods by at least {found:.2f} bits/dim: the network has "
        "learned to exploit the truncation. Use more terms, a smaller lipschitz, or estimator=roulette."
    )  # fmt: skip


@torch.no_grad()
def validate(model: Model, data: Dataset, objective: ObjectiveSettings) -> tuple[dict[str, float], float]:
    """Return validation metrics by name, and the number that selects the best weights: the objective itself.

    Likelihoods are exact up to 64 dimensions. Beyond, they use a series with a negligible truncation error, provided
    every block is as contractive as requested. If training's own series is shorter, a metric shows its error.
    """
    metrics: dict[str, float] = {}
    criterion = 0.0
    if objective.kind != "classification":
        metrics, bits = _likelihood(evaluate.as_flow(model), subsample(data, VALIDATION_SAMPLES))
        criterion = bits if objective.kind == "density" else objective.density * bits
    if objective.kind != "density":
        loss, found = cross_entropy(evaluate.logits(model, data), data.y)
        metrics |= {f"validation {name}": float(value) for name, value in found.items()}
        criterion += objective.weight * float(loss)
    return metrics, criterion


def _likelihood(flow: Flow, data: Dataset) -> tuple[dict[str, float], float]:
    """Return the likelihood metrics, with the same noise at every call, and the loss in bits per dimension."""
    x, levels = data.x, data.schema.levels
    generator = torch.Generator(x.device).manual_seed(0)
    with full_precision(x):
        noisy, spent = dequantise_for(flow, x, levels, generator)
    size = chunk_size(flow, noisy, evaluate.chunks.CHUNK)
    probes, bit = generator.get_state(), nats_per_bit_per_dim(x.shape[1:])

    def nats(estimator: Estimator | None) -> Tensor:
        generator.set_state(probes)
        found = in_chunks(lambda p: flow.log_prob(p, estimator=estimator, generator=generator), noisy, size)
        return spent.double() - found.double()

    blocks = [block for _, block, _ in residual_blocks(flow, data.schema.shape)]
    true = nats(_validation_estimator(flow, blocks))
    mean = float(true.mean())
    metrics = {f"validation {unit_name(levels)}": mean / nats_per_unit(x.shape[1:], levels)}
    if isinstance(flow.estimator, PowerSeries):
        metrics[TRUNCATION] = _lower_bound(true - nats(flow.estimator)) / bit
    return metrics, mean / bit


def _validation_estimator(flow: Flow, blocks: list[ResidualBlock]) -> Estimator | None:
    """Return None (exact determinants) for few dimensions, else a series that stops when its remainder is small.

    Training's own estimator would hide the error that training exploits. Proving the constant of weights that are not
    tightened would take longer than many steps, so the requested constant is taken as true.
    """
    d = math.prod(flow.base.shape)
    if d <= EXACT_UP_TO or not blocks:  # other transforms have closed-form determinants
        return None
    lipschitz = max(_requested_lipschitz(block) for block in blocks)
    if not lipschitz < 1:
        return PowerSeries(max(TERMS, 2 * getattr(flow.estimator, "terms", 0)))
    return AdaptiveSeries(lipschitz, BIAS * nats_per_bit_per_dim(flow.base.shape) / len(blocks))


def _requested_lipschitz(block: ResidualBlock) -> float:
    """Return the Lipschitz constant of g that its coefficients request, or that was asserted; infinite if unknown."""
    try:
        return block.requested_constant()
    except NoBoundKnown:
        return math.inf


def _lower_bound(overestimate: Tensor) -> float:
    """Return the mean minus two standard errors, since the probes are random, but at least zero."""
    error = float(overestimate.std()) / math.sqrt(len(overestimate)) if len(overestimate) > 1 else math.inf
    return max(0.0, float(overestimate.mean()) - 2 * error)
