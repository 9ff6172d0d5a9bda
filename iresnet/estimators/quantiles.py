"""Quantiles and distribution functions of a one-dimensional flow, from those of its base.

A flow of numbers is monotone: a residual block x + g(x) with Lip(g) < 1 is increasing, and other parts are monotone
too. So P(y <= t) = P(z <= F(t)), or 1 minus that if F decreases, and a quantile of y is the inverse of one of z.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..base import Base, DiagonalNormal, FullMixture, NormalMixture
from ..data import ColumnKind
from .rows import Array

#: Halvings of the interval that holds a quantile of a mixture: beyond the precision of float64.
HALVINGS = 80


def has_quantiles(base: Base) -> bool:
    """Whether the distribution function of a base is known here."""
    return base.shape == (1,) and isinstance(base, DiagonalNormal | NormalMixture | FullMixture)


def base_cdf(base: Base, z: Tensor) -> Tensor:
    """Return P(code <= z) under a base of one dimension.

    >>> base_cdf(DiagonalNormal(1), torch.zeros(2)).tolist()
    [0.5, 0.5]
    """
    weights, means, scales = _normals(base)
    below: Tensor = weights * torch.special.ndtr((z[..., None] - means) / scales)
    return below.sum(-1)


def base_quantile(base: Base, q: Tensor) -> Tensor:
    """Return the z with P(code <= z) = q, for q in (0, 1), by bisection; exactly for a single normal."""
    weights, means, scales = _normals(base)
    each: Tensor = means + scales * torch.special.ndtri(q)[..., None]
    low, high = each.amin(-1), each.amax(-1)  # a mixture's quantile lies between those of its components
    for _ in range(HALVINGS if len(weights) > 1 else 0):
        middle = (low + high) / 2
        below = base_cdf(base, middle) < q
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def value_below(kind: ColumnKind, y: Array) -> tuple[Array, Array]:
    """Return the largest value of a column that is at most y, and P(Y <= y) where a bound tells it, else NaN.

    Below the lower bound the value is that bound. Numbers are as precise as float32, as in `ColumnKind.contains`.

    >>> value_below(ColumnKind("integer", lower=0.0, step=1.0), np.array([-0.3, 2.5]))
    (array([0., 2.]), array([ 0., nan]))
    """
    if kind.categories:
        numbers = np.sort([float(name) for name in kind.categories])
        position = np.searchsorted(numbers, y, side="right") - 1
        values, below, above = numbers[position.clip(0)], position < 0, y >= numbers[-1]
    elif kind.name == "positive":
        values, below, above = np.maximum(y, np.finfo(np.float32).tiny), y <= 0, np.zeros_like(y, dtype=bool)
    else:
        lower = -np.inf if kind.lower is None else kind.lower
        upper = np.inf if kind.upper is None else kind.upper
        slack = max(abs(end) for end in (lower, upper, 0.0) if np.isfinite(end)) * 2.0**-22
        values = y
        if kind.step is not None:
            slack += 1e-3 * kind.step
            near = np.minimum(1e-3 + 1e-6 * np.abs(y / kind.step), 0.5)
            values = kind.step * np.floor(y / kind.step + near)
        values, below, above = values.clip(lower, upper), y < lower - slack, y >= upper - slack
    return values, np.where(below, 0.0, np.where(above, 1.0, np.nan))


def _normals(base: Base) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights, means and scales of the normals that a base of one dimension consists of."""
    if isinstance(base, FullMixture):
        return base.weight_logits.softmax(0), base.mean.flatten(), 1 / base.precision_factors.flatten()
    if isinstance(base, NormalMixture):
        return base.weight_logits.softmax(0), base.mean.flatten(), base.log_scale.exp().flatten()
    if isinstance(base, DiagonalNormal):
        return torch.ones_like(base.mean), base.mean, base.log_scale.exp()
    raise ValueError(f"no distribution function is known for a {type(base).__name__}.")
