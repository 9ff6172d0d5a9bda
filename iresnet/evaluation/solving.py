"""Rows solved back from codes: their own, with what is proven of that, and codes between two."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..data import Dataset
from ..fixed_point import Solver
from ..objective import centred
from ..transform import Chain, ChainSolution, Transform


@dataclass(frozen=True)
class Inverse:
    """Rows solved back from their codes: what is proven and what was measured, in l2, of the worst row."""

    rows: int
    precision: str
    proven: int
    largest_block_bound: float
    code_residual: float
    measured_error: float
    composed_bound: float
    informative: bool
    iterations: float

    def __str__(self) -> str:
        remark = "" if self.informative else " (not informative)"
        return (
            f"{self.proven} of {self.rows} rows proven block by block, {self.iterations:.0f} evaluations a row; "
            f"largest block bound {self.largest_block_bound:.1e}, code residual {self.code_residual:.1e}, "
            f"measured error {self.measured_error:.1e}, composed bound {self.composed_bound:.1e}{remark}"
        )


@torch.no_grad()
def reconstruct(
    model: nn.Module,
    data: Dataset,
    *,
    precision: torch.dtype = torch.float64,
    tolerance: float | None = None,
    solver: Solver | None = None,
) -> tuple[ChainSolution, Tensor]:
    """Encode rows and solve their codes back: the solution, and the inputs (integers at the middle of their bins)."""
    transform = cast(Transform, copy.deepcopy(cast(Any, model).transform)).to(precision)
    if not transform.parts():  # a lone block reports as a chain of one
        transform = Chain(transform)
    x = centred(data.x, data.schema.levels).to(precision)
    solution = transform.solve(transform(x), tolerance=tolerance, solver=solver)
    return cast(ChainSolution, solution), x


def inverse(model: nn.Module, data: Dataset, **options: Any) -> Inverse:
    """How well, and how provably, codes give their inputs back."""
    return inverse_of(*reconstruct(model, data, **options))


def inverse_of(solution: ChainSolution, x: Tensor) -> Inverse:
    """The summary of a reconstruction, the worst row of each figure."""
    composed, size = float(solution.composed_bound.max()), float(x.flatten(1).norm(dim=1).max())
    return Inverse(
        rows=len(x),
        precision=str(x.dtype).removeprefix("torch."),
        proven=int(solution.converged.sum()) if solution.proven else 0,
        largest_block_bound=float(solution.largest_block_bound.max()),
        code_residual=float(solution.code_residual.max()),
        measured_error=float(solution.measured_error(x).max()),
        composed_bound=composed,
        informative=composed < 0.1 * max(size, 1e-12),
        iterations=float(solution.iterations.double().mean()),
    )


@torch.no_grad()
def interpolate(model: nn.Module, data: Dataset, *, pairs: int = 6, steps: int = 9, seed: int = 0) -> Tensor:
    """Rows decoded along straight lines between codes, (pairs, steps, ...), each between two classes if it can be."""
    if pairs < 1 or steps < 2:
        raise ValueError(f"pairs must be at least 1 and steps at least 2; got {pairs} and {steps}.")
    if len(data) < 2:
        raise ValueError(f"an interpolation needs two rows; got {len(data)}.")
    transform = cast(Transform, cast(Any, model).transform)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = _pairs(order, data.y, min(pairs, len(data) // 2))
    first, second = (
        transform(centred(data.take(torch.tensor(side)).x, data.schema.levels)) for side in zip(*chosen, strict=True)
    )
    t = torch.linspace(0, 1, steps, device=first.device).view(1, steps, *[1] * (first.dim() - 1))
    z = (1 - t) * first[:, None] + t * second[:, None]
    x = transform.inverse(z.flatten(0, 1))
    return x.reshape(len(chosen), steps, *x.shape[1:])


def _pairs(order: list[int], y: Tensor | None, count: int) -> list[tuple[int, int]]:
    """Disjoint pairs in the given order, the second of another class than the first where one is left."""
    rest, pairs = list(order), []
    for _ in range(count):
        a = rest.pop(0)
        b = next((i for i in rest if y is None or int(y[i]) != int(y[a])), rest[0])
        rest.remove(b)
        pairs.append((a, b))
    return pairs
