"""Integers as points, and the units of likelihoods.

An integer k in 0 .. levels - 1 stands for the bin [k, k + 1), whose centre is k + 1/2. The likelihood of such data is
given in bits per dimension, -log2 p / d; that of real numbers in nats, -ln p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def bin_centres(x: Tensor, levels: int | None) -> Tensor:
    """Return integers at the centres of their bins, as a model takes them; the numbers of a table are there already."""
    return x if levels is None else x.to(torch.get_default_dtype()) + 0.5


def nats_per_bit_per_dim(shape: Sequence[int]) -> float:
    """Return how many nats are one bit per dimension, for samples of this shape."""
    return math.prod(shape) * math.log(2)


def nats_per_unit(shape: Sequence[int], levels: int | None) -> float:
    """Return how many nats are one unit of `unit_name`, for samples of this shape.

    >>> nats_per_unit((3, 32, 32), levels=None)
    1.0
    """
    return 1.0 if levels is None else nats_per_bit_per_dim(shape)


def unit_name(levels: int | None) -> str:
    """Return the unit of a negative log-likelihood: bits/dim for integers, nats for real numbers."""
    return "nats" if levels is None else "bits/dim"
