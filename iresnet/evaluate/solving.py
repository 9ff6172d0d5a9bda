"""Inverses on a dataset: reconstructions from codes, with proven bounds, and interpolations between codes.

Everything runs on a limited number of samples at a time, so that memory does not grow with their number.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..data import Dataset
from ..data.dataset import check_dataset
from ..data.units import bin_centres
from ..fixed_point import ChainSolution, Solver
from ..inverse import Decoder
from ..inverse import solve as solve_batch
from ..model import Model
from ..progress import each
from ..spelling import outcomes, round_up
from ..transform import Transform
from .chunks import CHUNK, chunk_size, in_chunks
from .roles import has_inverse

#: An iteration has converged for a sample when its code is reached up to this part of the sample.
CONVERGED = 1e-6


@dataclass(frozen=True)
class Inverse:
    """Reconstructions from codes: proven bounds and measured errors, in l2, of the worst sample.

    A closed form takes no iterations. If not every block is proven to be a contraction, nothing is proven: the bounds
    are infinite, and the other numbers are those that the iteration reached. It diverges for a sample if its steps grew
    in some block or numbers overflowed, which does not mean that there is no inverse. It converges for a sample if the
    code of what it reached is nearly the given one.
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
    converged: int | None = None

    def __str__(self) -> str:
        if math.isinf(self.largest_block_bound) and not self.iterations:
            return (
                f"{self.proven} of {self.rows} samples proven, as no bound is known for this inverse; code residual "
                f"{self.code_residual:.1e}, measured error {self.measured_error:.1e}"
            )
        if math.isinf(self.largest_block_bound):
            return (
                f"{self.proven} of {self.rows} samples proven, as not every block is proven to be a contraction; "
                f"{self._iteration()}"
            )
        remark = "" if self.informative else " (not informative)"
        effort = f"{self.iterations:.0f} evaluations per sample" if self.iterations else "in closed form"
        return (
            f"{self.proven} of {self.rows} samples proven block by block, {effort}; "
            f"largest block bound {round_up(self.largest_block_bound, '.1e')}, code residual {self.code_residual:.1e}, "
            f"measured error {self.measured_error:.1e}, composed bound {round_up(self.composed_bound, '.1e')}{remark}"
        )

    def _iteration(self) -> str:
        """Describe what the iteration reached."""
        words = f"after {self.iterations:.0f} evaluations per sample"
        overflown = not math.isfinite(self.measured_error)
        if self.diverged or overflown:
            words = f"the iteration {outcomes(self.diverged, self.converged, self.rows, ' samples')}, {words}"
        if overflown:
            return words
        return f"{words}, code residual {self.code_residual:.1e} and measured error {self.measured_error:.1e}"


@torch.no_grad()
def reconstruct(
    model: Model,
    data: Dataset,
    *,
    precision: torch.dtype = torch.float64,
    tolerance: float | None = None,
    solver: Solver | None = None,
) -> tuple[ChainSolution, Tensor]:
    """Encode samples and invert their codes; return the solution and the inputs (integers at their bin centres)."""
    check_dataset(data)
    transform = _copy_transform(model, precision)
    x = bin_centres(data.x, data.schema.levels).to(precision)
    return _solve(transform, _map_chunks(transform, x), tolerance=tolerance, solver=solver), x


@torch.no_grad()
def solve_codes(model: Model, z: Tensor, *, precision: torch.dtype = torch.float64, **options: Any) -> ChainSolution:
    """Invert codes, with a report; `options` are those of `Transform.solve`."""
    return _solve(_copy_transform(model, precision), z.to(precision), **options)


def _copy_transform(model: Model, precision: torch.dtype) -> Transform:
    """Copy the model's transform to another precision."""
    _check_blocks(model)
    return copy.deepcopy(model.transform).to(precision)


def _check_blocks(model: Model) -> None:
    if model.transform.takes_context:
        raise ValueError(
            "an inverse of a conditional density needs the given columns too; codes alone have none. Use Flow.sample "
            "or Transform.inverse with a context."
        )
    if not has_inverse(model):
        raise ValueError(
            "an inverse needs invertible blocks; this model (an ordinary ResNet) has none. Train one with "
            "network.family=iresnet."
        )


def _solve(transform: Transform, z: Tensor, **options: Any) -> ChainSolution:
    parts = torch.split(z, chunk_size(transform, z, CHUNK))
    decoder = Decoder(graph=len(parts) > 1)
    return concatenate_solutions(each(lambda part: solve_batch(transform, part, decoder=decoder, **options), parts))


