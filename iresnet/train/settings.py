"""How to train, as settings: how many steps, by which optimiser, at which rates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeAlias, get_args

from ..allowed import Rule, check_settings, in_interval, minimum, positive

Optimiser: TypeAlias = Literal["adam", "adamax", "sgd"]
OPTIMISERS: tuple[str, ...] = get_args(Optimiser)


@dataclass(frozen=True)
class Training:
    """How to train. The rate rises over `warmup` steps, and then follows the schedule."""

    #: Steps in all.
    steps: Annotated[int, minimum(1)] = 1000
    #: Where given, the number of steps follows from it and the data.
    epochs: Annotated[int, minimum(0)] = 0
    #: Rows a step.
    batch: Annotated[int, minimum(1)] = 256

    optimiser: Optimiser = "adam"
    #: The full rate, after the warm-up.
    learning_rate: Annotated[float, positive] = 2e-3
    #: linear: flat, then straight down to zero over the last `cooldown` part; cosine: half a cosine down to zero;
    #: constant: flat; milestones: times `decay` after each of these parts of training.
    schedule: Literal["linear", "cosine", "constant", "milestones"] = "linear"
    #: Steps over which the rate rises.
    warmup: Annotated[int, minimum(0)] = 50
    cooldown: Annotated[float, in_interval("[0, 1]", "is the last part of training,")] = 0.4
    milestones: Annotated[
        tuple[float, ...], Rule(lambda parts: all(0 < m < 1 for m in parts), "are parts of training, in (0, 1)")
    ] = (0.3, 0.6, 0.8)
    decay: Annotated[float, positive] = 0.2
    #: The largest norm of a gradient.
    clip: Annotated[float, positive] = 1.0
    #: Of Adam and Adamax.
    betas: tuple[float, float] = (0.9, 0.99)
    #: Of SGD.
    momentum: float = 0.9
    nesterov: bool = True
    #: Of the weights of linear layers and convolutions in residual branches and conditioners alone: decoupled from the
    #: gradient for adam, and as an l2 penalty for adamax and sgd.
    weight_decay: Annotated[float, minimum(0)] = 0.0
    #: Likewise, of those of the head.
    head_decay: Annotated[float, minimum(0)] = 0.0

    #: The decay of the averaged weights, step by step; 0: no average.
    average: Annotated[float, in_interval("[0, 1)", "is the decay of the averaged weights,")] = 0.99
    #: Which weights a run releases: the best on validation data, or the last.
    select: Literal["best", "last"] = "best"
    #: Steps between two looks at validation data, and between two checkpoints.
    validate_every: Annotated[int, minimum(1)] = 200
    save_every: Annotated[int, minimum(1)] = 200

    def __post_init__(self) -> None:
        check_settings(self)

    def resolve_epochs(self, per_epoch: int) -> Training:
        """The same settings with `steps` counted from `epochs`, where those are given."""
        return replace(self, steps=self.epochs * per_epoch) if self.epochs else self

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of step 0, 1, ...: the first is 1 / warmup of the full one, the last is above zero."""
        up = min(1.0, (step + 1) / max(1, self.warmup))
        return self.learning_rate * up * self._down(step)

    def _down(self, step: int) -> float:
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "milestones":
            return math.prod(self.decay for m in self.milestones if step >= m * self.steps)
        if self.schedule == "cosine":
            done = max(0, step + 1 - self.warmup) / max(1, self.steps + 1 - self.warmup)
            return 0.5 + 0.5 * math.cos(math.pi * done)
        return min(1.0, (self.steps - step) / max(1.0, self.cooldown * self.steps))
