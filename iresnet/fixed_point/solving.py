"""Solve x + g(x) = z to a tolerance, and prove it: ||x - x*|| <= ||x + g(x) - z|| / (1 - L), evaluated in float64."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from ..float64 import Rounding
from ..proof import attainable_tolerance, error_bound, meets_tolerance, sample_norms
from .solution import Solution
from .solvers import Branch, Solver


def _relative_tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """Return (target residual, rounding error of x), relative to the code, for this dtype."""
    return (1e-11, 5e-14) if dtype == torch.float64 else (1e-6, max(2e-7, 1.5 * torch.finfo(dtype).eps))


def default_tolerance(z: Tensor, lipschitz: float) -> Tensor:
    """Return the default tolerance per sample: what the dtype of z can represent, for this contraction.

    x can be 1 / (1 - L) times as large as z, and its rounding error counts 1 / (1 - L) times in the bound. This is the
    worst case; a solve aims lower. If g(0) is far from zero, x is larger, and so are its rounding error and that of
    evaluating g in float64: `solve` allows twice that.
    """
    gap = max(1 - lipschitz, 1e-3)
    relative, rounding = _relative_tolerances(z.dtype)
    return max(relative / gap, rounding / gap**2) * sample_norms(z.detach().double()).clamp_min(1.0)


def iteration_limit(contraction: float, start: float, target: float) -> int:
    """Return the number of evaluations after which a contraction must have reached the target, plus a few."""
    if not contraction < 1:
        return 200
    if contraction <= 0 or start <= target:
        return 10
    # Norms of huge codes overflow, and tiny tolerances underflow.
    least, largest = math.log(max(target, sys.float_info.min)), math.log(min(start, sys.float_info.max))
    return 10 + math.ceil((least - largest) / math.log(contraction))


def solve(
    g: Branch,
    z: Tensor,
    *,
    lipschitz: float | None,
    tolerance: float | None,
    solver: Solver,
    reference: Branch,
    rounding: Rounding | None = None,
) -> Solution:
    """Solve x + g(x) = z and prove it. `reference` is g in float64; `lipschitz` its bound, None if there is none.

    The tolerance is absolute, in the l2 norm of a sample; None means `default_tolerance`. The iteration runs in the
    dtype of z; samples whose float64 residual is still too large continue in float64. `rounding` bounds the rounding
    error of `reference`; None assumes a default.
    """
    rounding = Rounding.assumed() if rounding is None else rounding
    contraction = 1.0 if lipschitz is None else lipschitz
    gap = 1 - contraction if contraction < 1 else 1.0  # without a contraction nothing is proven: see the end
    working = torch.promote_types(z.dtype, torch.float32)
    zw = z.to(working)
    # Aim below the tolerance, as the final x is rounded, but not below what rounding in this dtype allows.
    if tolerance is None:
        goal = default_tolerance(z, contraction)
        aim = 0.5 * _relative_tolerances(working)[0] * sample_norms(zw).clamp_min(1.0)
    else:
        goal = torch.full((len(z),), tolerance, dtype=torch.float64, device=z.device)
        aim = (0.5 * gap * goal).to(working)
    floor = 4 * torch.finfo(working).eps * sample_norms(zw)
    target = torch.maximum(aim, floor)
    limit = _evaluation_limit(solver, contraction, zw, float(target.min()))
    x, count = solver.run(g, zw, zw, target, contraction, limit)
    x = x.to(z.dtype)

    def bound_error(x: Tensor) -> Tensor:
        return error_bound(*_residual_norms(reference, x, z), rounding=rounding, inverse_lipschitz=1 / gap)

    error = bound_error(x)
    if tolerance is None and contraction < 1 and bool((error > goal).any()):
        # The solution satisfies ||x - z|| = ||g(x)|| <= ||g(z)|| / (1 - L). An x farther away disproves an asserted L.
        near = sample_norms(x.double()) <= (1 + 1e-3) * (sample_norms(z.double()) + bound_error(z))
        least = attainable_tolerance(
            *_attainable_norms(x, z, contraction), rounding=rounding, inverse_lipschitz=1 / gap
        )
        goal = torch.where(near, torch.maximum(goal, least), goal)
    finite = torch.isfinite(x).flatten(1).all(1)
    unfinished = ((error > goal) & finite).nonzero()[:, 0]
    remaining = limit - int(count[unfinished].max()) if len(unfinished) and solver.max_iterations else limit
    if len(unfinished) and working != torch.float64 and remaining > 0:
        part = z[unfinished].double()
        better, more = solver.run(
            lambda t, rows: reference(t, unfinished[rows]),
            part,
            x[unfinished].double(),
            (0.5 * gap * goal)[unfinished],
            contraction,
            remaining,
        )
        x[unfinished] = better.to(z.dtype)
        count[unfinished] += more
        error = bound_error(x)
    if lipschitz is not None and lipschitz < 1:
        return Solution(x, count, error, meets_tolerance(error, goal))
    # Without a contraction the errors above are only residuals, not bounds.
    grown = error > (1 + 1e-6) * bound_error(z)
    none = torch.full_like(error, torch.inf)
    return Solution(x, count, none, torch.zeros_like(grown), diverged=grown | ~error.isfinite())


def _evaluation_limit(solver: Solver, contraction: float, z: Tensor, target: float) -> int:
    if solver.max_iterations is not None:
        return solver.max_iterations
    # The first residual ||g(z)|| is not known yet; 1e4 times the code only makes the limit larger.
    return iteration_limit(contraction, 1e4 * max(1.0, float(sample_norms(z).max())), target)


def _residual_norms(reference: Branch, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norms of x + g(x) - z, x and z per sample, in float64."""
    x64, z64 = x.double(), z.double()
    y = reference(x64, torch.arange(len(x), device=x.device))
    return sample_norms(x64 + y - z64), sample_norms(x64), sample_norms(z64)


def _attainable_norms(x: Tensor, z: Tensor, contraction: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same norms with the residual of the best x that this dtype can represent."""
    size = sample_norms(x.double())
    return (1 + contraction) * torch.finfo(x.dtype).eps / 2 * size, size, sample_norms(z.double())
