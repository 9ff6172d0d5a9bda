"""What happens beside the steps: figures are logged, averaged weights are judged and saved, best and last."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from .. import evaluate
from ..branch import nominal_constant
from ..certificate import residual_blocks
from ..data import Dataset, Schema, subsample
from ..evaluate.chunks import chunk_size, in_chunks
from ..flow import Flow
from ..logdet import EXACT_UP_TO, AdaptiveSeries, Estimator, PowerSeries
from ..precision import full_precision
from ..residual import ResidualBlock
from ..spectral import NoBoundKnown
from ..spelling import counted
from ..train import State, checkpoint
from ..train.checkpoint import Checkpoint
from ..train.guard import REMEDY, TrainingError
from ..train.objective import ObjectiveSettings, cross_entropy, unit_name
from ..transforms.dequantisation import dequantise_for
from ..version import __version__
from .folder import Run
from .log import Log

LOG_EVERY = 10

#: What the series leaves out by which a density is watched, in bits per dimension, all blocks together; and its terms
#: where no constant below 1 is asked for, so that nothing says how many it takes.
BIAS, TERMS = 1e-3, 20

#: Rows by which a density is watched during training; the final figures use all of them.
VALIDATION_SAMPLES = 1000

#: By how much training's series makes likelihoods look better than they are, in the log; and how much of it the user is
#: told of, in bits per dimension: less is what a short series costs before a network learns to make use of it.
TRUNCATION = "validation truncation bits/dim"
TRUNCATION_WARNED = 0.01


class RunCallback:
    """Looks at the state after every step: logs, judges averaged weights on validation data, saves best and last."""

    def __init__(
        self, run: Run, model: nn.Module, validation: Dataset, state: Checkpoint, stop: Callable[[], bool]
    ) -> None:
        self.run, self.validation, self.stop = run, validation, stop
        self.step, self.before = state.read_count("step"), state.read_number("seconds", 0.0)
        self.best = state.read_number("best", math.inf)
        self.start = time.perf_counter()
        self.log = Log(run.folder, self.step, _validation_columns(run.experiment.objective, run.schema, model))
        self.seen: list[Mapping[str, Tensor]] = []
        self.engine, self.precision = "", "float32"

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.start

    def note(self, metrics: Mapping[str, Tensor]) -> None:
        self.seen.append(metrics)

    def __call__(self, state: State) -> bool:
        settings, self.step = self.run.experiment.training, state.step
        self.engine, self.precision = str(state.engine), state.engine.precision
        done, halt = state.step >= settings.steps, self.stop()
        metrics: dict[str, float] = {}
        if done or state.step % settings.validate_every == 0:
            metrics = self._validate(state)
        save = done or halt or state.step % settings.save_every == 0
        if save or metrics or state.step % LOG_EVERY == 0:
            means = {k: float(torch.stack([f[k].float() for f in self.seen]).mean()) for k in self.seen[0]}
            self.seen.clear()
            rate = settings.learning_rate_at(state.step - 1)
            self.log.write({"step": state.step, "seconds": round(self.seconds, 2), "rate": rate, **means, **metrics})
        if save:
            self._save(state)
        return halt and not done

    def _save(self, state: State) -> None:
        """Keep the state to go on from."""
        snapshot, extra = state.snapshot(), {"seconds": self.seconds, "made_with": self.run.made_with()}
        if math.isfinite(self.best):
            extra["best"] = self.best
        self._keep(replace(snapshot, state={**snapshot.state, **extra}), "last.safetensors", state.step)

    def _keep(self, content: Checkpoint, name: str, step: int) -> None:
        """Write a checkpoint, unless it is spoilt: on a GPU the guard looks only now and then."""
        if not all(bool(t.isfinite().all()) for group in content.tensors.values() for t in group.values()):
            raise TrainingError(
                f"the weights of step {step} are not finite; the last checkpoint is kept. {REMEDY} "
                f"Then train anew, or resume from it."
            )
        checkpoint.save(content, self.run.folder / name, version=__version__)

    def _validate(self, state: State) -> dict[str, float]:
        model = state.averaged_model()
        metrics, criterion = validate(model, self.validation, self.run.experiment.objective)
        criterion = criterion if math.isfinite(criterion) else math.inf
        last = self.run.experiment.training.select == "last"
        if last and state.step < self.run.experiment.training.steps:
            return metrics
        if last or criterion < self.best or not (self.run.folder / "best.safetensors").exists():
            self.best = criterion
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            says = {"step": state.step, **finite, "made_with": self.run.made_with()}
            self._keep(Checkpoint({"weights": dict(model.state_dict())}, says), "best.safetensors", state.step)
        return metrics

    def close(self) -> None:
        self.log.close()


def _validation_columns(aim: ObjectiveSettings, schema: Schema, model: nn.Module) -> list[str]:
    names = [] if aim.kind == "classification" else [f"validation {unit_name(schema.levels)}"]
    names += [TRUNCATION] if isinstance(getattr(model, "estimator", None), PowerSeries) else []
    return names if aim.kind == "density" else [*names, "validation cross-entropy", "validation error %"]


def truncation_warning(run: Run) -> str:
    """What is to be said of a run that has learned to use what training's series leaves out; empty where it has not."""
    found, terms = run.best_metrics().get(TRUNCATION, 0.0), counted(run.experiment.network.terms, "term")
    return "" if not found > TRUNCATION_WARNED else (
        f"Training's series of {terms} flatters by at least {found:.2f} bits/dim: the network has learned to use what "
        "it leaves out. Use more terms, a smaller lipschitz, or estimator=roulette."
    )  # fmt: skip


