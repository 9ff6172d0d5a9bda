"""x + g(x) for any g: the paper's "vanilla" block, on which the fixed-point iteration can be tried (Figures 3, 6, 7).

It has no guarantee. If the norms of the layers happen to multiply to less than one, the block is proven like any other.
Otherwise `solve` returns the result of the iteration with an infinite error bound; that it diverges does not mean that
there is no inverse. BatchNorm is an affine map in eval mode, and that is the function which is solved for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..branch import Snapshot
from ..fixed_point import Solution, Solver
from ..residual import ResidualBlock


class UnconstrainedBlock(ResidualBlock):
    """x + g(x) without a constraint on g: inverted by the same iteration as `ResidualBlock`, without a guarantee.

    >>> block = UnconstrainedBlock(nn.Linear(2, 2))
    >>> _ = block.g.weight.data.copy_(3 * torch.eye(2))
    >>> block.solve(torch.ones(1, 2)).error_bound.item()
    inf
    """

    def __init__(self, g: nn.Module) -> None:
        super().__init__(g)

    def _check_contraction(self) -> None:
        """Accept any g."""

    def solve_with_snapshot(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> tuple[Solution, Snapshot]:
        """Run the iteration and report; codes that are not finite are returned as they are."""
        finite = torch.isfinite(z).flatten(1).all(1)
        if bool(finite.all()):
            return super().solve_with_snapshot(z, context, tolerance=tolerance, solver=solver)
        infinite = torch.full((len(z),), torch.inf, dtype=torch.float64, device=z.device)
        overflowed = Solution(
            z.clone(),
            torch.zeros_like(infinite).long(),
            infinite,
            torch.zeros_like(finite),
            proven=False,
            diverged=torch.ones_like(finite),
            reason="Numbers overflowed before this block.",
        )
        if not bool(finite.any()):
            return overflowed, self.snapshot(tuple(z.shape[1:]))
        own_context = None if context is None else context[finite]
        solution, now = super().solve_with_snapshot(z[finite], own_context, tolerance=tolerance, solver=solver)
        if solution.diverged is None:
            solution = replace(solution, diverged=torch.zeros_like(solution.converged))

        def merged(name: str) -> Any:
            values: Tensor = getattr(overflowed, name)
            mask = finite.reshape(-1, *(1,) * (values.dim() - 1)).expand_as(values)
            return values.masked_scatter(mask, getattr(solution, name))

        names = ("x", "iterations", "error_bound", "converged", "diverged")
        return replace(overflowed, **{name: merged(name) for name in names}), now
