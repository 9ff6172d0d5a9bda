"""How many rows pass through a model at a time: so many as memory allows, and on a CPU residual blocks fewer.

A convolution lays out what it sees beside every position: channels times kernel times positions, for every row. glibc
returns blocks of more than 32 MiB to the system when they are free, which hands out the next one page by page, each
cleared first, which can take longer than the convolution. With fewer rows at a time the same block is used
again and again, and stays nearer to the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..precision import full_precision
from ..residual import ResidualBlock

#: What a layer may take, in bytes.
REUSED = 32 * 2**20


def in_chunks(way: Callable[[Tensor], Tensor], x: Tensor, size: int) -> Tensor:
    """What a way through a model makes of rows or codes, so many at a time, in full precision."""
    with full_precision(x):
        return torch.cat([way(part) for part in torch.split(x, size)])


def chunk_size(model: nn.Module, x: Tensor, most: int) -> int:
    """So many of the rows or codes `x` at a time, at least 1: `most` on a GPU, and where layers are small."""
    size, dimension = next((p.element_size() for p in model.parameters()), x.element_size()), math.prod(x.shape[1:])
    largest = max((_largest(m, dimension) for m in model.modules() if isinstance(m, ResidualBlock)), default=0)
    return most if x.is_cuda or not largest else max(1, min(most, REUSED // (largest * size)))


def _largest(block: ResidualBlock, dimension: int) -> int:
    """The numbers that the largest convolution of a block lays out for one row; 0 where it has none."""
    layers = [m for m in block.modules() if isinstance(m, nn.Conv2d)]
    if not layers:
        return 0
    positions = dimension // layers[0].in_channels  # about: more where the model adds channels, fewer where some leave
    return positions * max(m.in_channels * math.prod(m.kernel_size) for m in layers)
