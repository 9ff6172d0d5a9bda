"""What changes when a network does: what was computed from it can be kept until then.

Layers are told by their description and constants, weights by numbers, however they were written: fused optimisers
leave version counters as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .constraint import SpectralCap


@torch.no_grad()
def mark_of(module: nn.Module) -> tuple[Any, ...]:
    """The mark of a network; equal marks mean the same function. Reads values back.

    >>> layer = nn.Linear(2, 2)
    >>> before = mark_of(layer)
    >>> _ = layer.weight.data.mul_(2)
    >>> before == mark_of(layer)
    False
    """
    tensors = [*module.parameters(), *module.buffers()]
    coefficients = [m.coefficient for m in module.modules() if isinstance(m, SpectralCap)]
    return repr(module), *coefficients, *((t.dtype, t.device) for t in tensors), *_sums(tensors)


def _sums(tensors: list[Tensor]) -> list[float]:
    """A weighted sum and the norm of all numbers of a kind; a weight for every place, so that an order counts."""
    kinds = dict[Any, list[Tensor]]()
    for t in tensors:
        kinds.setdefault((t.dtype, t.device), []).append(t.detach().flatten())
    sums = list[Tensor]()
    for flat in kinds.values():
        numbers = torch.cat(flat).double()
        places = torch.linspace(1, 2, len(numbers), dtype=numbers.dtype, device=numbers.device)
        sums += [numbers @ places, numbers.norm()]
    return torch.stack(sums).tolist() if len({s.device for s in sums}) == 1 else [float(s) for s in sums]
