"""What is compared: one network, on random data, and the tasks that every method does with it.

A flow of `blocks` blocks x + g(x) on R^d, where g has the layers d - 64 - 64 - 64 - d with ELU between them and
Lip(g) <= 0.9, and an ActNorm around every block: `mlp_flow`. The weights are random, and so large that every layer is
at its bound. Steps are timed with a learning rate close to zero, so that every step is the same.

The inverse of random weights is an easy one: products of random matrices are far below the bounds of their norms. So
inverses and samples are also timed after a short training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

#: The tasks that are timed, by name; a step is a training step.
TIMED = {
    "exact": "step, exact",
    "series": "step, series",
    "roulette": "step, roulette",
    "log-prob": "log-likelihood",
    "estimate": "log p, estimated",
    "inverse": "inverse, proven",
    "sample": "sampling",
}

#: All tasks.
TASKS = {**TIMED, "memory": "peak memory of a training step", "growth": "growth with the size of the network"}

#: The tasks that are also timed with trained weights.
INVERSES = ("inverse", "sample")

#: Terms of the task "series".
TERMS = 10

#: Training steps in one call of the task "roulette", whose number of terms is random.
ROULETTE_STEPS = 4

#: Lip(g), the learning rate of every step, and the factor that brings every layer to its bound.
LIPSCHITZ, LEARNING_RATE, SATURATION = 0.9, 1e-6, 3.0

#: The steps of a trained network, and their learning rate.
TRAINED_STEPS, TRAINED_LEARNING_RATE = 300, 2e-3

#: The normal distributions of which the data are a mixture, and the deviation of their noise in every direction.
COMPONENTS, NOISE = 8, 0.05

Run: TypeAlias = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """The size of the network and of its batch, the device, and whether its weights are trained."""

    dimension: int
    blocks: int = 16
    hidden: tuple[int, ...] = (64, 64, 64)
    batch: int = 512
    device: str = "cpu"
    trained: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the layers of g, from its input to its output."""
        return (self.dimension, *self.hidden, self.dimension)

    @property
    def weights(self) -> str:
        """What the weights are, in a word."""
        return "trained" if self.trained else "random"

    def data(self) -> Tensor:
        """Return the batch, the same every time: a mixture close to affine subspaces, with standardised columns."""
        draw: Callable[[int, int], Tensor] = partial(torch.randn, generator=torch.Generator().manual_seed(1))
        rank = max(1, self.dimension // 2)
        plane, means = draw(rank, self.dimension) / rank**0.5, 4 * draw(COMPONENTS, self.dimension)
        chosen = torch.arange(self.batch) % COMPONENTS
        x = means[chosen] + draw(self.batch, rank) @ plane + NOISE * draw(self.batch, self.dimension)
        standardised: Tensor = (x - x.mean(0)) / x.std(0)
        return standardised.to(self.device)


@dataclass(frozen=True)
class Method:
    """What a library does with a case: for each task a function that prepares it, and returns what is timed."""

    parameters: int
    tasks: Mapping[str, Callable[[], Run]]
    #: Numbers that are known beside the times: evaluations of g, terms, errors.
    facts: Callable[[], dict[str, float]] = field(default=dict)


def count_parameters(parameters: Iterable[Tensor]) -> int:
    """Return how many numbers are trained.

    >>> count_parameters(torch.nn.Linear(2, 3).parameters())
    9
    """
    return sum(p.numel() for p in parameters)
