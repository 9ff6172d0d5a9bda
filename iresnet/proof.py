"""What is proven of an inverse, from numbers alone: the bound of one solve, and those of many as one.

    one      ||x - x*||  <=  Lip(F^-1) (||F(x) - z|| + what rounding hides)          Lip(F^-1) = 1 / (1 - L) for a block
    many     the bounds of all parts, each carried through the inverses that come after it, added up

Every inverse of this library is judged by these, whatever found it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from .float64 import UNIT, Rounding


def norms(x: Tensor) -> Tensor:
    """The l2 norm of every sample."""
    return cast(Tensor, torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim()))))


# ---------------------------------------------------------------------------------------------- one solve


def error_bound(r: Tensor, x: Tensor, z: Tensor, *, rounding: Rounding, expansion: float | Tensor) -> Tensor:
    """A bound of ||x - x*|| from the norms of F(x) - z, x and z in float64, and Lip(F^-1) = `expansion`; never NaN.

    An inverse that is the same for all codes has no error, whatever is left of them.
    """
    found = rounding.residual(r, x, z)
    carried = expansion * found
    return infinite_for_nan(torch.where(expansion > 0, carried, 0.0) if isinstance(expansion, Tensor) else carried)


def attainable(r: Tensor, x: Tensor, z: Tensor, *, rounding: Rounding, expansion: float | Tensor) -> Tensor:
    """The least that can be asked for: twice the bound of an x with no more residual than r, as float64 sees it."""
    return 2 * error_bound(r, x, z, rounding=rounding, expansion=expansion)


def meets(bound: Tensor, goal: Tensor) -> Tensor:
    """Whether a bound proves what is asked for."""
    return (bound <= goal) & torch.isfinite(bound)


def infinite_for_nan(error: Tensor) -> Tensor:
    """Errors of an iteration that has left all bounds are infinite."""
    return torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf)


# ---------------------------------------------------------------------------------------------- many


@dataclass(frozen=True)
class Aside:
    """Between two parts: so many pieces of the state are laid aside, or taken up again where it is negative."""

    count: int


def carried(steps: Sequence[float | Aside]) -> list[float]:
    """What an error behind each part becomes in x at most, for the Lip(F^-1) of each, from data to code.

    The product of those before it. Where pieces are taken up again, what comes after has the largest that any of them
    has.

    >>> carried([2.0, 3.0, 5.0]), carried([2.0, Aside(1), 3.0, Aside(-1), 5.0])
    ([1.0, 2.0, 6.0], [1.0, 2.0, 6.0])
    """
    factor, aside, found = 1.0, list[float](), list[float]()
    for step in steps:
        if not isinstance(step, Aside):
            found.append(factor)
            factor = factor * step if factor and step else 0.0
        elif step.count > 0:
            aside.extend([factor] * step.count)
        else:
            factor = max([factor, *(aside.pop() for _ in range(-step.count))])
    return found


def factors(steps: Sequence[float | Aside], device: torch.device) -> Tensor:
    """`carried`, a column for `composed`, with what the rounding of its products and of their sum can hide."""
    found = carried(steps)
    outward = 1 + 16 * (len(found) - 1) * UNIT
    return outward * torch.tensor(found, dtype=torch.float64, device=device)[:, None]


def composed(bounds: Tensor, factors: Tensor) -> Tensor:
    """The bound of the whole from those of its parts, a row each, with the `factors` of these rows.

    A part without an error has none to be amplified: 0 times infinity is 0 here.
    """
    return torch.where((bounds > 0) & (factors > 0), factors * bounds, 0.0).sum(0)
