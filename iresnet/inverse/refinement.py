"""The inverse of one block in mixed precision: solves x + g(x) = z with x in float64 and most of g in half precision.

    coarse      x <- z - g(x) in the working precision, until rounding stops it: an error of about 1e-4 ||x||
    refine      r = z - x - g(x) in float32 or float64; d <- r - J d, a few times, in the working precision; x <- x + d
    prove       ||x - x*|| <= ||x + g(x) - z|| / (1 - L), the residual in float64

The correction solves (I + J) d = r by the Neumann series. Only the relative error of d matters, so r is first scaled to
size one, and half precision gains about three digits per refinement, up to float64. J is evaluated at the last coarse
iterate. Its distance from x is of the size of the correction, so the error this makes is of second order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from ..branch import PreparedBranch
from ..proof import sample_norms
from .precisions import MixedPrecisionBranch

# --------------------------------------------------------------------------------------- the steps of a solve


@dataclass(frozen=True)
class Schedule:
    """How many evaluations one block's solve takes."""

    #: Evaluations of g in the working precision.
    coarse: int = 8
    #: Terms of the Neumann series for every refinement with a residual in float64.
    refinements: tuple[int, ...] = (6, 4)
    #: The same for refinements with a residual in float32, which come before those.
    single: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.coarse < 1 or any(terms < 0 for terms in self.single + self.refinements):
            raise ValueError(
                "a schedule has at least one coarse evaluation and no negative number of terms; "
                f"got {self.coarse} and {[*self.single, *self.refinements]}."
            )

    def extended(self, more: int) -> Schedule:
        """Return this schedule with `more` further refinements, each as long as the longest."""
        if not more:
            return self
        terms = max(self.single + self.refinements, default=self.coarse)
        return replace(self, refinements=self.refinements + (terms,) * more)

    @property
    def exact_evaluations(self) -> int:
        """The number of evaluations of g in float64, including the proof."""
        return len(self.refinements) + 1

    @property
    def evaluations(self) -> int:
        """The number of evaluations of g or its Jacobian in all precisions, including the proof."""
        return self.coarse + sum(terms + 1 for terms in self.single + self.refinements) + 1


def solve_block(branch: MixedPrecisionBranch, z: Tensor, schedule: Schedule) -> tuple[Tensor, Tensor]:
    """Return x in float64 by a fixed schedule, and its residual, without control flow that depends on values."""
    x = approximate(branch, z, schedule)
    return x, residual(branch, x, z)


def approximate(branch: MixedPrecisionBranch, z: Tensor, schedule: Schedule) -> Tensor:
    """Return x in float64 by a fixed schedule, without a proof."""
    x, slopes = coarse(branch, z, schedule.coarse)
    for terms in schedule.single:
        x = _corrected(x, *neumann_series(branch, single_residual(branch, x, z), slopes, terms))
    for terms in schedule.refinements:
        x = _corrected(x, *neumann_series(branch, residual(branch, x, z), slopes, terms))
    return x


def residual(branch: MixedPrecisionBranch, x: Tensor, z: Tensor) -> Tensor:
    """Return z - x - g(x) in float64."""
    return (z - x).sub_(branch.exact(x))


def single_residual(branch: MixedPrecisionBranch, x: Tensor, z: Tensor) -> Tensor:
    """Return z - x - g(x) with g in float32."""
    return (z - x).sub_(cast(PreparedBranch, branch.single)(x.float()))


def coarse(branch: MixedPrecisionBranch, z: Tensor, count: int) -> tuple[Tensor, list[Tensor]]:
    """Return x after `count` evaluations of g in the working precision, in float64, and the slopes at the last one."""
    start = z.to(branch.dtype)
    x = start
    for _ in range(count - 1):
        x = start - branch.working(x)
    y, slopes = branch.working.value_and_slopes(x)
    return z - y, slopes


def neumann_series(branch: MixedPrecisionBranch, r: Tensor, slopes: list[Tensor], terms: int) -> tuple[Tensor, Tensor]:
    """Return (scale, d / scale) for (I + J) d = r, by `terms` terms of the Neumann series."""
    scale, r = normalise(r, branch.dtype)
    d = r
    for _ in range(terms):
        d = r - branch.working.jvp(d, slopes)
    return scale, d


