"""Custom Triton kernels for the residual units of the paper's classifier, for which torch launches many small kernels.

With few channels, torch takes 10 to 20 microseconds for each convolution and each reduction of a unit (ActNorm and
block, as in `plan`), although its data pass through the cache in two. Here activations, biases and ActNorm are fused
into the convolutions, and all sums of the backward pass end in one kernel: three launches forward, four backward.
Triton is an optional package that comes with torch on CUDA.

language    Triton itself, ELU, sine, a convolution    forward, backward, weights    the kernels
launch      tile sizes and launches                    unit                          the differentiable function

For densities, `product` has matrix products fused with the operations after them, and `wide` the units built from them.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from ...branch import Program

__all__ = ["PRODUCT_TILES", "ProductTile", "advance", "counts", "is_ready", "multiplies", "product_times", "supported"]

#: Kernel sizes of the three convolutions.
SIZES = (3, 1, 3)


def supported(program: Program, x: Tensor, values: list[Tensor]) -> bool:
    """Whether `advance` supports this unit: on a GPU, ELU and 3 x 3, 1 x 1, 3 x 3 convolutions, 2^k >= 16 channels.

    `values` are as in `advance`: the weights in bfloat16, without the bias of the last convolution.
    """
    fits = x.is_cuda and x.dtype == torch.float32 and x.dim() == 4 and _installed() and _is_new(x.device)
    return fits and is_unit(program) and _have_sizes(values, x.shape[1])


def is_unit(program: Program) -> bool:
    """Whether the steps are ELU, conv, ELU, conv, ELU, conv, all of which keep the image size."""
    activations, convolutions = program.steps[::2], program.steps[1::2]
    if not program.is_chain or [step.kind for step in convolutions] != ["conv"] * 3 or len(activations) != 3:
        return False
    counts = [step.tensors for step in convolutions[:2]]
    return (
        all(step.kernel == 0 for step in activations) and counts == [2, 2] and all(map(_is_plain, convolutions, SIZES))
    )


def advance(
    x: Tensor, y: Tensor, bias: Tensor | None, norm: tuple[Tensor, Tensor] | None, values: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """The next (x, y): x <- (x + y + bias + shift) exp(log_scale) in float32, y <- g(x) without its last bias."""
    from .unit import UnitFunction

    shift, log_scale = (None, None) if norm is None else norm
    out: tuple[Tensor, Tensor] = UnitFunction.apply(x, y, bias, shift, log_scale, *values)  # type: ignore[no-untyped-call]
    return out


class ProductTile(NamedTuple):
    """Tile sizes of `product.times`: rows, columns and depth of a tile, warps, stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


#: Only a few, since each is compiled in order to be measured.
PRODUCT_TILES = (ProductTile(128, 128, 64, 4, 3), ProductTile(64, 128, 64, 4, 4))


def multiplies(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, tile: ProductTile) -> bool:
    """Whether `product_times` supports a matrix b of this shape with these tiles: bfloat16, on a GPU."""
    return is_ready(dtype, device) and shape[1] % tile.columns == 0 and shape[0] % 8 == 0


def counts(rows: int, columns: int) -> bool:
    """Whether the kernels of `product` can index the entries of such a matrix with 32 bits."""
    return rows * columns < 2**31


def is_ready(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels of `product` support matrices of this dtype on this device."""
    return device.type == "cuda" and dtype == torch.bfloat16 and _installed() and _is_new(device)


def product_times(a: Tensor, b: Tensor, d: Tensor, tile: ProductTile, *, activated: bool = False) -> Tensor:
    """Return (a b) times d, entry by entry, the rows of d repeating; `activated`: times ELU's slope at its output d."""
    from .product import times

    a, b, d = a.contiguous(), b.contiguous(), d.contiguous()
    (rows, depth), columns = a.shape, b.shape[1]
    out = a.new_empty(rows, columns)
    times[(-(-rows // tile.rows) * (columns // tile.columns),)](
        a, b, d, out, rows, len(d), K=depth, N=columns, BM=tile.rows, BN=tile.columns, BK=tile.depth,
        STAGES=tile.stages, ACTIVATED=activated, num_warps=tile.warps)  # fmt: skip
    return out


def _is_plain(step: object, size: int) -> bool:
    g = getattr(step, "geometry", None)
    half = (size // 2, size // 2)
    return g is not None and (g.stride, g.before, g.dilation, g.groups) == ((1, 1), half, (1, 1), 1)


def _have_sizes(values: list[Tensor], channels: int) -> bool:
    shapes = [(channels, channels, size, size) for size in SIZES]
    power = channels >= 16 and channels & (channels - 1) == 0
    kernels = values[::2]
    return power and [tuple(w.shape) for w in kernels] == shapes and all(w.dtype == torch.bfloat16 for w in kernels)


@cache
def _is_new(device: torch.device) -> bool:
    """Whether a GPU is of the generation that the tiles were tuned for; older ones have less shared memory."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
