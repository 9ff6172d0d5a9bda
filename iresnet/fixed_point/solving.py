"""Solve x + g(x) = z to a tolerance, and prove it: ||x - x*|| <= ||x + g(x) - z|| / (1 - L), evaluated in float64."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from ..batch import as_plain
from ..float64 import Rounding
from ..proof import attainable_tolerance, error_bound, meets_tolerance, sample_norms
from ..spelling import quoted
from .affine import Affine
from .solution import Solution
from .solvers import Solver
from .steps import Branch


def _relative_tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """Return (target residual, rounding error of x), relative to the code, for this dtype."""
    return (1e-11, 5e-14) if dtype == torch.float64 else (1e-6, max(2e-7, 1.5 * torch.finfo(dtype).eps))


def default_tolerance(z: Tensor, lipschitz: float) -> Tensor:
    """Return the default tolerance per sample: what the dtype of z can represent, for this contraction.

    x can be 1 / (1 - L) times as large as z, and its rounding error counts 1 / (1 - L) times in the bound. This is the
    worst case; a solve aims lower. If g(0) is far from zero, x is larger, and so are its rounding error and that of
    evaluating g in float64: `solve` allows twice that.
    """
    return _relative_default(z.dtype, lipschitz) * sample_norms(z.detach().double()).clamp_min(1.0)


def _relative_default(dtype: torch.dtype, lipschitz: float) -> float:
    """Return the default tolerance of a code of norm one."""
    gap = max(1 - lipschitz, 1e-3)
    relative, rounding = _relative_tolerances(dtype)
    return max(relative / gap, rounding / gap**2)


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
    affine: Affine | None = None,
) -> Solution:
    """Solve x + g(x) = z and prove it. `reference` is g in float64; `lipschitz` its bound, None if there is none.

    The tolerance is absolute, in the l2 norm of a sample; None means `default_tolerance`. The iteration runs in the
    dtype of z; samples whose float64 residual is still too large continue in float64. `rounding` bounds the rounding
    error of `reference`; None assumes a default. `affine` approximates g, for a solver that makes use of it.
    """
    if not isinstance(solver, Solver):
        raise ValueError(f"solver must be a Solver, such as Anderson() or Banach(); got {quoted(solver)}.")
    rounding = Rounding.assumed() if rounding is None else rounding
    contraction = 1.0 if lipschitz is None else lipschitz
    gap = 1 - contraction if contraction < 1 else 1.0  # without a contraction nothing is proven: see the end
    working, z64 = torch.promote_types(z.dtype, torch.float32), z.double()
    sizes, rows = sample_norms(z64), torch.arange(len(z), device=z.device)
    goal, target = _goal_and_target(sizes, z.dtype, tolerance, contraction)
    limit = solver.max_iterations
    if limit is None:  # the first residual ||g(z)|| is not known; 1e4 times the code only makes the limit larger
        limit = iteration_limit(contraction, 1e4 * max(1.0, float(sizes.max())), float(target.min()))
    zw = z.to(working, copy=True)  # a user's solver may work in place, and the proof is about the z that was given
    affine = affine.to(working) if affine is not None and solver.affine else None
    if affine is None:
        x, count = solver.run(g, zw, zw.clone(), target, contraction, limit)
    else:
        x, count = solver.run(g, zw, affine.start(zw, sizes), target, contraction, limit, affine)
    x = as_plain(x).to(z.dtype)

    def bound_error(x: Tensor) -> Tensor:
        x64 = x.double()
        residual = (reference(x64, rows) + x64).sub_(z64)
        norms = sample_norms(residual), sample_norms(x64), sizes
        return error_bound(*norms, rounding=rounding, inverse_lipschitz=1 / gap)

    error = bound_error(x)
    if bool((error > goal).any()):
        if tolerance is None and contraction < 1:
            attainable = _attainable_goal(x, sizes, bound_error(z), contraction, rounding)
            goal = torch.maximum(goal, attainable)
        if working != torch.float64 or affine is not None:  # with one, convergence may have been taken for granted
            _continue_in_float64(x, count, error > goal, z, 0.5 * gap * goal, contraction, limit, solver, reference)
            error = bound_error(x)
    if lipschitz is not None and lipschitz < 1:
        return Solution(x, count, error, meets_tolerance(error, goal))
    # Without a contraction the errors above are only residuals, not bounds.
    grown = error > (1 + 1e-6) * bound_error(z)
    none = torch.full_like(error, torch.inf)
    return Solution(x, count, none, torch.zeros_like(grown), diverged=grown | ~error.isfinite())


def _goal_and_target(
    sizes: Tensor, dtype: torch.dtype, tolerance: float | None, contraction: float
) -> tuple[Tensor, Tensor]:
    """Return the largest error, and the residual to aim at, for codes of these norms.

    It is below the tolerance, as the final x is rounded, but not below what rounding in the working dtype allows.
    """
    working = torch.promote_types(dtype, torch.float32)
    least = 4 * torch.finfo(working).eps
    if tolerance is None:
        scale = sizes.clamp_min(1.0)
        goal, target = _relative_default(dtype, contraction) * scale, 0.5 * _relative_tolerances(working)[0] * scale
    else:
        goal = torch.full_like(sizes, tolerance)
        target = 0.5 * (1 - contraction if contraction < 1 else 1.0) * goal
    return goal, torch.maximum(target, least * sizes).to(working)


def _continue_in_float64(
    x: Tensor,
    count: Tensor,
    unfinished: Tensor,
    z: Tensor,
    target: Tensor,
    contraction: float,
    limit: int,
    solver: Solver,
    reference: Branch,
) -> None:
    """Continue the unfinished samples in float64, in place: from x, or from z where x has overflowed in float32."""
    finite = torch.isfinite(x).flatten(1).all(1)
    start = x if contraction >= 1 else torch.where(finite.view(-1, *[1] * (x.dim() - 1)), x, z)
    unfinished = unfinished & (finite | (contraction < 1))
    # A limit that was given counts both phases, for every sample alone.
    spent = count.clone() if solver.max_iterations else torch.zeros_like(count)
    for before in sorted(set(spent[unfinished & (spent < limit)].tolist())):
        rows = (unfinished & (spent == before)).nonzero()[:, 0]

        def g(t: Tensor, among: Tensor, rows: Tensor = rows) -> Tensor:
            return reference(t, rows[among])

        better, more = solver.run(g, z[rows].double(), start[rows].double(), target[rows], contraction, limit - before)
        x[rows], count[rows] = better.to(z.dtype), count[rows] + more


def _attainable_goal(x: Tensor, code: Tensor, start: Tensor, contraction: float, rounding: Rounding) -> Tensor:
    """Return the smallest error bound that x, stored in its dtype, can have; 0 where x is not near the solution.

    `code` is the norm of z, and `start` the error bound of z as a solution. The solution has ||x - z|| = ||g(x)||
    <= ||g(z)|| / (1 - L); an x farther away disproves an asserted L.
    """
    size = sample_norms(x.double())
    stored = (1 + contraction) * torch.finfo(x.dtype).eps / 2 * size  # the residual of the best x in this dtype
    least = attainable_tolerance(stored, size, code, rounding=rounding, inverse_lipschitz=1 / (1 - contraction))
    return torch.where(size <= (1 + 1e-3) * (code + start), least, 0.0)
