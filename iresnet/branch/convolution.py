"""Convolution in float64 by matrix products, which use the tensor cores of a GPU where torch's algorithm does not.

im2col            copy all patches, then one product
im2col_by_row     copy the rows of the patches, then one product per kernel row: a third of the copying
shift_and_add     one product per kernel element on the padded grid, without copies
native            torch's own convolution
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
    """Copy the patches of a channels-last image, then compute one matrix product."""
    weight, (n, _, _, _) = values[0], x.shape
    out, channels, a, b = weight.shape
    patches = _pad(x, step).unfold(1, a, 1).unfold(2, b, 1)  # (n, h, w, channels, a, b)
    h, w = patches.shape[1:3]
    rows = patches.permute(0, 1, 2, 4, 5, 3).reshape(n * h * w, a * b * channels)
    y = _affine(rows, weight.permute(2, 3, 1, 0).reshape(-1, out), values)
    return y.view(n, h, w, out).permute(0, 3, 1, 2)


def im2col_by_row(step: Step, x: Tensor, values: list[Tensor]) -> Tensor:
    """Copy the rows of the patches, then sum one product per kernel row."""
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
    """Sum one product per kernel element: on the padded grid a shift is an offset into memory, so nothing is copied.

    Positions at the edges of the grid mix both sides; they are computed and dropped.
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
    """Compute the convolution with torch."""
    return apply_step(step, [x], values)


def _pad(x: Tensor, step: Step) -> Tensor:
    """Return a zero-padded image as (n, height, width, channels)."""
    p, q = cast(Geometry, step.geometry).before
    if not (p or q):
        return x.permute(0, 2, 3, 1)
    return F.pad(x.permute(0, 2, 3, 1), (0, 0, q, q, p, p))


def _affine(rows: Tensor, matrix: Tensor, values: list[Tensor]) -> Tensor:
    return torch.addmm(values[1], rows, matrix) if len(values) == 2 else rows @ matrix


CONVOLUTIONS: dict[str, StepFunction] = {
    "native": native, "im2col": im2col, "im2col_by_row": im2col_by_row, "shift_and_add": shift_and_add
}  # fmt: skip


def is_simple(step: Step) -> bool:
    """Whether all `CONVOLUTIONS` support this one: two axes, symmetric padding, no stride, dilation or groups."""
    g = step.geometry
    if g is None or step.kind != "conv" or not step.is_plain:
        return False
    return g.axes == 2 and g.groups == 1 and {*g.stride, *g.dilation} == {1}


def fastest_convolution(step: Step, x: Tensor, values: list[Tensor]) -> StepFunction:
    """Return the fastest algorithm for this input, by measurement; one that runs out of memory is skipped."""
    what = f"{x.dtype}, images {tuple(x.shape)}, weight {tuple(values[0].shape)}"

    def call(name: str) -> Tensor:
        return CONVOLUTIONS[name](step, x, values)

    return CONVOLUTIONS[timing.fastest(what, [*CONVOLUTIONS], call, repeats=3, graph=x.is_cuda)]


def pack_weight(weight: Tensor) -> Tensor:
    """Return a weight in the memory layout of the matrix products, so that no call copies it."""
    return weight.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)


def pack_weights(program: Program, values: Sequence[Tensor], functions: Sequence[StepFunction]) -> list[Tensor]:
    """Return the tensors of a program with weights packed for `functions`."""
    packed = list[Tensor]()
    for (_, _, own), function in zip(program.with_tensors(values), functions, strict=True):
        packed += own if function is native else [pack_weight(own[0]), *own[1:]]
    return packed


def cpu_convolution(step: Step, values: Sequence[Tensor]) -> StepFunction:
    """Return the algorithm for float64 on a CPU: torch copies all patches, slow if many channels become few."""
    if not is_simple(step) or values[0].shape[2:].numel() == 1:
        return native
    outputs, inputs = values[0].shape[:2]
    return im2col_by_row if inputs > outputs else native
