"""Random numbers that are a function of a seed, drawn on the CPU, so that they do not depend on the device."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from ..spelling import quoted


def seeded_generator(seed: int, *key: int | str) -> torch.Generator:
    """Create a generator for one purpose: different seeds or keys give independent random numbers."""
    digest = hashlib.sha256(repr((int(seed), *key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


def check_seed(seed: int) -> int:
    """Return the seed if torch accepts it."""
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must fit 64 bits; got {quoted(seed)}.")
    return seed


def weighted_indices(weights: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Draw n indices by systematic sampling: index i occurs n w_i / sum(w) times on average, rounded up or down.

    >>> weighted_indices(torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64), 6, torch.Generator()).tolist()
    [0, 0, 2, 2, 2, 2]
    """
    total = weights.cumsum(0)
    start = torch.rand((), generator=generator, dtype=torch.float64)
    places = (torch.arange(n) + start) * (total[-1] / n)
    last = int(weights.nonzero()[-1])  # rounding may put the last place at the very end
    return torch.searchsorted(total, places, right=True).clamp(max=last)
