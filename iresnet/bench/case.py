"""What is compared: one network, on random data, and the tasks that every method does with it.

A flow of `blocks` blocks x + g(x) on R^d, where g has the layers d - 64 - 64 - 64 - d with ELU between them and
Lip(g) <= 0.9, and an ActNorm around every block: `mlp_flow`. The weights are random, and so large that every layer is
at its bound, as after training. Nothing is trained: the learning rate is close to zero, so that every step is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

#: The tasks that are timed, by name; a step is a training step.
TIMED = {
    "exact": "step, exact",
    "series": "step, series",
    "roulette": "step, roulette",
    "log-prob": "log-likelihood",
    "inverse": "inverse, proven",
    "sample": "sampling",
}

#: All tasks.
TASKS = {**TIMED, "memory": "peak memory of a training step", "growth": "growth with the size of the network"}

#: Terms of the task "series".
TERMS = 10

#: Training steps in one call of the task "roulette", whose number of terms is random.
ROULETTE_STEPS = 4

#: Lip(g), the learning rate of every step, and the factor that brings every layer to its bound.
LIPSCHITZ, LEARNING_RATE, SATURATION = 0.9, 1e-6, 3.0

Run: TypeAlias = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """The size of the network and of its batch, and the device."""

    dimension: int
    blocks: int = 16
    hidden: tuple[int, ...] = (64, 64, 64)
    batch: int = 512
    device: str = "cpu"

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the layers of g, from its input to its output."""
        return (self.dimension, *self.hidden, self.dimension)

    def data(self) -> Tensor:
        """Return the batch, which is the same every time."""
        return torch.randn(self.batch, self.dimension, generator=torch.Generator().manual_seed(1)).to(self.device)


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
