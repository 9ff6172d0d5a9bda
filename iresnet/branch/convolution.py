"""Ways where the library's own are slow on a GPU: in float64 as matrix products, which reach its tensor cores.

gathered    the patches of the image side by side, one product
banded      the rows of every patch side by side, one product for every row of the kernel: a third of the copying
shifted     one product for every place of the kernel, on the padded grid, nothing copied
native      the library's own
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import timing
from ..spectral import Geometry
from .program import Program, Step, StepFunction, apply_step


def im2col(step: Step, x: Tensor, values: list[Tensor]) -> Tensor:
    """Patches of a channels-last image side by side, then one matrix product: what float64 tensor cores take."""
    weight, (n, _, _, _) = values[0], x.shape
    out, channels, a, b = weight.shape
    patches = _pad(x, step).unfold(1, a, 1).unfold(2, b, 1)  # (n, h, w, channels, a, b)
    h, w = patches.shape[1:3]
    rows = patches.permute(0, 1, 2, 4, 5, 3).reshape(n * h * w, a * b * channels)
    y = _affine(rows, weight.permute(2, 3, 1, 0).reshape(-1, out), values)
    return y.view(n, h, w, out).permute(0, 3, 1, 2)


def im2col_by_row(step: Step, x: Tensor, values: list[Tensor]) -> Tensor:
    """Side by side only what lies in one row of a patch; one product for every row of the kernel, added up."""
    weight, padded = values[0], _pad(x, step)
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


def shift_and_add(step: Step, x: Tensor, values: list[Tensor]) -> Tensor:
    """One product for every place of the kernel, added up: on the padded grid a shift is an offset, nothing is copied.

    Rows at the seams of the grid mix both sides; they are computed and left out.
    """
    weight, padded = values[0], _pad(x, step)
    out, channels, a, b = weight.shape
    n, height, width, _ = padded.shape
    rows, matrices = padded.reshape(-1, channels), weight.permute(2, 3, 1, 0).contiguous()
    used = len(rows) - (a - 1) * width - (b - 1)
    y = rows.new_empty(len(rows), out)
    first = y[:used]
    first.copy_(_affine(rows[:used], matrices[0, 0], values))
    for i in range(a):
        for j in range(b):
            if i or j:
                offset = i * width + j
                first.addmm_(rows[offset : offset + used], matrices[i, j])
    return y.view(n, height, width, out)[:, : height - a + 1, : width - b + 1].permute(0, 3, 1, 2)


def native(step: Step, x: Tensor, values: list[Tensor]) -> Tensor:
    """The library's own convolution."""
    return apply_step(step, [x], values)


def _pad(x: Tensor, step: Step) -> Tensor:
    """A channels-last copy (n, height, width, channels) with the zero padding of the convolution."""
    p, q = cast(Geometry, step.geometry).before
    if not (p or q):
        return x.permute(0, 2, 3, 1)
    return F.pad(x.permute(0, 2, 3, 1), (0, 0, q, q, p, p))


def _affine(rows: Tensor, matrix: Tensor, values: list[Tensor]) -> Tensor:
    return torch.addmm(values[1], rows, matrix) if len(values) == 2 else rows @ matrix


CONVOLUTIONS: dict[str, StepFunction] = {
    "native": native, "gathered": im2col, "banded": im2col_by_row, "shifted": shift_and_add
}  # fmt: skip


def is_simple(step: Step) -> bool:
    """Whether every way of `CONVOLUTIONS` knows this convolution: two axes, plain, no stride, dilation or groups."""
    g = step.geometry
    if g is None or step.kind != "conv" or not step.is_plain:
        return False
    return g.axes == 2 and g.groups == 1 and {*g.stride, *g.dilation} == {1}


def fastest_convolution(step: Step, x: Tensor, values: list[Tensor]) -> StepFunction:
    """The way that takes the least time for this input, measured; not one for which memory does not suffice."""
    what = f"{x.dtype}, images {tuple(x.shape)}, weight {tuple(values[0].shape)}"

    def call(name: str) -> Tensor:
        return CONVOLUTIONS[name](step, x, values)

    return CONVOLUTIONS[timing.fastest(what, [*CONVOLUTIONS], call, repeats=3, graph=x.is_cuda)]


def pack_weight(weight: Tensor) -> Tensor:
    """The weight of a convolution in the memory order that its matrix products want, so that no call copies it."""
    return weight.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)


def pack_weights(program: Program, values: Sequence[Tensor], functions: Sequence[StepFunction]) -> list[Tensor]:
    """The tensors of a program, arranged for these ways."""
    found = list[Tensor]()
    for (_, _, own), function in zip(program.with_tensors(values), functions, strict=True):
        found += own if function is native else [pack_weight(own[0]), *own[1:]]
    return found


def cpu_convolution(step: Step, values: Sequence[Tensor]) -> StepFunction:
    """The way to take in float64 on a CPU. The library's own copies all patches of the input: too much where many
    channels become few."""
    if not is_simple(step) or values[0].shape[2:].numel() == 1:
        return native
    outputs, inputs = values[0].shape[:2]
    return im2col_by_row if inputs > outputs else native
