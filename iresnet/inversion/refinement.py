"""One block's inverse in mixed precision: x + g(x) = z with x in float64 and most evaluations of g in half precision.

    coarse      x <- z - g(x) in the working precision, until its rounding stops it: an error of about 1e-4 ||x||
    refine      r = z - x - g(x) in float32 or float64; d <- r - J d, a few times, in the working precision; x <- x + d
    prove       ||x - x*|| <= ||x + g(x) - z|| / (1 - L), the residual in float64

The correction solves (I + J) d = r by its Neumann series. Only the relative error of d counts, so r is scaled to size
one first and half precision gains about three digits a refinement, until float64 is reached. J is taken at the last
coarse iterate: its distance from x is of the size of the correction, and enters as a factor of that correction.

The residual after the last correction need not be evaluated anew: with r and J at x in float64, and d small,

    z - (x + d) - g(x + d) = r - d - J d + error,     ||error|| <= relative ||d|| + floor + curvature / 2 ||d||^2

with one product in the working precision and the constants of `rounding`. A float32 residual before the float64 one
makes d small enough, about 1e-7 ||x||: then one float64 evaluation of g serves both correction and proof.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from ..lipschitz.program import Program
from .branch import Branch, Form

# --------------------------------------------------------------------------------------- the steps of a solve


@cache
def plain_step(program: Program, compiled: bool) -> Callable[..., Tensor]:
    """(z, x, tensors) -> z - g(x), one function for all branches with this program."""

    def function(z: Tensor, x: Tensor, values: list[Tensor]) -> Tensor:
        return z - Form(program, values)(x)

    return cast(Any, torch.compile(function, dynamic=False)) if compiled else function


@cache
def series_step(program: Program, compiled: bool) -> Callable[..., Tensor]:
    """(r, d, tensors, slopes) -> r - J d."""

    def function(r: Tensor, d: Tensor, values: list[Tensor], slopes: list[Tensor]) -> Tensor:
        return r - Form(program, values).tangent(d, slopes)

    return cast(Any, torch.compile(function, dynamic=False)) if compiled else function


@dataclass(frozen=True)
class Schedule:
    """How much is done for one block.

    `coarse` evaluations of g, then for every refinement the terms of its series: first those of `single`, with a
    residual in float32, then `refinements`, in float64. `proof` is by a "residual" of its own, in float64, or by the
    "product" with J that follows the last series.
    """

    coarse: int = 8
    refinements: tuple[int, ...] = (6, 4)
    single: tuple[int, ...] = ()
    proof: str = "residual"

    def __post_init__(self) -> None:
        if self.coarse < 1 or any(terms < 0 for terms in self.single + self.refinements):
            raise ValueError(
                "a schedule has at least one coarse evaluation and no negative number of terms; "
                f"got {self.coarse} and {[*self.single, *self.refinements]}."
            )
        if self.proof not in ("residual", "product") or (self.proof == "product" and not self.refinements):
            raise ValueError(
                "the proof is by a residual, or by a product after a refinement in float64; "
                f"got {self.proof!r} and {len(self.refinements)} refinements."
            )

    def extended(self, more: int) -> Schedule:
        """With so many more refinements, each as long as the longest, and a proof by a residual."""
        if not more:
            return self
        terms = max(self.single + self.refinements, default=self.coarse)
        return replace(self, refinements=self.refinements + (terms,) * more, proof="residual")

    @property
    def exact_evaluations(self) -> int:
        """Of g in float64."""
        return len(self.refinements) + (self.proof == "residual")

    @property
    def evaluations(self) -> int:
        """Of g or its Jacobian, in all precisions, the proof included."""
        return self.coarse + sum(terms + 1 for terms in self.single + self.refinements) + 1


@dataclass
class Solved:
    """x, z - x - g(x) up to an error of norm `slack` (per sample), and slopes near x, in the working precision."""

    x: Tensor
    residual: Tensor
    slack: Tensor
    slopes: list[Tensor]


def solve(branch: Branch, z: Tensor, schedule: Schedule, *, compiled: bool = False) -> Solved:
    """x in float64 by a fixed schedule: nothing is read back, nothing depends on the numbers."""
    if schedule.proof == "product":
        if branch.rounding is None:
            raise ValueError('this branch has no proof by products; got proof="product". Use "residual".')
        *earlier, last = schedule.refinements
        x, _ = found(branch, z, replace(schedule, refinements=tuple(earlier), proof="residual"), compiled=compiled)
        return corrected(branch, x, z, last, compiled=compiled)
    x, slopes = found(branch, z, schedule, compiled=compiled)
    r = residual(branch, x, z)
    return Solved(x, r, torch.zeros_like(norms(r)), slopes)


def found(branch: Branch, z: Tensor, schedule: Schedule, *, compiled: bool = False) -> tuple[Tensor, list[Tensor]]:
    """x in float64 by a fixed schedule, with nothing proven, and slopes near it, in the working precision."""
    x, slopes = coarse(branch, z, schedule.coarse, compiled=compiled)
    for terms in schedule.single:
        x = _moved(x, *series(branch, single_residual(branch, x, z), slopes, terms, compiled=compiled))
    for terms in schedule.refinements:
        x = _moved(x, *series(branch, residual(branch, x, z), slopes, terms, compiled=compiled))
    return x, slopes


def residual(branch: Branch, x: Tensor, z: Tensor) -> Tensor:
    """z - x - g(x) in float64."""
    return (z - x).sub_(branch.exact(x))


def single_residual(branch: Branch, x: Tensor, z: Tensor) -> Tensor:
    """z - x - g(x) with g in float32."""
    return (z - x).sub_(cast(Form, branch.single)(x.float()))


def coarse(branch: Branch, z: Tensor, count: int, *, compiled: bool = False) -> tuple[Tensor, list[Tensor]]:
    """x after `count` evaluations of g in the working precision, in float64, and the slopes at the last of them."""
    start, step = z.to(branch.dtype), plain_step(branch.program, compiled)
    x = start
    for _ in range(count - 1):
        x = step(start, x, branch.working.values)
    y, slopes = branch.working.traced(x)
    return z - y, slopes


def series(
    branch: Branch, r: Tensor, slopes: list[Tensor], terms: int, *, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """(scale, d / scale) for (I + J) d = r, by `terms` terms of the Neumann series."""
    scale, small = scaled(r, branch.dtype)
    d, step = small, series_step(branch.program, compiled)
    for _ in range(terms):
        d = step(small, d, branch.working.values, slopes)
    return scale, d


def _moved(x: Tensor, scale: Tensor, d: Tensor) -> Tensor:
    return (d * scale).add_(x)


def corrected(branch: Branch, x: Tensor, z: Tensor, terms: int, *, compiled: bool = False) -> Solved:
    """x + d with its residual r - d - J d and a bound of what that leaves out: the proof by a product."""
    y, slopes = branch.exact.traced(x, branch.dtype)
    r = (z - x).sub_(y)
    scale, d = series(branch, r, slopes, terms, compiled=compiled)
    left = torch.addcmul(r, scale, d.double() + branch.products.tangent(d, slopes), value=-1)
    return Solved(_moved(x, scale, d), left, _slack(branch, r, x, z, scale, d), slopes)


def _slack(branch: Branch, r: Tensor, x: Tensor, z: Tensor, scale: Tensor, d: Tensor) -> Tensor:
    """What `rounding` allows, float64 included, from which residual and slopes both are."""
    scale = scale.flatten()
    if branch.rounding is None:
        return torch.full_like(scale, torch.inf)
    return branch.rounding.allowance(scale * norms(d.double()), scale, norms(r), norms(x), norms(z))


def scaled(r: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(scale, r / scale in `dtype`): every sample with a mean square of one, so that no precision is lost to size."""
    scale = norms(r).div_((r.numel() / len(r)) ** 0.5).clamp_min_(1e-300).view(-1, *(1,) * (r.dim() - 1))
    return scale, torch.div(r, scale, out=torch.empty_like(r, dtype=dtype))


