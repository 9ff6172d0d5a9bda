"""One training loop for every objective, to be read from top to bottom."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from .lipschitz import refresh_
from .objective import Objective

#: Called after every step with (steps done, steps in all, figures).
Report: TypeAlias = Callable[[int, int, dict[str, float]], None]


class TrainingError(RuntimeError):
    """Training cannot go on; the message names the step, the place and the remedy."""


@dataclass(frozen=True)
class Training:
    """How to train: Adam with warm-up, a flat stretch and a linear way down to zero over the last `cooldown` part."""

    steps: int = 1000
    learning_rate: float = 2e-3
    warmup: int = 50
    cooldown: float = 0.4
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.99)
    average: float = 0.99

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1; got {self.steps}.")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive; got {self.learning_rate}.")
        if not 0 <= self.cooldown <= 1:
            raise ValueError(f"cooldown is the last part of training, in [0, 1]; got {self.cooldown}.")
        if not 0 <= self.average < 1:
            raise ValueError(f"average is the decay of the averaged weights, in [0, 1); got {self.average}.")

    def rate(self, step: int) -> float:
        """The learning rate of step 0, 1, ...: the first is 1 / warmup of the full one, the last is above zero."""
        up = min(1.0, (step + 1) / max(1, self.warmup))
        down = min(1.0, (self.steps - step) / max(1.0, self.cooldown * self.steps))
        return self.learning_rate * up * down


def train(
    objective: Objective,
    batches: Iterable[Tensor],
    settings: Training,
    *,
    generator: torch.Generator | None = None,
    report: Report | None = None,
) -> nn.Module:
    """Minimise the objective over `settings.steps` batches; the model with averaged weights, in eval.

    The objective's own model is trained in place; the result is a copy whose norms were brought to convergence.
    """
    parameters = list(objective.parameters())
    optimiser = torch.optim.Adam(parameters, settings.learning_rate, betas=settings.betas, fused=True)
    average: Average | None = None
    objective.train()
    for step, batch in zip(range(settings.steps), batches, strict=False):
        for group in optimiser.param_groups:
            group["lr"] = settings.rate(step)
        loss, figures = objective(batch, generator=generator)
        _guard(objective, loss, step)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, settings.clip)
        optimiser.step()
        if average is None:  # after the first step, when data-dependent initialisation is done
            average = Average(objective.model, settings.average)
        average.update(objective.model)
        if report is not None:
            report(step + 1, settings.steps, {name: float(value) for name, value in figures.items()})
    if average is None:
        raise TrainingError("there was no batch to train on. Give at least one.")
    return average.result(objective.model)


class Average:
    """An exponential moving average of a model's parameters.

    Early on the decay is shortened to step / (step + 10), so that the start is forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.copy, self.decay, self.count = copy.deepcopy(model).requires_grad_(False), decay, 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move towards the model's present weights."""
        self.count += 1
        weight = 1 - min(self.decay, self.count / (self.count + 10))
        for mine, theirs in zip(self.copy.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs.detach(), weight)

    def result(self, model: nn.Module) -> nn.Module:
        """The averaged model in eval, with the live model's buffers and norms of its own."""
        state = dict(model.state_dict())
        state.update({name: p.detach() for name, p in self.copy.named_parameters()})
        self.copy.load_state_dict(state)
        refresh_(self.copy, settle=True)
        return self.copy.requires_grad_(True).eval()


def _guard(objective: Objective, loss: Tensor, step: int) -> None:
    """Stop at the first loss that is not a number, and say where it came from."""
    if math.isfinite(float(loss.detach())):
        return
    bad = [n for n, p in objective.named_parameters() if not bool(torch.isfinite(p).all())]
    place = (
        f"{bad[0]} is the first parameter that is not finite" if bad else "all parameters are finite, so see the data"
    )
    raise TrainingError(
        f"the loss of step {step + 1} is {float(loss.detach())}; {place}. "
        "Lower learning_rate, lengthen warmup, or clip harder."
    )
