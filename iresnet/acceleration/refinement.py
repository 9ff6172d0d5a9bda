"""One block's inverse in mixed precision: x + g(x) = z with x in float64 and most evaluations of g in half precision.

    coarse      x <- z - g(x) in the working precision, until its rounding stops it: an error of about 1e-4 ||x||
    refine      r = z - x - g(x) in float64; d <- r - J d, a few times, in the working precision; x <- x + d
    prove       ||x - x*|| <= ||x + g(x) - z|| / (1 - L), the residual in float64

The correction solves (I + J) d = r by its Neumann series. Only the relative error of d counts, so r is scaled to size
one first and half precision gains about three digits a refinement, until float64 is reached. J is taken at the last
coarse iterate: its distance from x is of the size of the correction, and enters as a factor of that correction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..lipschitz.program import Program, Step, apply, run
from .convolution import Convolution, native

#: Activations whose slope is known from x and y.
SLOPES = frozenset({"elu", "tanh", "relu", "softplus", "sine", "lipswish", "identity"})


@dataclass
class Branch:
    """g of one block: its program, its tensors in float64 and in the working precision, ways to convolve in float64."""

    program: Program
    exact: list[Tensor]
    working: list[Tensor]
    convolutions: list[Convolution] = field(default_factory=list)  # one a step; none: the library's own

    @property
    def dtype(self) -> torch.dtype:
        return self.working[0].dtype

    def __call__(self, x: Tensor) -> Tensor:
        """g(x) in float64."""
        left = iter(self.exact)
        for i, step in enumerate(self.program):
            values = [next(left) for _ in range(step.tensors)]
            way = self.convolutions[i] if self.convolutions else native
            x = way(step, x, values)
        return x


def traced(program: Program, x: Tensor, values: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """g(x) and the slopes of its activations, in order."""
    left, slopes = iter(values), []
    for step in program:
        own = [next(left) for _ in range(step.tensors)]
        y = apply(step, x, own)
        if step.geometry is None and step.kind != "linear":
            slopes.append(slope(step, x, y, own))
        x = y
    return x, slopes


def slope(step: Step, x: Tensor, y: Tensor, values: list[Tensor]) -> Tensor:
    """d y / d x of an activation y = step(x)."""
    match step.kind:
        case "elu" if step.constant == 1:
            return y.clamp(max=0) + 1
        case "elu":
            return torch.where(x > 0, torch.ones_like(x), y + step.constant)
        case "tanh":
            return 1 - y.square()
        case "relu":
            return (x > 0).to(x.dtype)
        case "softplus":
            return torch.sigmoid(step.constant * x)
        case "sine":
            return torch.cos(step.constant * x)
        case "lipswish":
            beta = F.softplus(values[0])
            s = torch.sigmoid(beta * x)
            return (s + beta * x * s * (1 - s)) / 1.1
        case _:
            return torch.ones_like(x)


def tangent(program: Program, v: Tensor, values: list[Tensor], slopes: list[Tensor]) -> Tensor:
    """J v."""
    left, slope_of = iter(values), iter(slopes)
    for step in program:
        own = [next(left) for _ in range(step.tensors)]
        acts = step.geometry is None and step.kind != "linear"
        v = v * next(slope_of) if acts else apply(_linear(step), v, own[:1])
    return v


def _linear(step: Step) -> Step:
    return Step(step.kind, 1, step.geometry, step.constant)


# --------------------------------------------------------------------------------------- the steps of a solve


@cache
def plain_step(program: Program, compiled: bool) -> Callable[..., Tensor]:
    """(z, x, tensors) -> z - g(x), one function for all branches with this program."""

    def function(z: Tensor, x: Tensor, values: list[Tensor]) -> Tensor:
        return z - run(program, x, values)

    return cast(Any, torch.compile(function, dynamic=False)) if compiled else function


@cache
def series_step(program: Program, compiled: bool) -> Callable[..., Tensor]:
    """(r, d, tensors, slopes) -> r - J d."""

    def function(r: Tensor, d: Tensor, values: list[Tensor], slopes: list[Tensor]) -> Tensor:
        return r - tangent(program, d, values, slopes)

    return cast(Any, torch.compile(function, dynamic=False)) if compiled else function


@dataclass(frozen=True)
class Schedule:
    """How much is done for one block: coarse evaluations of g, and for every refinement the terms of its series."""

    coarse: int = 8
    refinements: tuple[int, ...] = (6, 4)

    def __post_init__(self) -> None:
        if self.coarse < 1 or any(terms < 0 for terms in self.refinements):
            raise ValueError(
                "a schedule has at least one coarse evaluation and no negative number of terms; "
                f"got {self.coarse} and {list(self.refinements)}."
            )

    def extended(self, more: int) -> Schedule:
        """With so many more refinements, each as long as the longest."""
        terms = max(self.refinements, default=self.coarse)
        return Schedule(self.coarse, self.refinements + (terms,) * more)

    @property
    def evaluations(self) -> int:
        """Of g or its Jacobian, in both precisions, the proof included."""
        return self.coarse + sum(terms + 1 for terms in self.refinements) + 1


def solve(branch: Branch, z: Tensor, schedule: Schedule, *, compiled: bool = False) -> tuple[Tensor, Tensor]:
    """(x, z - x - g(x)) in float64 by a fixed schedule: nothing is read back, nothing depends on the numbers."""
    x, slopes = coarse(branch, z, schedule.coarse, compiled=compiled)
    for terms in schedule.refinements:
        x = corrected(branch, x, residual(branch, x, z), slopes, terms, compiled=compiled)
    return x, residual(branch, x, z)


def residual(branch: Branch, x: Tensor, z: Tensor) -> Tensor:
    """z - x - g(x) in float64."""
    return (z - x).sub_(branch(x))


def coarse(branch: Branch, z: Tensor, count: int, *, compiled: bool = False) -> tuple[Tensor, list[Tensor]]:
    """x after `count` evaluations of g in the working precision, in float64, and the slopes at the last of them."""
    start, step = z.to(branch.dtype), plain_step(branch.program, compiled)
    x = start
    for _ in range(count - 1):
        x = step(start, x, branch.working)
    y, slopes = traced(branch.program, x, branch.working)
    return z - y, slopes


def corrected(
    branch: Branch, x: Tensor, r: Tensor, slopes: list[Tensor], terms: int, *, compiled: bool = False
) -> Tensor:
    """x + d for (I + J) d = r, by `terms` terms of the Neumann series."""
    scale, small = scaled(r, branch.dtype)
    d, step = small, series_step(branch.program, compiled)
    for _ in range(terms):
        d = step(small, d, branch.working, slopes)
    return (d * scale).add_(x)


def scaled(r: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(scale, r / scale in `dtype`): every sample with a mean square of one, so that no precision is lost to size."""
    scale = norms(r).div_((r.numel() / len(r)) ** 0.5).clamp_min_(1e-300).view(-1, *(1,) * (r.dim() - 1))
    return scale, torch.div(r, scale, out=torch.empty_like(r, dtype=dtype))