def norms(x: Tensor) -> Tensor:
    """The l2 norm of every sample."""
    return cast(Tensor, torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim()))))


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
    while (size := _largest(norms(r), r)) > AIM * goal and len(plan.refinements) < MOST_REFINEMENTS:
        terms = _terms(branch, r, slopes, max(unit, 0.25 * AIM * goal / size))
        plan = replace(plan, refinements=(*plan.refinements, terms))
        if branch.rounding is not None:
            proof = corrected(branch, x, z, terms)
            if _largest(norms(proof.residual) + proof.slack, r) <= AIM * goal:
                return replace(plan, proof="product"), proof.x
        x = _moved(x, *series(branch, r, slopes, terms))
        r = residual(branch, x, z)
    return plan, x


def _largest(sizes: Tensor, r: Tensor) -> float:
    """The largest size of samples whose r is finite: what overflowed is no example, and is solved otherwise."""
    return float(torch.where(norms(r).isfinite(), sizes, 0.0).max())


def _terms(branch: Branch, r: Tensor, slopes: list[Tensor], relative: float) -> int:
    """Terms of the series until it gains less than this."""
    _, small = scaled(r, branch.dtype)
    return _stalls(lambda d, r: r - branch.working.tangent(d, slopes), small, relative)


def _stalls(step: Callable[[Tensor, Tensor], Tensor], start: Tensor, relative: float) -> int:
    """Steps from `start` until the next one is shorter than this part of the iterate, or close and not shortening."""
    x, before = start, torch.full((len(start),), torch.inf, dtype=torch.float64, device=start.device)
    for count in range(1, MOST_COARSE):
        following = step(x, start)
        moved, size = norms((following - x).double()), relative * norms(following.double())
        done = (moved <= size) | ((moved <= 64 * size) & (moved > 0.9 * before)) | ~moved.isfinite()
        x, before = following, moved
        if bool(done.all()):
            return count
    return MOST_COARSE
