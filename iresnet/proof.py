"""Error bounds of an inverse, computed from norms alone: for one solve, and for a chain of solves.

    one solve    ||x - x*||  <=  Lip(F^-1) (||F(x) - z|| + rounding error)        Lip(F^-1) = 1 / (1 - L) for a block
    a chain      the bound of every part, times Lip(F^-1) of all parts before it, summed

Every inverse in this library is checked with these functions, whichever solver produced it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from .float64 import UNIT, Rounding

#: What a product of constants is rounded up to where it underflows: a later factor may be large.
LEAST = 2.0**-1000


def product(a: float, b: float) -> float:
    """Multiply two constants; 0 times infinity is 0, and a product that underflows is rounded up."""
    return 0.0 if a == 0 or b == 0 else max(a * b, LEAST)


def sample_norms(x: Tensor) -> Tensor:
    """Compute the l2 norm of every sample."""
    return cast(Tensor, torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim()))))


# ---------------------------------------------------------------------------------------------- one solve


def error_bound(r: Tensor, x: Tensor, z: Tensor, *, rounding: Rounding, inverse_lipschitz: float | Tensor) -> Tensor:
    """Bound ||x - x*|| per sample, given the float64 norms of F(x) - z, x and z, and Lip(F^-1). Never NaN or negative.

    Where `inverse_lipschitz` is 0, the inverse is constant and the error is 0, whatever the residual is. Where it is
    negative or NaN, it is no bound, and neither is there one of the error.
    """
    bound = inverse_lipschitz * rounding.residual_bound(r, x, z)
    if isinstance(inverse_lipschitz, Tensor):
        bound = torch.where(inverse_lipschitz == 0, 0.0, bound).where(inverse_lipschitz >= 0, torch.inf)
    elif not inverse_lipschitz >= 0:
        bound = torch.full_like(bound, torch.inf)
    return nan_to_infinity(bound)


def attainable_tolerance(
    r: Tensor, x: Tensor, z: Tensor, *, rounding: Rounding, inverse_lipschitz: float | Tensor
) -> Tensor:
    """Return the smallest tolerance that can be met: twice the error bound of an x whose float64 residual is r."""
    return 2 * error_bound(r, x, z, rounding=rounding, inverse_lipschitz=inverse_lipschitz)


def meets_tolerance(bound: Tensor, tolerance: Tensor) -> Tensor:
    """Whether each error bound is finite and at most its tolerance."""
    return (bound <= tolerance) & torch.isfinite(bound)


def nan_to_infinity(error: Tensor) -> Tensor:
    """Replace NaN, the residual of an iteration that overflowed, by infinity."""
    return torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf)


# ---------------------------------------------------------------------------------------------- a chain


@dataclass(frozen=True)
class SetAside:
    """Between two parts of a chain, `count` tensors are set aside (factored out); a negative count merges them back."""

    count: int


def error_growth(steps: Sequence[float | SetAside]) -> list[float]:
    """For every part, return the factor by which the error of its inverse can grow on the way back to x.

    `steps` holds Lip(F^-1) of every part, from data to code. The factor is the product over the parts before it. Where
    tensors are merged back, the largest factor of any of them counts.

    >>> error_growth([2.0, 3.0, 5.0]), error_growth([2.0, SetAside(1), 3.0, SetAside(-1), 5.0])
    ([1.0, 2.0, 6.0], [1.0, 2.0, 6.0])
    """
    factor, aside, growth = 1.0, list[float](), list[float]()
    for step in steps:
        if not isinstance(step, SetAside):
            growth.append(factor)
            step = step if step >= 0 else math.inf  # NaN or negative: no bound
            factor = product(factor, step)
        elif step.count > 0:
            aside.extend([factor] * step.count)
        else:
            factor = max([factor, *(aside.pop() for _ in range(-step.count))])
    return growth


def growth_factors(steps: Sequence[float | SetAside], device: torch.device) -> Tensor:
    """Return `error_growth` as a column for `compose_bounds`, rounded up to cover the products and their sum."""
    growth = error_growth(steps)
    outward = 1 + 16 * (len(growth) - 1) * UNIT
    return outward * torch.tensor(growth, dtype=torch.float64, device=device)[:, None]


def compose_bounds(bounds: Tensor, factors: Tensor) -> Tensor:
    """Bound the error of a chain: the error bounds of its parts, (parts, batch), times their `growth_factors`, summed.

    A part without error adds nothing: 0 times infinity counts as 0. A negative number and NaN are no bounds.
    """
    known = (bounds >= 0) & (factors >= 0)
    return torch.where((bounds == 0) | (factors == 0), 0.0, factors * bounds).where(known, torch.inf).sum(0)