def concatenate_solutions(solutions: Sequence[ChainSolution]) -> ChainSolution:
    """Concatenate the solutions of several batches."""
    names = [field.name for field in fields(ChainSolution) if field.name not in ("proven", "reason")]
    values = {name: torch.cat([getattr(s, name) for s in solutions]) for name in names}
    reason = next((s.reason for s in solutions if s.reason), "")
    return ChainSolution(**values, proven=all(s.proven for s in solutions), reason=reason)


@torch.no_grad()
def decode(
    transform: Transform,
    z: Tensor,
    context: Tensor | None = None,
    *,
    tolerance: float | None = None,
    decoder: Decoder | None = None,
) -> Tensor:
    """Decode codes to samples, every solve proven; a `decoder` caches what it has prepared."""
    decoder = Decoder() if decoder is None else decoder
    if context is None:
        return _map_chunks(transform, z, lambda chunk: decoder(transform, chunk, tolerance=tolerance))
    d, rows = z.shape[1], torch.cat([z, context.to(z)], dim=1)
    return _map_chunks(transform, rows, lambda row: decoder(transform, row[:, :d], row[:, d:], tolerance=tolerance))


def _map_chunks(transform: Transform, x: Tensor, function: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Apply the transform, or another function with its memory needs, to samples or codes in chunks."""
    return in_chunks(transform if function is None else function, x, chunk_size(transform, x, CHUNK))


def inverse(model: Model, data: Dataset, **options: Any) -> Inverse:
    """Invert the codes of a dataset and summarise the proven bounds and the measured errors."""
    return summarise_inverse(*reconstruct(model, data, **options))


def proven_samples(solution: ChainSolution) -> Tensor:
    """Return which samples met their tolerance with a proof: none if something is asserted or unknown."""
    return solution.converged & solution.proven


def summarise_inverse(solution: ChainSolution, x: Tensor) -> Inverse:
    """Summarise a reconstruction by the worst sample for each metric."""
    composed = float(solution.composed_bound.max())
    sizes = x.flatten(1).norm(dim=1).double()
    return Inverse(
        rows=len(x),
        precision=str(x.dtype).removeprefix("torch."),
        proven=int(proven_samples(solution).sum()),
        largest_block_bound=float(solution.largest_block_bound.max()),
        code_residual=float(solution.code_residual.max()),
        measured_error=float(solution.measured_error(x).max()),
        composed_bound=composed,
        informative=composed < 0.1 * max(float(sizes.max()), 1e-12),
        iterations=float(solution.iterations.double().mean()),
        diverged=int(solution.diverged.sum()),
        converged=int((~solution.diverged & (solution.code_residual <= CONVERGED * sizes.clamp_min(1.0))).sum()),
    )


@torch.no_grad()
def interpolate(model: Model, data: Dataset, *, pairs: int = 6, steps: int = 9, seed: int = 0) -> Tensor:
    """Decode points on straight lines between codes, (pairs, steps, ...), of two different classes where possible."""
    if pairs < 1 or steps < 2:
        raise ValueError(f"pairs must be at least 1 and steps at least 2; got {pairs} and {steps}.")
    if len(data) < 2:
        raise ValueError(f"an interpolation needs at least two samples; got {len(data)}.")
    _check_blocks(model)
    transform = model.transform
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = _pairs(order, None if data.y is None else data.y.tolist(), min(pairs, len(data) // 2))
    first, second = (
        _map_chunks(transform, bin_centres(data.take(side).x, data.schema.levels)) for side in zip(*chosen, strict=True)
    )
    t = torch.linspace(0, 1, steps, device=first.device).view(1, steps, *[1] * (first.dim() - 1))
    x = decode(transform, ((1 - t) * first[:, None] + t * second[:, None]).flatten(0, 1))
    return x.reshape(len(chosen), steps, *x.shape[1:])


def _pairs(order: list[int], y: list[int] | None, count: int) -> list[tuple[int, int]]:
    """Form disjoint pairs in the given order, the second of another class than the first if one is left."""
    rest, pairs = list(order), []
    for _ in range(count):
        a = rest.pop(0)
        b = next((i for i in rest if y is None or y[i] != y[a]), rest[0])
        rest.remove(b)
        pairs.append((a, b))
    return pairs
