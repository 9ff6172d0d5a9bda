"""What happens beside the steps: figures are logged, averaged weights are judged and saved, best and last."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import checkpoint, evaluation
from ..checkpoint import Checkpoint
from ..data import Dataset, Schema, some
from ..guard import REMEDY, TrainingError
from ..logdet import PowerSeries, RussianRoulette
from ..objective import Aim, continuous, cross_entropy, unit_name
from ..residual import EXACT_UP_TO, full_precision
from ..training import State
from ..version import __version__
from .folder import Run
from .log import Log

LOG_EVERY = 10

#: Terms by which a density is watched that is trained with a roulette, whose few certain ones say too little.
TERMS = 20

#: Rows by which a density is watched during training; the final figures use all of them.
WATCHED = 1000


class Watch:
    """Looks at the state after every step: logs, judges averaged weights on validation data, saves best and last."""

    def __init__(self, run: Run, validation: Dataset, state: Mapping[str, Any], stop: Callable[[], bool]) -> None:
        self.run, self.validation, self.stop = run, validation, stop
        self.step, self.before = int(state.get("step", 0)), float(state.get("seconds", 0.0))
        self.best = float(state.get("best", math.inf))
        self.start = time.perf_counter()
        self.log = Log(run.folder, self.step, _validation_names(run.experiment.objective, run.schema))
        self.seen: list[Mapping[str, Tensor]] = []
        self.engine, self.precision = "", "float32"

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.start

    def note(self, figures: Mapping[str, Tensor]) -> None:
        self.seen.append(figures)

    def __call__(self, state: State) -> bool:
        settings, self.step = self.run.experiment.training, state.step
        self.engine, self.precision = str(state.advance), state.advance.precision
        done, halt = state.step >= settings.steps, self.stop()
        figures: dict[str, float] = {}
        if done or state.step % settings.validate_every == 0:
            figures = self._validate(state)
        save = done or halt or state.step % settings.save_every == 0
        if save or figures or state.step % LOG_EVERY == 0:
            means = {k: float(torch.stack([f[k].float() for f in self.seen]).mean()) for k in self.seen[0]}
            self.seen.clear()
            rate = settings.rate(state.step - 1)
            self.log.write({"step": state.step, "seconds": round(self.seconds, 2), "rate": rate, **means, **figures})
        if save:
            self._save(state)
        return halt and not done

    def _save(self, state: State) -> None:
        """Keep the state to go on from, unless it is spoilt: on a GPU the guard looks only now and then."""
        if not all(bool(p.isfinite().all()) for p in state.parameters):
            raise TrainingError(
                f"the weights of step {state.step} are not finite; the last checkpoint is kept. {REMEDY} "
                f"Then train anew, or resume from it."
            )
        snapshot, extra = state.snapshot(), {"seconds": self.seconds}
        if math.isfinite(self.best):
            extra["best"] = self.best
        kept = replace(snapshot, state={**snapshot.state, **extra})
        checkpoint.save(kept, self.run.folder / "last.safetensors", version=__version__)

    def _validate(self, state: State) -> dict[str, float]:
        model = state.averaged()
        figures, criterion = judge(model, self.validation, self.run.experiment.objective)
        criterion = criterion if math.isfinite(criterion) else math.inf
        last = self.run.experiment.training.select == "last"
        if last and state.step < self.run.experiment.training.steps:
            return figures
        if last or criterion < self.best or not (self.run.folder / "best.safetensors").exists():
            self.best = criterion
            finite = {name: value for name, value in figures.items() if math.isfinite(value)}
            kept = Checkpoint({"weights": dict(model.state_dict())}, {"step": state.step, **finite})
            checkpoint.save(kept, self.run.folder / "best.safetensors", version=__version__)
        return figures

    def close(self) -> None:
        self.log.close()


def _validation_names(aim: Aim, schema: Schema) -> list[str]:
    names = [] if aim.kind == "classification" else [f"validation {unit_name(schema.levels)}"]
    return names if aim.kind == "density" else [*names, "validation cross-entropy", "validation error %"]


@torch.no_grad()
def judge(model: nn.Module, rows: Dataset, aim: Aim) -> tuple[dict[str, float], float]:
    """Validation figures by name, and the one number that decides which weights are best: the objective itself.

    Likelihoods are exact up to 64 dimensions; beyond, they are estimated as in training, which is cheap enough, and in
    place of a roulette by a series.
    """
    figures, criterion, levels = {}, 0.0, rows.schema.levels
    if aim.kind != "classification":
        x = some(rows, WATCHED).x
        generator = torch.Generator(x.device).manual_seed(0)
        points = torch.split(continuous(x, levels, generator), evaluation.likelihood.CHUNK)
        flow = evaluation.as_flow(model)
        estimator = flow.estimator if math.prod(x.shape[1:]) > EXACT_UP_TO else None
        if isinstance(estimator, RussianRoulette):  # it needs a bound below 1, which weights not tightened may lack
            estimator = PowerSeries(terms=max(TERMS, 2 * estimator.terms))
        with full_precision(x):
            values = [flow.log_prob(p, estimator=estimator, generator=generator) for p in points]
        nats = -float(torch.cat(values).double().mean())
        per_dimension = nats / (math.prod(x.shape[1:]) * math.log(2))
        figures[f"validation {unit_name(levels)}"] = nats if levels is None else per_dimension
        criterion += per_dimension
    if aim.kind != "density":
        loss, found = cross_entropy(evaluation.logits(model, rows), rows.y)
        figures |= {f"validation {name}": float(value) for name, value in found.items()}
        criterion += aim.weight * float(loss)
    return figures, criterion
