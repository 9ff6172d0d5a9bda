"""Bias and standard deviation of a power series with n terms, from dense Jacobians (Figures 4 and 9).

With A_n = sum_{k<=n} (-1)^(k+1) J^k / k and S = (A_n + A_n') / 2, the estimator v' A_n v of ln det(I + J) has

    bias        tr A_n - ln det(I + J)
    variance    2 (||S||^2 - sum_i S_ii^2) for Rademacher probes, 2 ||S||^2 for Gaussian ones (Frobenius norms),

so nothing is sampled. Blocks draw independent probes, so biases add up, and so do variances.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..data import Dataset
from ..logdet import Estimator, Exact, Jacobian, truncation_bound
from ..model import Model
from ..spelling import at_least
from ..transform import check_eval
from ..transforms.dequantisation import dequantise_for
from .chunks import memory_factor
from .density import check_mean
from .roles import as_flow

#: The most entries of Jacobians in memory on a machine with little of it.
ENTRIES = 1 << 22


@dataclass(frozen=True)
class Truncation:
    """The errors of a series with n = 1, 2, ... terms and one probe per block, in bits per dimension.

    `bias` is the mean of the bias over samples, `bias_spread` its standard deviation, `largest_bias` its largest
    magnitude; `deviation` is the standard deviation of the estimate for one sample with Rademacher probes, and
    `gaussian_deviation` with Gaussian ones, root mean square over samples; `bound` is Theorem 3's bound of the bias.
    """

    rows: int
    dimension: int
    blocks: int
    terms: tuple[int, ...]
    bias: tuple[float, ...]
    bias_spread: tuple[float, ...]
    largest_bias: tuple[float, ...]
    deviation: tuple[float, ...]
    gaussian_deviation: tuple[float, ...]
    bound: tuple[float, ...]

    def first_below(self, limit: float) -> int | None:
        """Return the number of terms from which the mean bias stays below a limit; None if it never does."""
        first = None
        for n, b in zip(reversed(self.terms), reversed(self.bias), strict=True):
            if abs(b) >= limit:
                break
            first = n
        return first


class _DenseEstimator(Estimator):
    """Exact determinants that also sum the bias and the variances of series with up to `terms` terms over blocks."""

    needs_lipschitz: ClassVar[bool] = True

    def __init__(self, terms: int) -> None:
        self.terms, self.blocks = terms, 0
        self.sums: Tensor | None = None  # (bias, Rademacher variance, Gaussian variance) by terms and samples
        self.bounds = [0.0] * terms

    def estimate(
        self, jacobian: Jacobian, x: Tensor, lipschitz: float | None, generator: torch.Generator | None
    ) -> Tensor:
        assert lipschitz is not None  # guaranteed by needs_lipschitz
        j = jacobian.matrix(x).double()  # series and determinant share its rounding
        logdet = Exact()(_known_jacobian(j), x)
        moments = torch.stack([_moments(a, logdet) for a in _partial_sums(j, self.terms)], dim=1)
        self.sums = moments if self.sums is None else self.sums + moments
        d = j.shape[-1]
        self.bounds = [b + truncation_bound(lipschitz, d, n + 1) for n, b in enumerate(self.bounds)]
        self.blocks += 1
        return logdet.to(x.dtype)


def _known_jacobian(j: Tensor) -> Jacobian:
    """A Jacobian whose dense matrices are already computed."""
    known = Jacobian(lambda v: v)
    known.matrix = lambda x: j  # type: ignore[method-assign]
    return known


def _partial_sums(j: Tensor, terms: int) -> Iterator[Tensor]:
    """Iterate over A_1 ... A_terms."""
    power = total = j
    yield total
    for k in range(2, terms + 1):
        power = power @ j
        total = total + (-1) ** (k + 1) / k * power
        yield total


def _moments(a: Tensor, logdet: Tensor) -> Tensor:
    """(bias, Rademacher variance, Gaussian variance) of every sample, shape (3, samples)."""
    s, diagonal = (a + a.mT) / 2, a.diagonal(dim1=-2, dim2=-1)
    square, own = s.square().sum((-2, -1)), diagonal.square().sum(-1)
    return torch.stack([diagonal.sum(-1) - logdet, 2 * (square - own).clamp_min(0), 2 * square])


@torch.no_grad()
def truncation(model: Model, data: Dataset, *, terms: int = 20, seed: int = 0) -> Truncation:
    """Compute the bias and the standard deviation of series with 1 to `terms` terms, against exact determinants.

    It needs a dense d x d Jacobian for every sample and block: feasible for hundreds of dimensions, not for thousands.
    Jacobians are computed in the precision of the model, their powers and determinants in float64.
    """
    at_least(1, terms=terms)
    check_mean(data)
    check_eval(model, "a likelihood")
    flow, d = copy.deepcopy(as_flow(model)), data.schema.dimension
    generator = torch.Generator(data.x.device).manual_seed(seed)
    parts = []
    dense = _DenseEstimator(terms)
    for x in torch.split(data.x, max(1, ENTRIES * memory_factor(data.x.device) // d**2)):
        dense = _DenseEstimator(terms)
        flow.log_prob(dequantise_for(flow, x, data.schema.levels, generator)[0], estimator=dense)
        if dense.sums is None:
            raise ValueError("a power series needs residual blocks; this model has none.")
        parts.append(dense.sums)
    return _summary(torch.cat(parts, dim=2), dense, d)


def _summary(sums: Tensor, dense: _DenseEstimator, d: int) -> Truncation:
    bit = d * math.log(2)
    bias, rademacher, gaussian = sums
    return Truncation(
        rows=bias.shape[1],
        dimension=d,
        blocks=dense.blocks,
        terms=tuple(range(1, dense.terms + 1)),
        bias=_as_tuple(bias.mean(1) / bit),
        bias_spread=_as_tuple(bias.std(1) / bit),
        largest_bias=_as_tuple(bias.abs().amax(1) / bit),
        deviation=_as_tuple(rademacher.mean(1).sqrt() / bit),
        gaussian_deviation=_as_tuple(gaussian.mean(1).sqrt() / bit),
        bound=tuple(b / bit for b in dense.bounds),
    )


def _as_tuple(values: Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())
