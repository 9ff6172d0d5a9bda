"""ln det(I + J) with the factors of its gradient, from one `DualPass` of g.

The gradient of every estimator has the form d ln det = sum_p s_p' dJ v_p, with s and v held fixed:

    exact       v_p = e_p, the unit vectors; s_p = the columns of (I + J)^-T
    series      v = the probe; s = sum_k c_(k+1) (J')^k v, and the value is sum_k a_(k+1) ((J')^k v)' (J v)

with the weights a and c of `logdet`. A sample needs only its own number of terms: samples are sorted by it, so that the
products shrink. The last few samples of a long series, and all of them in low dimension, use their dense Jacobian.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..logdet import SeriesDraw, exact_logdet, exact_logdet_and_inverse
from .explicit import DualPass

#: Samples are dropped from a series in groups of this size, so that products have few different shapes.
_GROUP = 64

#: The costs of one product with J' beyond its rows, by layers and with a dense J, in rows of a product by layers.
_CALL, _DENSE_CALL = 150, 40


def exact_factors(dual: DualPass, *, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Return ln det of every sample and s, (d, batch, d), from a pass with unit vectors as tangents."""
    j = dual.jv.permute(1, 2, 0)
    if not gradient:
        return exact_logdet(j), None
    logdet, inverse = exact_logdet_and_inverse(j)
    return logdet, inverse.transpose(0, 1)


def series_factors(dual: DualPass, draw: SeriesDraw, jv: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value of a series and s, each per sample; `jv` is J v."""
    rows, order = _plan_rows(draw, len(draw.v))
    value, gradient = draw.value.expand(-1, len(order))[:, order], draw.gradient.expand(-1, len(order))[:, order]
    w, switch = draw.v[order], _dense_from(rows, draw.v.shape[1])
    s, r, product = gradient[0, :, None] * w, value[0, :, None] * w, dual.select(order)
    for k in range(1, len(rows)):
        n = rows[k]
        if k == switch:
            dense = dual.jacobian(order[:n])
        w = product(w[:n]) if k < switch else (dense[:n] * w[:n, None]).sum(2)
        s[:n].addcmul_(gradient[k, :n, None], w)
        r[:n].addcmul_(value[k, :n, None], w)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return (r[back] * jv).sum(1), s[back]


def _plan_rows(draw: SeriesDraw, batch: int) -> tuple[list[int], Tensor]:
    """Return how many samples each term is computed for, and the samples in the order of their number of terms."""
    device = draw.v.device
    if draw.gradient.shape[1] == 1:
        return [batch] * len(draw.gradient), torch.arange(batch, device=device)
    counts = (draw.gradient != 0).sum(0)
    needed = (draw.gradient != 0).sum(1).tolist()
    return [min(batch, -(-n // _GROUP) * _GROUP) for n in needed], counts.argsort(descending=True, stable=True)


def _dense_from(rows: Sequence[int], d: int) -> int:
    """Return the first term from which dense Jacobians cost less than products by layers; len(rows) if none."""
    remaining, terms = 0, 0
    for k in reversed(range(1, len(rows))):
        remaining, terms = remaining + rows[k], terms + 1
        by_layers = remaining + _CALL * terms
        dense = 0.6 * d * rows[k] + d / 64 * remaining + _DENSE_CALL * terms
        if dense > by_layers:
            return k + 1
    return 1
