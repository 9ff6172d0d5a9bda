"""One block's inverse in mixed precision: x + g(x) = z with x in float64 and most evaluations of g in half precision.

    coarse      x <- z - g(x) in the working precision, until its rounding stops it: an error of about 1e-4 ||x||
    refine      r = z - x - g(x) in float32 or float64; d <- r - J d, a few times, in the working precision; x <- x + d
    prove       ||x - x*|| <= ||x + g(x) - z|| / (1 - L), the residual in float64

The correction solves (I + J) d = r by its Neumann series. Only the relative error of d counts, so r is scaled to size
one first and half precision gains about three digits a refinement, until float64 is reached. J is taken at the last
coarse iterate: its distance from x is of the size of the correction, and enters as a factor of that correction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from ..branch import PreparedBranch
from ..proof import sample_norms
from .precisions import Branch

# --------------------------------------------------------------------------------------- the steps of a solve


@dataclass(frozen=True)
class Schedule:
    """How much is done for one block.

    `coarse` evaluations of g, then for every refinement the terms of its series: first those of `single`, with a
    residual in float32, then `refinements`, in float64.
    """

    coarse: int = 8
    refinements: tuple[int, ...] = (6, 4)
    single: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.coarse < 1 or any(terms < 0 for terms in self.single + self.refinements):
            raise ValueError(
                "a schedule has at least one coarse evaluation and no negative number of terms; "
                f"got {self.coarse} and {[*self.single, *self.refinements]}."
            )

    def extended(self, more: int) -> Schedule:
        """With so many more refinements, each as long as the longest."""
        if not more:
            return self
        terms = max(self.single + self.refinements, default=self.coarse)
        return replace(self, refinements=self.refinements + (terms,) * more)

    @property
    def exact_evaluations(self) -> int:
        """Of g in float64, the proof included."""
        return len(self.refinements) + 1

    @property
    def evaluations(self) -> int:
        """Of g or its Jacobian, in all precisions, the proof included."""
        return self.coarse + sum(terms + 1 for terms in self.single + self.refinements) + 1


def solve(branch: Branch, z: Tensor, schedule: Schedule) -> tuple[Tensor, Tensor]:
    """x in float64 by a fixed schedule, and its residual: nothing is read back, nothing depends on the numbers."""
    x = found(branch, z, schedule)
    return x, residual(branch, x, z)


def found(branch: Branch, z: Tensor, schedule: Schedule) -> Tensor:
    """x in float64 by a fixed schedule, with nothing proven."""
    x, slopes = coarse(branch, z, schedule.coarse)
    for terms in schedule.single:
        x = _moved(x, *series(branch, single_residual(branch, x, z), slopes, terms))
    for terms in schedule.refinements:
        x = _moved(x, *series(branch, residual(branch, x, z), slopes, terms))
    return x


def residual(branch: Branch, x: Tensor, z: Tensor) -> Tensor:
    """z - x - g(x) in float64."""
    return (z - x).sub_(branch.exact(x))


def single_residual(branch: Branch, x: Tensor, z: Tensor) -> Tensor:
    """z - x - g(x) with g in float32."""
    return (z - x).sub_(cast(PreparedBranch, branch.single)(x.float()))


def coarse(branch: Branch, z: Tensor, count: int) -> tuple[Tensor, list[Tensor]]:
    """x after `count` evaluations of g in the working precision, in float64, and the slopes at the last of them."""
    start = z.to(branch.dtype)
    x = start
    for _ in range(count - 1):
        x = start - branch.working(x)
    y, slopes = branch.working.value_and_slopes(x)
    return z - y, slopes


def series(branch: Branch, r: Tensor, slopes: list[Tensor], terms: int) -> tuple[Tensor, Tensor]:
    """(scale, d / scale) for (I + J) d = r, by `terms` terms of the Neumann series."""
    scale, small = scaled(r, branch.dtype)
    d = small
    for _ in range(terms):
        d = small - branch.working.jvp(d, slopes)
    return scale, d


def _moved(x: Tensor, scale: Tensor, d: Tensor) -> Tensor:
    return (d * scale).add_(x)


def scaled(r: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(scale, r / scale in `dtype`): every sample with a mean square of one, so that no precision is lost to size."""
    scale = sample_norms(r).div_((r.numel() / len(r)) ** 0.5).clamp_min_(1e-300).view(-1, *(1,) * (r.dim() - 1))
    return scale, torch.div(r, scale, out=torch.empty_like(r, dtype=dtype))


