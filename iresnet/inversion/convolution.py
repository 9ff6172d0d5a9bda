"""Convolutions where the library's own are slow on a GPU: in float64 as matrix products, which reach its tensor cores.

gathered    the patches of the image side by side, one product
banded      the rows of every patch side by side, one product for every row of the kernel: a third of the copying
shifted     one product for every place of the kernel, on the padded grid, nothing copied
native      the library's own
split       float32 as the sum of two numbers of eleven bits, three products of such numbers in one, on tensor cores
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..lipschitz.program import Step, apply
from ..precision import float32_products
from ..spectral import Geometry

#: (step, x, its tensors) -> y: a way to compute a step.
Convolution: TypeAlias = Callable[[Step, Tensor, list[Tensor]], Tensor]


def gathered(step: Step, x: Tensor, values: list[Tensor]) -> Tensor:
    """Patches of a channels-last image side by side, then one matrix product: what float64 tensor cores take."""
    weight, (n, _, _, _) = values[0], x.shape
    out, channels, a, b = weight.shape
    patches = _padded(x, step).unfold(1, a, 1).unfold(2, b, 1)  # (n, h, w, channels, a, b)
    h, w = patches.shape[1:3]
    rows = patches.permute(0, 1, 2, 4, 5, 3).reshape(n * h * w, a * b * channels)
    y = _times(rows, weight.permute(2, 3, 1, 0).reshape(-1, out), values)
    return y.view(n, h, w, out).permute(0, 3, 1, 2)


def banded(step: Step, x: Tensor, values: list[Tensor]) -> Tensor:
    """Side by side only what lies in one row of a patch; one product for every row of the kernel, added up."""
    weight, padded = values[0], _padded(x, step)
    out, channels, a, b = weight.shape
    rows = padded.unfold(2, b, 1).permute(0, 1, 2, 4, 3)  # (n, height, w, b, channels)
    n, height, w = rows.shape[:3]
    h = height - a + 1
    rows, matrices = rows.reshape(n, height * w, b * channels), weight.permute(2, 3, 1, 0).reshape(a, -1, out)
    y = values[1] if len(values) == 2 else None
    for i in range(a):
        band, matrix = rows[:, i * w : (i + h) * w], matrices[i].expand(n, -1, -1)
        y = torch.bmm(band, matrix) if y is None else torch.baddbmm(y, band, matrix)
    return cast(Tensor, y).view(n, h, w, out).permute(0, 3, 1, 2)


def shifted(step: Step, x: Tensor, values: list[Tensor]) -> Tensor:
    """One product for every place of the kernel, added up: on the padded grid a shift is an offset, nothing is copied.

    Rows at the seams of the grid mix both sides; they are computed and left out.
    """
    weight, padded = values[0], _padded(x, step)
    out, channels, a, b = weight.shape
    n, height, width, _ = padded.shape
    rows, matrices = padded.reshape(-1, channels), weight.permute(2, 3, 1, 0).contiguous()
    used = len(rows) - (a - 1) * width - (b - 1)
    y = rows.new_empty(len(rows), out)
    first = y[:used]
    first.copy_(_times(rows[:used], matrices[0, 0], values))
    for i in range(a):
        for j in range(b):
            if i or j:
                offset = i * width + j
                first.addmm_(rows[offset : offset + used], matrices[i, j])
    return y.view(n, height, width, out)[:, : height - a + 1, : width - b + 1].permute(0, 3, 1, 2)


def native(step: Step, x: Tensor, values: list[Tensor]) -> Tensor:
    """The library's own convolution."""
    return apply(step, x, values)


def _padded(x: Tensor, step: Step) -> Tensor:
    """A channels-last copy (n, height, width, channels) with the zero padding of the convolution."""
    p, q = cast(Geometry, step.geometry).before
    if not (p or q):
        return x.permute(0, 2, 3, 1)
    return F.pad(x.permute(0, 2, 3, 1), (0, 0, q, q, p, p))


def _times(rows: Tensor, matrix: Tensor, values: list[Tensor]) -> Tensor:
    return torch.addmm(values[1], rows, matrix) if len(values) == 2 else rows @ matrix


def split(step: Step, x: Tensor, values: list[Tensor]) -> Tensor:
    """(a + b) (A + B) = a A + b A + a B, but for a part of about 2^-21 or less, for a weight from `parted`.

    Good enough for a residual that is only a step towards another, and nothing that a proof may count on.
    """
    upper = _upper(x)
    with float32_products("tf32", x.device):
        return apply(step, torch.cat([upper, x - upper, upper], dim=1), values)


def parted(weight: Tensor) -> Tensor:
    """The weight that `split` takes."""
    upper = _upper(weight)
    return torch.cat([upper, upper, weight - upper], dim=1)


def _upper(x: Tensor) -> Tensor:
    """float32 rounded to the eleven bits that tensor cores take, ten of which are stored."""
    return ((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


CONVOLUTIONS: dict[str, Convolution] = {
    "native": native, "gathered": gathered, "banded": banded, "shifted": shifted
}  # fmt: skip


def is_simple(step: Step) -> bool:
    """Whether every way of `CONVOLUTIONS` knows this convolution: two axes, no stride, dilation or groups."""
    g = step.geometry
    return g is not None and g.axes == 2 and g.groups == 1 and {*g.stride, *g.dilation} == {1}


def can_split(step: Step) -> bool:
    """Whether `split` knows a step: linear layers, and convolutions that mix all channels."""
    return step.kind == "linear" or (step.geometry is not None and step.geometry.groups == 1)


def fastest(step: Step, x: Tensor, values: list[Tensor], repeats: int = 3) -> Convolution:
    """The way that takes least time for this input, measured; one for which memory does not suffice takes forever."""
    times = {}
    for name, way in CONVOLUTIONS.items():
        try:
            times[name] = _time(way, step, x, values, repeats)
        except torch.cuda.OutOfMemoryError:
            times[name] = math.inf
    return CONVOLUTIONS[min(times, key=times.__getitem__)]


def _time(way: Convolution, step: Step, x: Tensor, values: list[Tensor], repeats: int) -> float:
    way(step, x, values)
    _wait(x)
    start = time.perf_counter()
    for _ in range(repeats):
        way(step, x, values)
    _wait(x)
    return time.perf_counter() - start


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def arranged(weight: Tensor) -> Tensor:
    """The weight of a convolution in the memory order that its matrix products want, so that no call copies it."""
    return weight.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
