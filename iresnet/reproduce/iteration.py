"""Algorithm 1 as the paper runs it: x <- z - g(x), the same number of steps in every block, converging or not.

The library's own solvers refuse networks without a proof and stop when they converge; here the iteration runs on any
network, and its error is measured after any number of steps. Everything is in float64 with the stored weights. A
diverging iteration finds no inverse, which does not mean that there is none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import Tensor

from ..branch import unconstrained_copy
from ..chain import Chain
from ..model import Model
from ..precision import full_precision
from ..residual import ResidualBlock
from ..spelling import at_least
from ..transform import Transform

#: An iteration has converged when its last step is this small, relative to x.
CONVERGED = 1e-6

G: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Reconstruction:
    """The result of the iteration, per sample. `x` is NaN where numbers overflowed.

    `converged`: the last step was tiny in every block. `diverged`: the steps grew in some block. Neither: not yet
    converged.
    """

    x: Tensor
    converged: Tensor
    diverged: Tensor

    def errors(self, truth: Tensor) -> Tensor:
        """Return ||x - truth|| per sample; infinite where x is not finite, or its square overflows."""
        distance = (self.x - truth).flatten(1).norm(dim=1)
        return torch.where(distance.isnan(), torch.inf, distance)


class Algorithm1:
    """A model's transform in float64 as a list of steps, which `decode` inverts one by one."""

    def __init__(self, model: Model) -> None:
        transform = copy.deepcopy(model.transform).double().eval()
        self.steps = [
            _Block(unconstrained_copy(t.g).double()) if isinstance(t, ResidualBlock) else t for t in _leaves(transform)
        ]
        self.blocks = sum(isinstance(step, _Block) for step in self.steps)

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        """Return the code of x."""
        x = x.double()
        with full_precision(x):
            for step in self.steps:
                x = x + step.g(x) if isinstance(step, _Block) else step(x)
        return x

    @torch.no_grad()
    def decode(self, z: Tensor, iterations: int) -> Reconstruction:
        """Invert every block by a number of fixed-point iterations, and the other transforms exactly."""
        at_least(1, iterations=iterations)
        x = z.double()
        finite, converged = (torch.ones(len(x), dtype=torch.bool, device=x.device) for _ in range(2))
        diverged = ~finite
        with full_precision(x):
            for step in reversed(self.steps):
                if isinstance(step, _Block):
                    x, first, last = step.invert(x, iterations)
                    converged &= last <= CONVERGED * x.flatten(1).norm(dim=1).clamp_min(1.0)
                    diverged |= ~(last <= first)
                else:
                    x = step.inverse(x)
                finite &= x.isfinite().flatten(1).all(dim=1)
                x = torch.where(_expand(finite, x), x, 0.0)  # an overflowed sample continues as zeros
        diverged |= ~finite
        return Reconstruction(torch.where(_expand(finite, x), x, torch.nan), converged & ~diverged, diverged)


@dataclass(frozen=True)
class _Block:
    g: G

    def invert(self, z: Tensor, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, the length of the first step and that of the last."""
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
        raise ValueError(f"Algorithm 1 needs a chain of blocks; got a {type(t).__name__}. Set factor_out=false.")
    else:
        yield t


def _expand(mask: Tensor, x: Tensor) -> Tensor:
    return mask.reshape(-1, *(1,) * (x.dim() - 1))