@torch.no_grad()
def validate(model: nn.Module, rows: Dataset, aim: ObjectiveSettings) -> tuple[dict[str, float], float]:
    """Validation figures by name, and the one number that decides which weights are best: the objective itself.

    Likelihoods are exact up to 64 dimensions; beyond, they are sums of series that leave out next to nothing, if every
    block is as contractive as asked for. Where training's own series is shorter, a figure says what it hides.
    """
    metrics: dict[str, float] = {}
    criterion = 0.0
    if aim.kind != "classification":
        metrics, criterion = _likelihood(evaluate.as_flow(model), subsample(rows, VALIDATION_SAMPLES))
    if aim.kind != "density":
        loss, found = cross_entropy(evaluate.logits(model, rows), rows.y)
        metrics |= {f"validation {name}": float(value) for name, value in found.items()}
        criterion += aim.weight * float(loss)
    return metrics, criterion


def _likelihood(flow: Flow, rows: Dataset) -> tuple[dict[str, float], float]:
    """Likelihoods of rows with one draw of noise that never changes; and in bits per dimension."""
    x, levels = rows.x, rows.schema.levels
    generator = torch.Generator(x.device).manual_seed(0)
    with full_precision(x):
        noisy, spent = dequantise_for(flow, x, levels, generator)
    size = chunk_size(flow, noisy, evaluate.chunks.CHUNK)
    probes, unit = generator.get_state(), math.prod(x.shape[1:]) * math.log(2)

    def nats(estimator: Estimator | None) -> Tensor:
        generator.set_state(probes)
        found = in_chunks(lambda p: flow.log_prob(p, estimator=estimator, generator=generator), noisy, size)
        return spent.double() - found.double()

    blocks = [block for _, block, _ in residual_blocks(flow, rows.schema.shape)]
    true = nats(_validation_estimator(flow, blocks, x))
    mean = float(true.mean())
    metrics = {f"validation {unit_name(levels)}": mean if levels is None else mean / unit}
    if isinstance(flow.estimator, PowerSeries):
        metrics[TRUNCATION] = _lower_bound(true - nats(flow.estimator)) / unit
    return metrics, mean / unit


def _validation_estimator(flow: Flow, blocks: list[ResidualBlock], x: Tensor) -> Estimator | None:
    """None, for exact determinants, where there are few dimensions; else a series that stops when its rest is small.

    Training's own would be judged by what it is rewarded for, and to prove a constant of weights that were not
    tightened would take longer than many steps: the one asked for is taken as true.
    """
    d = math.prod(x.shape[1:])
    if d <= EXACT_UP_TO or not blocks:  # other transforms have determinants of their own
        return None
    lipschitz = max(_requested_lipschitz(block) for block in blocks)
    if not lipschitz < 1:
        return PowerSeries(max(TERMS, 2 * getattr(flow.estimator, "terms", 0)))
    return AdaptiveSeries(lipschitz, BIAS * d * math.log(2) / len(blocks))


def _requested_lipschitz(block: ResidualBlock) -> float:
    """The constant of g that its coefficients promise, or that was asserted; infinite where there is none."""
    try:
        return nominal_constant(block.g) if block.asserted is None else block.asserted
    except NoBoundKnown:
        return math.inf


def _lower_bound(flattery: Tensor) -> float:
    """The mean over rows less two standard errors, since probes are noise; zero where that hides it."""
    error = float(flattery.std()) / math.sqrt(len(flattery)) if len(flattery) > 1 else math.inf
    return max(0.0, float(flattery.mean()) - 2 * error)
