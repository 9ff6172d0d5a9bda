"""The ordinary inverse, of any transform: each part by its own `inverse` or `solve`, from the last to the first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..fixed_point import ConvergenceError, Solution, Solver
from ..proof import SetAside, compose_bounds, growth_factors, nan_to_infinity, sample_norms
from ..residual import ResidualBlock
from ..transform import (
    ChainSolution,
    Transform,
    back,
    check_context,
    check_finite,
    given_to,
    path,
    refuse_changed,
    stretch_of,
    through,
)
from ..trust import why_untrusted


def invert(
    transform: Transform,
    z: Tensor,
    context: Tensor | None = None,
    *,
    tolerance: float | None = None,
    solver: Solver | None = None,
    own: bool = False,
) -> Tensor:
    """The x with these codes, differentiable; `ConvergenceError` names the part that is not proven.

    A transform that is not known may have methods of a user's own, which come first, unless it is one of its `own`
    that asks.
    """
    steps = type(transform).steps(transform)  # an attribute of a user's own may have that name
    if steps == [transform] or (why_untrusted(transform) and not own):
        return transform.inverse(z, context, tolerance=tolerance, solver=solver)
    refuse_changed(transform)
    check_context(transform, context)
    left = count = sum(isinstance(step, Transform) for step in steps)

    def act(t: Transform, y: Tensor) -> Tensor:
        nonlocal left
        left -= 1
        try:
            return invert(t, y, given_to(t, context), tolerance=tolerance, solver=solver)
        except ConvergenceError as error:
            raise error.at(f"{transform.member} {left} of {count}") from None

    return back(steps, z, act)


@dataclass(frozen=True)
class _Solved:
    """A part's solve, and of what was solved Lip(F^-1), whether that is proven, why not, and F in float64."""

    solution: Solution | ChainSolution
    expansion: float
    proven: bool
    reason: str
    reference: Callable[[Tensor], Tensor]

    @property
    def largest(self) -> Tensor:
        s = self.solution
        return s.largest_block_bound if isinstance(s, ChainSolution) else s.error_bound


def solve(
    transform: Transform,
    z: Tensor,
    context: Tensor | None = None,
    *,
    tolerance: float | None = None,
    solver: Solver | None = None,
    own: bool = False,
) -> ChainSolution:
    """The inverse with a report (no gradient), as `Chain.solve` gives it; `own` as in `invert`."""
    check_context(transform, context)
    check_finite(z, "z")
    found, lost = list[_Solved](), torch.zeros(len(z), dtype=torch.bool, device=z.device)

    def act(t: Transform, y: Tensor) -> Tensor:
        nonlocal lost
        part = _solved(t, y, given_to(t, context), tolerance=tolerance, solver=solver)
        x = part.solution.x
        found.insert(0, replace(part, solution=replace(part.solution, x=x.new_empty(0))))  # keeps no state of the way
        gone = ~torch.isfinite(x).flatten(1).all(dim=1)
        lost = lost | gone
        return _filled(x, gone, 0.0)

    steps = list(path(transform)) if own or not why_untrusted(transform) else [transform]
    with torch.no_grad():
        x = back(steps, z, act)
        solved = iter(found)
        code = through(steps, x.double(), lambda t, y: next(solved).reference(y))
        residual = nan_to_infinity(sample_norms(code - z.double()))
        solved = iter(found)
        expansions = [next(solved).expansion if isinstance(s, Transform) else SetAside(s.aside) for s in steps]
        none = torch.zeros_like(residual)  # for a chain of nothing
        largest = torch.stack([none, *(s.largest for s in found)]).amax(0)
        errors = torch.stack([s.solution.error_bound for s in found] or [none])
        whole = compose_bounds(errors, growth_factors(expansions or [1.0], z.device))
        largest, residual, whole = (e.masked_fill(lost, math.inf) for e in (largest, residual, whole))
    solutions = [s.solution for s in found]
    reason = next(filter(None, (why_untrusted(transform), *(s.reason for s in reversed(found)))), "")
    return ChainSolution(
        x=_filled(x, lost, math.nan),
        iterations=sum((s.iterations for s in solutions), none.long()),
        converged=torch.stack([~lost, *(s.converged for s in solutions)]).all(0),
        largest_block_bound=largest,
        code_residual=residual,
        composed_bound=whole,
        diverged=torch.stack([lost, *(s.diverged for s in solutions if s.diverged is not None)]).any(0),
        proven=not why_untrusted(transform) and all(s.solution.proven and s.proven for s in found),
        reason=reason,
    )


def _solved(
    t: Transform, z: Tensor, context: Tensor | None, *, tolerance: float | None, solver: Solver | None
) -> _Solved:
    if isinstance(t, ResidualBlock) and not why_untrusted(
        t
    ):  # g is compared with what is known of it once, not at every use
        s, now = t.solve_with_snapshot(z, context, tolerance=tolerance, solver=solver)
        return _Solved(s, now.inverse_lipschitz, now.bound.proven, s.reason, lambda x: t.reference(x, context, now=now))
    own = t.solve(z, context, tolerance=tolerance, solver=solver)
    known = stretch_of(t, tuple(own.x.shape[1:]))
    reason = own.reason or why_untrusted(t)
    return _Solved(own, known.inverse, known.proven, reason, lambda x: t.reference(x, context))


def _filled(x: Tensor, rows: Tensor, value: float) -> Tensor:
    return x.masked_fill(rows.view(-1, *[1] * (x.dim() - 1)), value)
