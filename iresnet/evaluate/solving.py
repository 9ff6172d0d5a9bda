"""Rows solved back from codes: their own, with what is proven of that, and codes between two.

All of it works on a limited number of rows at a time, so that memory does not grow with what is asked for.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..chain import Chain
from ..data import Dataset
from ..fixed_point import Solver
from ..inverse import Decoder
from ..inverse import solve as solve_codes
from ..precision import full_precision
from ..train.objective import bin_centres
from ..transform import ChainSolution, Transform
from ..transforms.preprocess import Logit, Standardise
from .chunks import chunk_size
from .likelihood import CHUNK


@dataclass(frozen=True)
class Inverse:
    """Rows solved back from their codes: what is proven and what was measured, in l2, of the worst row.

    A closed form takes no evaluations. Where not every block is proven to be a contraction, nothing is: the bounds are
    infinite, and the rest is what the iteration came to. It diverges for a row where its steps grew in some block or
    numbers overflowed, which does not say that there is no inverse.
    """

    rows: int
    precision: str
    proven: int
    largest_block_bound: float
    code_residual: float
    measured_error: float
    composed_bound: float
    informative: bool
    iterations: float
    diverged: int = 0

    def __str__(self) -> str:
        if math.isinf(self.largest_block_bound) and not self.iterations:
            return (
                f"{self.proven} of {self.rows} rows proven, as no bound is known for this inverse; code residual "
                f"{self.code_residual:.1e}, measured error {self.measured_error:.1e}"
            )
        if math.isinf(self.largest_block_bound):
            return (
                f"{self.proven} of {self.rows} rows proven, as not every block is proven to be a contraction; "
                f"{self._iteration()}"
            )
        remark = "" if self.informative else " (not informative)"
        effort = f"{self.iterations:.0f} evaluations a row" if self.iterations else "in closed form"
        return (
            f"{self.proven} of {self.rows} rows proven block by block, {effort}; "
            f"largest block bound {self.largest_block_bound:.1e}, code residual {self.code_residual:.1e}, "
            f"measured error {self.measured_error:.1e}, composed bound {self.composed_bound:.1e}{remark}"
        )

    def _iteration(self) -> str:
        """What the iteration came to, as it is."""
        words = f"after {self.iterations:.0f} evaluations a row"
        overflown = not math.isfinite(self.measured_error)
        if self.diverged or overflown:
            subsample = f" for {self.diverged} of {self.rows} rows" if 0 < self.diverged < self.rows else ""
            words = f"the iteration diverges{subsample}, {words}"
        if overflown:
            return words
        return f"{words}, code residual {self.code_residual:.1e} and measured error {self.measured_error:.1e}"


def has_inverse(model: nn.Module) -> bool:
    """Whether codes come from invertible blocks; those of an ordinary ResNet are its inputs, scaled."""
    parts = [part for part in cast(Any, model).transform.modules() if isinstance(part, Transform)]
    return any(not isinstance(part, Chain | Logit | Standardise) for part in parts)


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
    transform, x = _copied(model, precision), bin_centres(data.x, data.schema.levels).to(precision)
    return _solve(transform, _in_chunks(transform, x), tolerance=tolerance, solver=solver), x


@torch.no_grad()
def solve(model: nn.Module, z: Tensor, *, precision: torch.dtype = torch.float64, **options: Any) -> ChainSolution:
    """Codes solved back to rows, with a report; `options` are those of `Transform.solve`."""
    return _solve(_copied(model, precision), z.to(precision), **options)


def _copied(model: nn.Module, precision: torch.dtype) -> Transform:
    """The model's transform in another precision."""
    _check_blocks(model)
    return cast(Transform, copy.deepcopy(cast(Any, model).transform)).to(precision)


def _check_blocks(model: nn.Module) -> None:
    if not has_inverse(model):
        raise ValueError(
            "an inverse needs invertible blocks; this model holds none (an ordinary ResNet). Train one with "
            "network.family=iresnet."
        )


def _solve(transform: Transform, z: Tensor, **options: Any) -> ChainSolution:
    parts = torch.split(z, chunk_size(transform, z, CHUNK))
    decoder = Decoder(graph=len(parts) > 1)
    return concatenate([solve_codes(transform, part, decoder=decoder, **options) for part in parts])


def concatenate(solutions: Sequence[ChainSolution]) -> ChainSolution:
    """The solutions of several batches as one."""
    names = [field.name for field in fields(ChainSolution) if field.name not in ("proven", "reason")]
    rows = {name: torch.cat([getattr(s, name) for s in solutions]) for name in names}
    return ChainSolution(**rows, proven=all(s.proven for s in solutions), reason=solutions[0].reason)


@torch.no_grad()
def decode(
    transform: Transform, z: Tensor, *, tolerance: float | None = None, decoder: Decoder | None = None
) -> Tensor:
    """The rows of codes, every solve proven; a `decoder` remembers what it has prepared."""
    decoder = Decoder() if decoder is None else decoder
    return _in_chunks(transform, z, lambda part: decoder(transform, part, tolerance=tolerance))


def _in_chunks(transform: Transform, rows: Tensor, way: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """What the transform, or another way through it, makes of rows or codes."""
    way = transform if way is None else way
    with full_precision(rows):
        return torch.cat([way(part) for part in torch.split(rows, chunk_size(transform, rows, CHUNK))])


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
        diverged=int(solution.diverged.sum()),
    )


@torch.no_grad()
def interpolate(model: nn.Module, data: Dataset, *, pairs: int = 6, steps: int = 9, seed: int = 0) -> Tensor:
    """Rows decoded along straight lines between codes, (pairs, steps, ...), each between two classes if it can be."""
    if pairs < 1 or steps < 2:
        raise ValueError(f"pairs must be at least 1 and steps at least 2; got {pairs} and {steps}.")
    if len(data) < 2:
        raise ValueError(f"an interpolation needs two rows; got {len(data)}.")
    _check_blocks(model)
    transform = cast(Transform, cast(Any, model).transform)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = _pairs(order, None if data.y is None else data.y.tolist(), min(pairs, len(data) // 2))
    first, second = (
        _in_chunks(transform, bin_centres(data.take(side).x, data.schema.levels)) for side in zip(*chosen, strict=True)
    )
    t = torch.linspace(0, 1, steps, device=first.device).view(1, steps, *[1] * (first.dim() - 1))
    x = decode(transform, ((1 - t) * first[:, None] + t * second[:, None]).flatten(0, 1))
    return x.reshape(len(chosen), steps, *x.shape[1:])


def _pairs(order: list[int], y: list[int] | None, count: int) -> list[tuple[int, int]]:
    """Disjoint pairs in the given order, the second of another class than the first where one is left."""
    rest, pairs = list(order), []
    for _ in range(count):
        a = rest.pop(0)
        b = next((i for i in rest if y is None or y[i] != y[a]), rest[0])
        rest.remove(b)
        pairs.append((a, b))
    return pairs