def norms(x: Tensor) -> Tensor:
    """The l2 norm of every sample."""
    return cast(Tensor, torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim()))))


# --------------------------------------------------------------------------------------- how much to do


#: Refinements and coarse evaluations at the most, and the part of the tolerance that is aimed at.
MOST_REFINEMENTS, MOST_COARSE, AIM = 6, 60, 0.7


def calibrate(branch: Branch, z: Tensor, goal: float) -> tuple[Schedule, Tensor]:
    """The schedule that brings the residual of these codes well below `goal`, and the x it ends at.

    Every phase goes on until its precision gains nothing more: evaluations in the working precision are the cheap
    ones. Values are read back here, and nowhere else.
    """
    unit = torch.finfo(branch.dtype).eps / 2
    count = _stalls(lambda x, start: start - run(branch.program, x, branch.working), z.to(branch.dtype), unit)
    x, slopes = coarse(branch, z, count)
    refinements: list[int] = []
    r = residual(branch, x, z)
    while (size := float(norms(r).max())) > AIM * goal and len(refinements) < MOST_REFINEMENTS:
        _, small = scaled(r, branch.dtype)
        enough = max(unit, 0.5 * AIM * goal / size)
        terms = _stalls(lambda d, r: r - tangent(branch.program, d, branch.working, slopes), small, enough)
        refinements.append(terms)
        x = corrected(branch, x, r, slopes, terms)
        r = residual(branch, x, z)
    return Schedule(count, tuple(refinements)), x


def _stalls(step: Callable[[Tensor, Tensor], Tensor], start: Tensor, relative: float) -> int:
    """Steps from `start` until the next one is shorter than this part of the iterate, or close and not shortening."""
    x, before = start, torch.full((len(start),), torch.inf, dtype=torch.float64, device=start.device)
    for count in range(1, MOST_COARSE):
        following = step(x, start)
        moved, size = norms((following - x).double()), relative * norms(following.double())
        done = (moved <= size) | ((moved <= 64 * size) & (moved > 0.9 * before))
        x, before = following, moved
        if bool(done.all()) or not bool(torch.isfinite(x).all()):
            return count
    return MOST_COARSE
