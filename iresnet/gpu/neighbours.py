"""im2col and its transpose, for k x k convolutions as matrix products: gather each pixel's neighbours, or sum them.

Images are matrices, as in `maps`: rows are pixels, columns are channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Size = tuple[int, ...]


def gather_neighbours(a: Tensor, size: Size, k: int, back: bool, dtype: torch.dtype) -> Tensor:
    """Gather each row with its k x k neighbours, in `dtype`; `back`: neighbours in reverse order, channels first.

    The columns are (place, channel), or (channel, place) with `back`: the memory order of the weights.
    """
    half, c = k // 2, a.shape[1]
    x = F.pad(a.to(dtype).view(-1, *size, c), (0, 0, half, half, half, half))
    windows = x.unfold(1, k, 1).unfold(2, k, 1)  # (image, row, column, channel, place, place)
    windows = windows.flip(-2, -1) if back else windows.permute(0, 1, 2, 4, 5, 3)
    return F.pad(windows.reshape(-1, c * k * k), (0, round_up_to_eight(c * k * k) - c * k * k))


def sum_neighbours(z: Tensor, size: Size, k: int, back: bool, channels: int) -> Tensor:
    """The transpose of `gather_neighbours` with the other `back`, in float32: sums over the k x k neighbours."""
    half, (height, width) = k // 2, size
    z = z[:, : channels * k * k].float().view(-1, height, width, channels * k * k)
    z = F.pad(z, (0, 0, half, half, half, half))
    total = torch.zeros((), device=z.device)
    for i in range(k):
        for j in range(k):
            up, left, place = (k - 1 - i, k - 1 - j, i * k + j) if back else (i, j, i * k + j)
            at = slice(place * channels, (place + 1) * channels) if back else slice(place, None, k * k)
            total = total + z[:, up : up + height, left : left + width, at]
    return total.reshape(-1, channels)


def sum_neighbours_then(function: Callable[..., Any], arguments: tuple[Any, ...], *more: Any) -> Any:
    """Return `function(sum_neighbours(*arguments), *more)`, to be compiled as one function."""
    return function(sum_neighbours(*arguments), *more)


def round_up_to_eight(columns: int) -> int:
    """Round up to a multiple of eight: half-precision products are slow for other sizes."""
    return -(-columns // 8) * 8
