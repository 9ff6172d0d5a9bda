"""The ordinary inverse of any transform: each part by its own `inverse` or `solve`, from the last to the first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..batch import as_plain, check_finite
from ..fixed_point import ChainSolution, ConvergenceError, Solution, Solver
from ..proof import SetAside, compose_bounds, growth_factors, nan_to_infinity, sample_norms
from ..residual import ResidualBlock
from ..transform import (
    Transform,
    check_context,
    check_unmodified,
    context_for,
    flat_steps,
    run_forward,
    run_inverse,
    stretch_of,
    why_unproven,
)
from ..trust import why_untrusted


def invert(
    transform: Transform,
    z: Tensor,
    context: Tensor | None = None,
    *,
    tolerance: float | None = None,
    solver: Solver | None = None,
    by_parts: bool = False,
) -> Tensor:
    """Return the x with these codes, differentiable; `ConvergenceError` names the part that is not proven.

    A transform of an unknown class may define its own `inverse`, which is called first. That method may call this
    function with `by_parts`, to invert the parts.
    """
    steps = type(transform).steps(transform)  # not transform.steps: a user's attribute may have that name
    if steps == [transform] or (why_untrusted(transform) and not by_parts):
        return transform.inverse(z, context, tolerance=tolerance, solver=solver)
    check_unmodified(transform)
    check_context(transform, context)
    position = count = sum(isinstance(step, Transform) for step in steps)

    def act(t: Transform, y: Tensor) -> Tensor:
        nonlocal position
        position -= 1
        try:
            return invert(t, y, context_for(t, context), tolerance=tolerance, solver=solver)
        except ConvergenceError as error:
            raise error.at(f"{transform.part_kind} {position} of {count}") from None
        except ValueError:
            if position < count - 1 and has_overflowed(z, y):
                raise ValueError(
                    f"numbers overflow in the inverse, before it reaches {transform.part_kind} {position} of {count}, "
                    "though the codes are finite. The weights are too large, as after a training that diverged: train "
                    "again with a lower learning rate or clipped gradients, or call .double() on model and code."
                ) from None
            raise

    return run_inverse(steps, z, act)


def has_overflowed(z: Tensor, y: Tensor) -> bool:
    """Whether a state of an inverse holds infinity or NaN, but its codes do not."""
    return bool(torch.isfinite(z).all()) and not bool(torch.isfinite(y).all())


@dataclass(frozen=True)
class _SolvedPart:
    """The solution of a part F, with Lip(F^-1), whether that is proven, the reason if not, and F in float64."""

    solution: Solution | ChainSolution
    inverse_lipschitz: float
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
    by_parts: bool = False,
) -> ChainSolution:
    """Invert and report, as `Chain.solve` does; no gradient. `by_parts` as in `invert`."""
    check_context(transform, context)
    z, context = as_plain(z), as_plain(context)
    check_finite(z, "z")
    parts, overflowed = list[_SolvedPart](), torch.zeros(len(z), dtype=torch.bool, device=z.device)

    def act(t: Transform, y: Tensor) -> Tensor:
        nonlocal overflowed
        part = _solve_part(t, y, context_for(t, context), tolerance=tolerance, solver=solver)
        x = part.solution.x
        parts.insert(0, replace(part, solution=replace(part.solution, x=x.new_empty(0))))  # frees the memory of x
        newly = ~torch.isfinite(x).flatten(1).all(dim=1)
        overflowed = overflowed | newly
        return _fill(x, newly, 0.0)

    steps = list(flat_steps(transform)) if by_parts or not why_untrusted(transform) else [transform]
    with torch.no_grad():
        x = run_inverse(steps, z, act)
        in_order = iter(parts)
        code = run_forward(steps, x.double(), lambda t, y: next(in_order).reference(y))
        residual = nan_to_infinity(sample_norms(code - z.double()))
        in_order = iter(parts)
        inverse_lipschitz = [
            next(in_order).inverse_lipschitz if isinstance(s, Transform) else SetAside(s.pushed) for s in steps
        ]
        zeros = torch.zeros_like(residual)  # for an empty chain
        largest = torch.stack([zeros, *(part.largest for part in parts)]).amax(0)
        errors = torch.stack([part.solution.error_bound for part in parts] or [zeros])
        total = compose_bounds(errors, growth_factors(inverse_lipschitz or [1.0], z.device))
        largest, residual, total = (e.masked_fill(overflowed, math.inf) for e in (largest, residual, total))
    solutions = [part.solution for part in parts]
    reason = next(filter(None, (why_untrusted(transform), *(part.reason for part in reversed(parts)))), "")
    return ChainSolution(
        x=_fill(x, overflowed, math.nan),
        iterations=sum((s.iterations for s in solutions), zeros.long()),
        converged=torch.stack([~overflowed, *(s.converged for s in solutions)]).all(0),
        largest_block_bound=largest,
        code_residual=residual,
        composed_bound=total,
        diverged=torch.stack([overflowed, *(s.diverged for s in solutions if s.diverged is not None)]).any(0),
        proven=not why_untrusted(transform) and all(part.solution.proven and part.proven for part in parts),
        reason=reason,
    )


def _solve_part(
    t: Transform, z: Tensor, context: Tensor | None, *, tolerance: float | None, solver: Solver | None
) -> _SolvedPart:
    if isinstance(t, ResidualBlock) and not why_untrusted(t):  # compares g with its snapshot once, not at every use
        s, now = t.solve_with_snapshot(z, context, tolerance=tolerance, solver=solver)
        return _SolvedPart(
            s, now.inverse_lipschitz, now.bound.proven, s.reason, lambda x: t.reference(x, context, snapshot=now)
        )
    own = t.solve(z, context, tolerance=tolerance, solver=solver)
    known = stretch_of(t, tuple(own.x.shape[1:]))
    reason = own.reason or why_unproven(t)
    return _SolvedPart(own, known.inverse, known.proven, reason, lambda x: t.reference(x, context))


def _fill(x: Tensor, samples: Tensor, value: float) -> Tensor:
    """Set the samples in this mask to a value."""
    return x.masked_fill(samples.view(-1, *[1] * (x.dim() - 1)), value)
