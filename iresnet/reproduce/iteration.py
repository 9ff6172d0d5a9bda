"""Algorithm 1 as the paper runs it: x <- z - g(x), as many steps in every block, whether it converges or not.

What the library's own solvers refuse or stop is wanted here: the iteration on networks of which nothing is proven, and
its error after every number of steps. All of it is in float64, with the weights as they are stored. That the iteration
diverges says that it finds no inverse; it does not say that there is none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from ..branch import unconstrained_copy
from ..chain import Chain
from ..precision import full_precision
from ..residual import ResidualBlock
from ..spelling import at_least
from ..transform import Transform

#: A block's iteration has converged when its last step is this small, relative to x.
SETTLED = 1e-6

G: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Rebuilt:
    """What the iteration came to, per sample. `x` is NaN where numbers overflowed.

    `converged`: in every block the last step was tiny. `diverged`: in some block the steps grew. Neither: still moving.
    """

    x: Tensor
    converged: Tensor
    diverged: Tensor

    def errors(self, truth: Tensor) -> Tensor:
        """||x - truth|| per sample; infinite where x is not finite."""
        distance = (self.x - truth).flatten(1).norm(dim=1)
        return torch.nan_to_num(distance, nan=torch.inf)


class Unwinder:
    """A model's transform in float64, cut into steps that can be undone one by one."""

    def __init__(self, model: nn.Module) -> None:
        transform = cast(Transform, copy.deepcopy(cast(Any, model).transform)).double().eval()
        self.steps = [
            _Block(unconstrained_copy(t.g).double()) if isinstance(t, ResidualBlock) else t for t in _leaves(transform)
        ]
        self.blocks = sum(isinstance(step, _Block) for step in self.steps)

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        """The code of x."""
        x = x.double()
        with full_precision(x):
            for step in self.steps:
                x = x + step.g(x) if isinstance(step, _Block) else step(x)
        return x

    @torch.no_grad()
    def decode(self, z: Tensor, iterations: int) -> Rebuilt:
        """Undo every block by so many steps of Algorithm 1, the others exactly."""
        at_least(1, iterations=iterations)
        x = z.double()
        finite, settled = (torch.ones(len(x), dtype=torch.bool, device=x.device) for _ in range(2))
        grown = ~finite
        with full_precision(x):
            for step in reversed(self.steps):
                if isinstance(step, _Block):
                    x, first, last = step.undo(x, iterations)
                    settled &= last <= SETTLED * x.flatten(1).norm(dim=1).clamp_min(1.0)
                    grown |= ~(last <= first)
                else:
                    x = step.inverse(x)
                finite &= x.isfinite().flatten(1).all(dim=1)
                x = torch.where(_like(finite, x), x, 0.0)  # a row that is lost goes on as zeros
        grown |= ~finite
        return Rebuilt(torch.where(_like(finite, x), x, torch.nan), settled & ~grown, grown)


@dataclass(frozen=True)
class _Block:
    g: G

    def undo(self, z: Tensor, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
        """(x, length of the first step, of the last)."""
        x, first, last = z, None, None
        for _ in range(iterations):
            following = z - self.g(x)
            last = (following - x).flatten(1).norm(dim=1)
            first = last if first is None else first
            x = following
        return x, cast(Tensor, first), cast(Tensor, last)


def _leaves(t: Transform) -> Iterator[Transform]:
    if isinstance(t, Chain):
        for part in t:
            yield from _leaves(part)
    elif t.parts():
        raise ValueError(f"Algorithm 1 runs along a chain of blocks; got a {type(t).__name__}. Set factor_out=false.")
    else:
        yield t


def _like(rows: Tensor, x: Tensor) -> Tensor:
    return rows.reshape(-1, *(1,) * (x.dim() - 1))
