"""ln det(I + J) with the factors of its gradient, from one `DualPass` of g.

The gradient of every estimator has the form d ln det = sum_p s_p' dJ v_p, with s and v held fixed:

    exact       v_p = e_p, the unit vectors; s_p = the columns of (I + J)^-T
    series      v = the probe; s = sum_k c_(k+1) (J')^k v, and the value is sum_k a_(k+1) ((J')^k v)' (J v)

with the weights a and c of `logdet`. A sample needs only its own number of terms: samples are sorted by it, so that the
products shrink, and the last few samples of a long series use their dense Jacobian. In up to `TINY` dimensions all of
them do, with e_p for v, as for the exact determinant: s' dJ v = sum_p v_p s' dJ e_p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..logdet import SeriesDraw, exact_logdet, exact_logdet_and_inverse
from .explicit import DualPass

#: Up to this dimension a series is computed from the dense Jacobian, which costs no more than a few terms.
TINY = 3

#: Samples are dropped from a series in groups of this size until few are left: large products have few shapes, each of
#: which takes time to prepare.
_GROUP, _FEW = 64, 160

#: How many powers of a dense J' are computed at once, and the most tangents for dense Jacobians.
_BLOCK, _TANGENTS = 8, 4096

#: Costs in units of one row of a product with J' by layers: that of calling such a product, that of all calls with
#: dense Jacobians, and how many multiplications of small matrices one unit is worth.
_CALL, _DENSE_CALLS, _DENSE_FLOPS = 100, 350, 1500


def exact_factors(dual: DualPass, *, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Return ln det of every sample and s, (d, batch, d), from a pass with unit vectors as tangents."""
    j = dual.jv.permute(1, 2, 0)
    if not gradient:
        return exact_logdet(j), None
    logdet, inverse = exact_logdet_and_inverse(j)
    return logdet, inverse.transpose(0, 1)


def tiny_series_factors(dual: DualPass, draw: SeriesDraw) -> tuple[Tensor, Tensor]:
    """Return the value of a series and s_p = v_p s, (d, batch, d), from a pass with unit vectors as tangents."""
    m, v = dual.jv.transpose(1, 2).contiguous(), draw.v.t().contiguous()  # J', (d, d, batch), and (d, batch)
    states = _tiny_powers(m, v, len(draw.value))
    r, s = ((weights[:, None] * states).sum(0) for weights in (draw.value, draw.gradient))
    return (r * (m * v[:, None]).sum(0)).sum(0), v[:, :, None] * s.t()


def _tiny_powers(m: Tensor, w: Tensor, terms: int) -> Tensor:
    """Return w, J' w, ..., (terms, d, batch), from J', (d, d, batch): in blocks of `_BLOCK` powers."""
    found = w[None]
    while len(found) < min(terms, _BLOCK):
        found = torch.cat([found, (m * found[:, None]).sum(2)])
        m = (m[:, :, None] * m).sum(1)
    blocks = [found]
    while len(blocks) * len(found) < terms:
        blocks.append((m * blocks[-1][:, None]).sum(2))
    return torch.cat(blocks)[:terms]


def series_factors(dual: DualPass, draw: SeriesDraw, jv: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value of a series and s, each per sample; `jv` is J v, of a pass with the probe v as tangent."""
    needed, order = _plan_samples(draw)
    rows = [n if n < _FEW else min(len(order), -(-n // _GROUP) * _GROUP) for n in needed]
    # All samples that have a term share its weights. The sum r is that whose product with J v is the value.
    value, gradient = draw.value[:, order[0]].tolist(), draw.gradient[:, order[0]].tolist()
    w, switch, product = draw.v[order], _dense_from(rows, draw.v.shape[1]), dual.select(order)
    s, r = gradient[0] * w, value[0] * w
    for k in range(1, switch):
        w, n = product(w[: rows[k]]), needed[k]
        s[:n].add_(w[:n], alpha=gradient[k])
        r[:n].add_(w[:n], alpha=value[k])
    if switch < len(rows):
        n = needed[switch]
        states = _powers(dual.jacobian(order[:n]), w[:n], len(rows) - switch)
        weights = torch.stack([draw.gradient, draw.value], 2).expand(-1, len(order), -1)[switch:, order[:n]]
        tail = torch.bmm(states, weights.transpose(0, 1))
        s[:n].add_(tail[:, :, 0])
        r[:n].add_(tail[:, :, 1])
    s, r = (torch.empty_like(t).index_copy_(0, order, t) for t in (s, r))
    return (r * jv).sum(1), s


def _powers(jacobian: Tensor, w: Tensor, terms: int) -> Tensor:
    """Return J' w, (J')^2 w, ..., (samples, d, terms), from J', (samples, d, d): in blocks of `_BLOCK` powers."""
    found, power = torch.bmm(jacobian, w[:, :, None]), jacobian
    while found.shape[2] < min(terms, _BLOCK):
        found = torch.cat([found, torch.bmm(power, found)], 2)
        power = torch.bmm(power, power)
    blocks = [found]
    while len(blocks) * found.shape[2] < terms:
        blocks.append(torch.bmm(power, blocks[-1]))
    return torch.cat(blocks, 2)[:, :, :terms]


def _plan_samples(draw: SeriesDraw) -> tuple[list[int], Tensor]:
    """Return how many samples each term is needed for, and the samples in descending order of their number of terms."""
    if draw.gradient.shape[1] == 1:
        return [len(draw.v)] * len(draw.gradient), torch.arange(len(draw.v), device=draw.v.device)
    needed = draw.gradient != 0
    return needed.sum(1).tolist(), needed.sum(0).argsort(descending=True)


def _dense_from(rows: Sequence[int], d: int) -> int:
    """Return the term from which to use dense Jacobians so that the series costs least; len(rows) for never."""
    costs, before = [math.inf], 0.0
    for k in range(1, len(rows)):
        dense = rows[k] * (1.2 * d + d * d * (3 * d + len(rows) - k) / _DENSE_FLOPS) + _DENSE_CALLS
        costs.append(before + dense if rows[k] * d <= _TANGENTS else math.inf)
        before += rows[k] + _CALL
    costs.append(before)
    return costs.index(min(costs)) if len(rows) > 1 else 1
