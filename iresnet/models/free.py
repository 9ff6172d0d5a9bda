"""x + g(x) for any g: the paper's "vanilla" block, on which the inverse's iteration may be tried (Figures 3, 6, 7).

Nothing is promised. Where the norms of the layers happen to multiply to less than one, the block is proven like any
other; elsewhere `solve` gives what the iteration came to, with an infinite error bound: that it diverges does not say
that there is no inverse. In eval BatchNorm is an affine map, and that is the function which is solved for.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..branch import Snapshot
from ..fixed_point import Solution, Solver
from ..residual import ResidualBlock


class FreeBlock(ResidualBlock):
    """x + g(x) without a constraint on g: the same iteration as `ResidualBlock`, with nothing promised.

    >>> block = FreeBlock(nn.Linear(2, 2))
    >>> _ = block.g.weight.data.copy_(3 * torch.eye(2))
    >>> block.solve(torch.ones(1, 2)).error_bound.item()
    inf
    """

    def __init__(self, g: nn.Module) -> None:
        super().__init__(g)

    def _check_contraction(self) -> None:
        """Any g will do."""

    def solve_with_snapshot(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> tuple[Solution, Snapshot]:
        """What the iteration came to, with a report; a code that is not finite any more stays as it is."""
        finite = torch.isfinite(z).flatten(1).all(1)
        if bool(finite.all()):
            return super().solve_with_snapshot(z, context, tolerance=tolerance, solver=solver)
        none = torch.full((len(z),), torch.inf, dtype=torch.float64, device=z.device)
        lost = Solution(
            z.clone(),
            torch.zeros_like(none).long(),
            none,
            torch.zeros_like(finite),
            proven=False,
            diverged=torch.ones_like(finite),
            reason="Numbers overflowed before this block.",
        )
        if not bool(finite.any()):
            return lost, self.snapshot(tuple(z.shape[1:]))
        part = None if context is None else context[finite]
        found, now = super().solve_with_snapshot(z[finite], part, tolerance=tolerance, solver=solver)
        if found.diverged is None:
            found = replace(found, diverged=torch.zeros_like(found.converged))
        names = ("x", "iterations", "error_bound", "converged", "diverged")
        both = {n: getattr(lost, n).masked_scatter(_like(finite, getattr(lost, n)), getattr(found, n)) for n in names}
        return replace(lost, **both), now


def _like(rows: Tensor, values: Tensor) -> Tensor:
    """A mask of rows in the shape of all their values."""
    return rows.reshape(-1, *(1,) * (values.dim() - 1)).expand_as(values)
