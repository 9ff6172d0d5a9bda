"""What a power series with n terms is off by: its bias and standard deviation, from dense Jacobians (Figures 4 and 9).

With A_n = sum_{k<=n} (-1)^(k+1) J^k / k and S = (A_n + A_n') / 2, the estimator v' A_n v of ln det(I + J) has

    bias        tr A_n - ln det(I + J)
    variance    2 (||S||^2 - sum_i S_ii^2) for probes of signs, 2 ||S||^2 for Gaussian ones (Frobenius norms),

so that nothing is drawn and nothing is noise. Blocks draw their own probes: biases add up, and variances do.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..data import Dataset
from ..logdet import Estimator, Exact, Jacobian, truncation_bound
from ..spelling import at_least
from ..transforms.dequantisation import dequantise_for
from .likelihood import as_flow, check_eval, room

#: Entries of the Jacobians that are held at a time, where there is little memory.
ENTRIES = 1 << 22


@dataclass(frozen=True)
class Truncation:
    """For n = 1, 2, ... terms, one probe a block, in bits per dimension, over rows.

    `bias` is its mean and `bias_spread` its standard deviation over rows, `largest_bias` the largest size of it;
    `deviation` is the standard deviation of the estimate of one row with probes of signs, and `gaussian_deviation` with
    Gaussian ones, root mean square over rows; `bound` is what Theorem 3 proves of the bias.
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
        """The number of terms from which on the mean bias stays below a limit; None where it does not get there."""
        found = None
        for n, b in zip(reversed(self.terms), reversed(self.bias), strict=True):
            if abs(b) >= limit:
                break
            found = n
        return found


class _Dense(Estimator):
    """Exact determinants; on the way, the bias and the variances of series with up to `terms` terms are added up."""

    needs_lipschitz: ClassVar[bool] = True

    def __init__(self, terms: int) -> None:
        self.terms, self.blocks = terms, 0
        self.sums: Tensor | None = None  # (bias, variance with signs, variance with Gaussians) by terms and rows
        self.bounds = [0.0] * terms

    def estimate(
        self, jacobian: Jacobian, x: Tensor, lipschitz: float | None, generator: torch.Generator | None
    ) -> Tensor:
        assert lipschitz is not None  # asked for by needs_lipschitz
        j = jacobian.matrix(x).double()  # series and determinant are of one matrix: its own rounding is in both
        logdet = Exact()(_given(j), x)
        found = torch.stack([_moments(a, logdet) for a in _partial_sums(j, self.terms)], dim=1)
        self.sums = found if self.sums is None else self.sums + found
        d = j.shape[-1]
        self.bounds = [b + truncation_bound(lipschitz, d, n + 1) for n, b in enumerate(self.bounds)]
        self.blocks += 1
        return logdet.to(x.dtype)


def _given(j: Tensor) -> Jacobian:
    """A Jacobian whose dense matrices are known."""
    known = Jacobian(lambda v: v)
    known.matrix = lambda x: j  # type: ignore[method-assign]
    return known


def _partial_sums(j: Tensor, terms: int) -> Iterator[Tensor]:
    """A_1 ... A_terms."""
    power = total = j
    yield total
    for k in range(2, terms + 1):
        power = power @ j
        total = total + (-1) ** (k + 1) / k * power
        yield total


def _moments(a: Tensor, logdet: Tensor) -> Tensor:
    """(bias, variance with signs, variance with Gaussians) for every row, (3, rows)."""
    s, diagonal = (a + a.mT) / 2, a.diagonal(dim1=-2, dim2=-1)
    square, own = s.square().sum((-2, -1)), diagonal.square().sum(-1)
    return torch.stack([diagonal.sum(-1) - logdet, 2 * (square - own).clamp_min(0), 2 * square])


@torch.no_grad()
def truncation(model: nn.Module, data: Dataset, *, terms: int = 20, seed: int = 0) -> Truncation:
    """The bias and the standard deviation of series with 1 to `terms` terms on rows, against exact determinants.

    It takes dense Jacobians, d x d for every row and block: for hundreds of dimensions, not for thousands. They are
    those of the model in its own precision; powers and determinants of them are taken in float64.
    """
    at_least(1, terms=terms)
    if len(data) < 2:
        raise ValueError(f"a mean needs at least two rows, to know its spread; got {len(data)}.")
    check_eval(model)
    flow, d = copy.deepcopy(as_flow(model)), data.schema.dimension
    generator, parts, watch = torch.Generator(data.x.device).manual_seed(seed), [], _Dense(terms)
    for x in torch.split(data.x, max(1, ENTRIES * room(data.x.device) // d**2)):
        watch = _Dense(terms)
        flow.log_prob(dequantise_for(flow, x, data.schema.levels, generator)[0], estimator=watch)
        if watch.sums is None:
            raise ValueError("a series needs residual blocks; this model holds none.")
        parts.append(watch.sums)
    return _summary(torch.cat(parts, dim=2), watch, d)


def _summary(sums: Tensor, watch: _Dense, d: int) -> Truncation:
    bit = d * math.log(2)
    bias, signs, gaussian = sums
    return Truncation(
        rows=bias.shape[1],
        dimension=d,
        blocks=watch.blocks,
        terms=tuple(range(1, watch.terms + 1)),
        bias=_numbers(bias.mean(1) / bit),
        bias_spread=_numbers(bias.std(1) / bit),
        largest_bias=_numbers(bias.abs().amax(1) / bit),
        deviation=_numbers(signs.mean(1).sqrt() / bit),
        gaussian_deviation=_numbers(gaussian.mean(1).sqrt() / bit),
        bound=tuple(b / bit for b in watch.bounds),
    )


def _numbers(values: Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())