def _corrected(x: Tensor, scale: Tensor, d: Tensor) -> Tensor:
    return (d * scale).add_(x)


def normalise(r: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (scale, r / scale in `dtype`) with mean square one per sample, so that small r lose no precision."""
    scale = sample_norms(r).div_((r.numel() / len(r)) ** 0.5).clamp_min_(1e-300).view(-1, *(1,) * (r.dim() - 1))
    return scale, torch.div(r, scale, out=torch.empty_like(r, dtype=dtype))


# --------------------------------------------------------------------------------------- choosing a schedule


#: The most refinements and coarse evaluations, and the share of the tolerance to aim at.
MAX_REFINEMENTS, MAX_COARSE, AIMED_SHARE = 6, 120, 0.7


def calibrate(branch: MixedPrecisionBranch, z: Tensor, goal: float) -> tuple[Schedule, Tensor]:
    """Choose a schedule that brings the residual of these codes well below `goal`; return it and its x.

    Every phase continues until its precision gains nothing more, since evaluations in the working precision are cheap.
    A float32 residual is used if it saves one in float64. Only here are values read back from the device.
    """
    unit = torch.finfo(branch.dtype).eps / 2
    count = _steps_until_stalled(lambda x, start: start - branch.working(x), z.to(branch.dtype), unit)
    x, slopes = coarse(branch, z, count)
    schedule, solution = _add_refinements(branch, x, z, slopes, goal, Schedule(count, ()))
    if branch.single is None or schedule.exact_evaluations < 2:
        return schedule, solution
    r = single_residual(branch, x, z)
    terms = _series_terms(branch, r, slopes, unit)
    x = _corrected(x, *neumann_series(branch, r, slopes, terms))
    other, better = _add_refinements(branch, x, z, slopes, goal, Schedule(count, (), (terms,)))
    return (other, better) if other.exact_evaluations < schedule.exact_evaluations else (schedule, solution)


def _add_refinements(
    branch: MixedPrecisionBranch, x: Tensor, z: Tensor, slopes: list[Tensor], goal: float, schedule: Schedule
) -> tuple[Schedule, Tensor]:
    """Add the float64 refinements that are needed from x on to a schedule."""
    unit = torch.finfo(branch.dtype).eps / 2
    r = residual(branch, x, z)
    while (size := _largest_finite_norm(r)) > AIMED_SHARE * goal and len(schedule.refinements) < MAX_REFINEMENTS:
        terms = _series_terms(branch, r, slopes, max(unit, 0.25 * AIMED_SHARE * goal / size))
        schedule = replace(schedule, refinements=(*schedule.refinements, terms))
        x = _corrected(x, *neumann_series(branch, r, slopes, terms))
        r = residual(branch, x, z)
    return schedule, x


def _largest_finite_norm(r: Tensor) -> float:
    """The largest finite norm of a sample: one that overflowed is solved by the ordinary method later."""
    sizes = sample_norms(r)
    return float(torch.where(sizes.isfinite(), sizes, 0.0).max())


def _series_terms(branch: MixedPrecisionBranch, r: Tensor, slopes: list[Tensor], relative: float) -> int:
    """The number of terms after which the series gains less than this."""
    _, scaled = normalise(r, branch.dtype)
    return _steps_until_stalled(lambda d, r: r - branch.working.jvp(d, slopes), scaled, relative)


def _steps_until_stalled(step: Callable[[Tensor, Tensor], Tensor], start: Tensor, relative: float) -> int:
    """Count steps until the next one is shorter than `relative` times the iterate, or close and not shrinking."""
    x, before = start, torch.full((len(start),), torch.inf, dtype=torch.float64, device=start.device)
    for count in range(1, MAX_COARSE):
        following = step(x, start)
        length, size = sample_norms((following - x).double()), relative * sample_norms(following.double())
        done = (length <= size) | ((length <= 64 * size) & (length > 0.9 * before)) | ~length.isfinite()
        x, before = following, length
        if bool(done.all()):
            return count
    return MAX_COARSE