# --------------------------------------------------------------------------------------- how much to do


#: Refinements and coarse evaluations at the most, and the part of the tolerance that is aimed at.
MOST_REFINEMENTS, MOST_COARSE, AIM = 6, 120, 0.7


def calibrate(branch: Branch, z: Tensor, goal: float) -> tuple[Schedule, Tensor]:
    """The schedule that brings the residual of these codes well below `goal`, and the x it ends at.

    Every phase goes on until its precision gains nothing more: evaluations in the working precision are the cheap
    ones. A float32 residual is taken where it saves one in float64. Values are read back here, and nowhere else.
    """
    unit = torch.finfo(branch.dtype).eps / 2
    count = _stalls(lambda x, start: start - branch.working(x), z.to(branch.dtype), unit)
    x, slopes = coarse(branch, z, count)
    plan, found = _planned(branch, x, z, slopes, goal, Schedule(count, ()))
    if branch.single is None or plan.exact_evaluations < 2:
        return plan, found
    r = single_residual(branch, x, z)
    terms = _terms(branch, r, slopes, unit)
    x = _moved(x, *series(branch, r, slopes, terms))
    other, better = _planned(branch, x, z, slopes, goal, Schedule(count, (), (terms,)))
    return (other, better) if other.exact_evaluations < plan.exact_evaluations else (plan, found)


def _planned(
    branch: Branch, x: Tensor, z: Tensor, slopes: list[Tensor], goal: float, plan: Schedule
) -> tuple[Schedule, Tensor]:
    """The plan with the refinements in float64 that are needed from x on."""
    unit = torch.finfo(branch.dtype).eps / 2
    r = residual(branch, x, z)
    while (size := _largest(r)) > AIM * goal and len(plan.refinements) < MOST_REFINEMENTS:
        terms = _terms(branch, r, slopes, max(unit, 0.25 * AIM * goal / size))
        plan = replace(plan, refinements=(*plan.refinements, terms))
        x = _moved(x, *series(branch, r, slopes, terms))
        r = residual(branch, x, z)
    return plan, x


def _largest(r: Tensor) -> float:
    """The largest size of what is finite: a sample that overflowed is no example, and is solved otherwise."""
    sizes = sample_norms(r)
    return float(torch.where(sizes.isfinite(), sizes, 0.0).max())


def _terms(branch: Branch, r: Tensor, slopes: list[Tensor], relative: float) -> int:
    """Terms of the series until it gains less than this."""
    _, small = scaled(r, branch.dtype)
    return _stalls(lambda d, r: r - branch.working.jvp(d, slopes), small, relative)


def _stalls(step: Callable[[Tensor, Tensor], Tensor], start: Tensor, relative: float) -> int:
    """Steps from `start` until the next one is shorter than this part of the iterate, or close and not shortening."""
    x, before = start, torch.full((len(start),), torch.inf, dtype=torch.float64, device=start.device)
    for count in range(1, MOST_COARSE):
        following = step(x, start)
        moved, size = sample_norms((following - x).double()), relative * sample_norms(following.double())
        done = (moved <= size) | ((moved <= 64 * size) & (moved > 0.9 * before)) | ~moved.isfinite()
        x, before = following, moved
        if bool(done.all()):
            return count
    return MOST_COARSE
