"""Training settings: number of steps, optimiser, learning-rate schedule, averaging and validation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeAlias, get_args

from ..allowed import Rule, check_settings, in_interval, minimum, positive

Optimiser: TypeAlias = Literal["adam", "adamax", "sgd"]
OPTIMISERS: tuple[str, ...] = get_args(Optimiser)
WARMUP = Rule(
    lambda n: 0 <= n < 1 or (1 <= n < math.inf and n == int(n)),
    "must be a fraction of training in [0, 1) or a number of steps",
    "Use e.g. 0.05 or 400.",
)


@dataclass(frozen=True)
class Training:
    """Training settings. The learning rate rises linearly over the warm-up and then follows the schedule."""

    #: Total number of steps.
    steps: Annotated[int, minimum(1)] = 1000
    #: If positive, `steps` is computed from it and the size of the training data.
    epochs: Annotated[int, minimum(0)] = 0
    #: The least number of steps that is computed from `epochs`.
    min_steps: Annotated[int, minimum(0)] = 0
    #: Training ends early after this many validations in a row that are no better than the best one; 0: it does not.
    patience: Annotated[int, minimum(0)] = 0
    #: Training ends early after this many seconds; 0: it does not.
    max_seconds: Annotated[float, minimum(0)] = 0.0
    #: Batch size: samples per step.
    batch: Annotated[int, minimum(1)] = 256
    #: For hybrids: samples with a label that are added to every batch, for the cross-entropy alone; the batch itself is
    #: then for the density alone. Use it where labels are few. 0: the cross-entropy is that of the batch's own labels.
    labelled_batch: Annotated[int, minimum(0)] = 0

    #: adam has decoupled weight decay (AdamW).
    optimiser: Optimiser = "adam"
    #: Peak learning rate, reached after the warm-up.
    learning_rate: Annotated[float, positive] = 2e-3
    #: linear: constant, then linear to zero over the last `cooldown` fraction of training; cosine: half a cosine down
    #: to zero; constant; milestones: multiplied by `decay` at each of the fractions of training in `milestones`.
    schedule: Literal["linear", "cosine", "constant", "milestones"] = "linear"
    #: Steps over which the learning rate rises; a number between 0 and 1 is a fraction of training.
    warmup: Annotated[int | float, WARMUP] = 50
    #: For the schedule linear: the last fraction of training, over which the learning rate falls.
    cooldown: Annotated[float, in_interval("[0, 1]", "is a fraction of training,")] = 0.4
    #: For the schedule milestones: the fractions of training after which the learning rate is multiplied by `decay`.
    milestones: Annotated[
        tuple[float, ...], Rule(lambda parts: all(0 < m < 1 for m in parts), "are fractions of training, in (0, 1)")
    ] = (0.3, 0.6, 0.8)
    #: For the schedule milestones: that factor.
    decay: Annotated[float, positive] = 0.2
    #: Maximum gradient norm; larger gradients are scaled down to it.
    clip: Annotated[float, positive] = 1.0
    #: For adam and adamax.
    betas: tuple[float, float] = (0.9, 0.99)
    #: For sgd.
    momentum: float = 0.9
    #: For sgd: Nesterov momentum instead of plain momentum.
    nesterov: bool = True
    #: Weight decay of linear layers and convolutions in residual branches and conditioners only: decoupled for adam, an
    #: l2 penalty for adamax and sgd.
    weight_decay: Annotated[float, minimum(0)] = 0.0
    #: The same for the head's weights.
    head_decay: Annotated[float, minimum(0)] = 0.0
    #: The same for all other parameters: biases, the scales and shifts of normalisations, the base.
    other_decay: Annotated[float, minimum(0)] = 0.0

    #: Decay per step of the moving average of the weights; 0: no averaging.
    average: Annotated[float, in_interval("[0, 1)", "is the decay of the averaged weights,")] = 0.99
    #: Which weights a run releases: the best on validation data, or the last.
    select: Literal["best", "last"] = "best"
    #: Steps between two validations.
    validate_every: Annotated[int, minimum(1)] = 200
    #: Steps between two checkpoints.
    save_every: Annotated[int, minimum(1)] = 200

    def __post_init__(self) -> None:
        check_settings(self)
        if self.patience and self.select == "last":
            raise ValueError(f"patience needs select = 'best', the weights it waits for; got {self.patience}.")

    def resolve_epochs(self, batches_per_epoch: int) -> Training:
        """Return these settings with `steps` computed from `epochs`, if epochs are given."""
        return replace(self, steps=max(self.min_steps, self.epochs * batches_per_epoch)) if self.epochs else self

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of step 0, 1, ...: step 0 has peak / warmup, and the last step is above zero."""
        warmup = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return self.learning_rate * warmup * self._schedule_factor(step)

    @property
    def warmup_steps(self) -> int:
        """The number of steps over which the learning rate rises.

        >>> Training(steps=200, warmup=0.05).warmup_steps, Training(steps=200, warmup=50).warmup_steps
        (10, 50)
        """
        return round(self.warmup * self.steps) if self.warmup < 1 else int(self.warmup)

    def _schedule_factor(self, step: int) -> float:
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "milestones":
            return math.prod(self.decay for m in self.milestones if step >= m * self.steps)
        if self.schedule == "cosine":
            done = max(0, step + 1 - self.warmup_steps) / max(1, self.steps + 1 - self.warmup_steps)
            return 0.5 + 0.5 * math.cos(math.pi * done)
        return min(1.0, (self.steps - step) / max(1.0, self.cooldown * self.steps))
