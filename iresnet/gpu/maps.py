"""The linear maps of g, on matrices: rows are the pixels of a batch, columns the channels, contiguous in memory.

Each has a map W, its transpose and the gradient of its weight, dW = sum over pixels of (gradient of the output)
(input)'. There are several implementations; `choose_map` returns the fastest on this device:

    Dense         a linear layer or a 1 x 1 convolution, as one matrix product
    Convolution   torch's convolution
    Unrolled      a k x k convolution between few channels and many (im2col): the few channels are gathered from, or
                  summed over, their k x k neighbours, and the rest is one matrix product
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..branch import Program, Step
from ..branch.program import apply_transpose
from ..compiler import maybe_compile
from ..lipschitz.elu import elu_slope
from ..spectral import Geometry
from ..timing import can_measure, fastest
from . import kernels
from .neighbours import Size, gather_neighbours, round_up_to_eight, sum_neighbours, sum_neighbours_then


class Map(Protocol):
    """A linear map of images of one size. `m` is its weight as returned by `matrix`, computed once for all methods."""

    def matrix(self, weight: Tensor) -> Tensor:
        """Return the layer's weight in the shape that the other methods expect."""

    def forward(self, a: Tensor, m: Tensor) -> Tensor:
        """Return W a, for every row."""

    def transpose(self, g: Tensor, m: Tensor) -> Tensor:
        """Return W' g."""

    def transpose_times(self, g: Tensor, m: Tensor, d: Tensor, *, activated: bool = False) -> Tensor:
        """Return W' g times d, entry by entry, the rows of d repeating; `activated`: times ELU's slope at output d."""

    def gradient(self, a: Tensor, g: Tensor, m: Tensor) -> Tensor:
        """Return the gradient of the layer's weight, given the input and the gradient of the output."""


@dataclass(frozen=True)
class Dense:
    """One matrix product, for a weight of this shape."""

    shape: Size

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.flatten(1)

    def forward(self, a: Tensor, m: Tensor) -> Tensor:
        return a @ m.T

    def transpose(self, g: Tensor, m: Tensor) -> Tensor:
        return g.to(m.dtype) @ m

    def transpose_times(self, g: Tensor, m: Tensor, d: Tensor, *, activated: bool = False) -> Tensor:
        return product_times(g.to(m.dtype), m, d, activated)

    def gradient(self, a: Tensor, g: Tensor, m: Tensor) -> Tensor:
        return (g.T @ a).view(self.shape)


@dataclass(frozen=True)
class Convolution:
    """A convolution of images of this size."""

    geometry: Geometry
    size: Size

    def matrix(self, weight: Tensor) -> Tensor:
        return weight

    def forward(self, a: Tensor, m: Tensor) -> Tensor:
        o = self.geometry
        options = (None, o.stride, o.before, o.dilation, False, (0,) * o.axes, o.groups)
        return as_matrix(torch.convolution(as_images(a, self.size), m, *options))

    def transpose(self, g: Tensor, m: Tensor) -> Tensor:
        step = Step("conv", 1, self.geometry)
        return as_matrix(apply_transpose(step, as_images(g.to(m.dtype), self._out(m)), m, self.size))

    def transpose_times(self, g: Tensor, m: Tensor, d: Tensor, *, activated: bool = False) -> Tensor:
        return times_repeated(self.transpose(g, m), elu_slope(d) if activated else d)

    def gradient(self, a: Tensor, g: Tensor, m: Tensor) -> Tensor:
        o, x, y = self.geometry, as_images(a, self.size), as_images(g, self._out(m))
        options = (None, o.stride, o.before, o.dilation, False, (0,) * o.axes, o.groups, [False, True, False])
        return cast(Tensor, torch.ops.aten.convolution_backward(y, x, m, *options)[1])

    def _out(self, m: Tensor) -> Size:
        return self.geometry.output_size(self.size, tuple(m.shape[2:]))


@dataclass(frozen=True)
class Unrolled:
    """A k x k convolution that keeps the image size, as a matrix product (im2col), for a weight of this shape.

    Its matrix is (out, k*k x in) if the channels increase, else (out x k*k, in), padded to a multiple of eight.
    """

    shape: Size
    size: Size
    compiled: bool

    def matrix(self, weight: Tensor) -> Tensor:
        flat = weight.movedim(1, -1)
        if self.widens:
            flat = flat.flatten(1)
            return F.pad(flat, (0, round_up_to_eight(flat.shape[1]) - flat.shape[1]))
        flat = flat.flatten(0, -2)
        return F.pad(flat, (0, 0, 0, round_up_to_eight(flat.shape[0]) - flat.shape[0]))

    def forward(self, a: Tensor, m: Tensor) -> Tensor:
        return self.spread(a, m, back=False) @ m.T if self.widens else self._sum(a @ m.T, back=False)

    def transpose(self, g: Tensor, m: Tensor) -> Tensor:
        return self._sum(g.to(m.dtype) @ m, back=True) if self.widens else self.spread(g, m, back=True) @ m

    def transpose_times(self, g: Tensor, m: Tensor, d: Tensor, *, activated: bool = False) -> Tensor:
        if self.widens:
            return times_repeated(self.transpose(g, m), elu_slope(d) if activated else d)
        return product_times(self.spread(g, m, back=True), m, d, activated)

    def gradient(self, a: Tensor, g: Tensor, m: Tensor) -> Tensor:
        return self.folded(g.T @ self.spread(a, m, back=False) if self.widens else self.spread(g, m, back=True).T @ a)

    def folded(self, matrix: Tensor) -> Tensor:
        """Reshape a gradient of the matrix to one of the weight: the inverse of `matrix`."""
        out, into, *window = self.shape
        places = math.prod(window)
        flat = matrix[:, : into * places] if self.widens else matrix[: out * places]
        return flat.reshape(out, *window, into).movedim(-1, 1)

    @property
    def widens(self) -> bool:
        """Whether the channels increase."""
        return self.shape[1] <= self.shape[0]

    def transpose_then(self, function: Callable[..., Any], g: Tensor, m: Tensor, *more: Any) -> Any:
        """Return `function` of W' g and more, if `widens`: the sum over neighbours is fused with the function."""
        arguments = (g.to(m.dtype) @ m, self.size, self.shape[2], True, min(self.shape[:2]))
        return maybe_compile(sum_neighbours_then, self.compiled)(function, arguments, *more)

    def spread(self, a: Tensor, m: Tensor, *, back: bool) -> Tensor:
        """Gather each row of the few channels with its neighbours, in the dtype of m."""
        return cast(Tensor, maybe_compile(gather_neighbours, self.compiled)(a, self.size, self.shape[2], back, m.dtype))

    def _sum(self, z: Tensor, *, back: bool) -> Tensor:
        function = maybe_compile(sum_neighbours, self.compiled)
        return cast(Tensor, function(z, self.size, self.shape[2], back, min(self.shape[:2])))


def times_repeated(x: Tensor, d: Tensor) -> Tensor:
    """Return x times d, entry by entry, the rows of d repeating."""
    return (x.view(-1, *d.shape) * d).flatten(0, 1)


def product_times(a: Tensor, b: Tensor, d: Tensor, activated: bool) -> Tensor:
    """Return (a b) times d, entry by entry, or times ELU's slope at its output d; by one kernel if that is fastest."""
    tile = _tile(len(a), tuple(b.shape), tuple(d.shape), b.dtype, b.device, activated)
    if tile is None:
        return times_repeated(a @ b, elu_slope(d) if activated else d)
    return kernels.product_times(a, b, d, tile, activated=activated)


@cache
def _tile(
    rows: int, shape: Size, period: Size, dtype: torch.dtype, device: torch.device, activated: bool
) -> kernels.ProductTile | None:
    tiles = [tile for tile in kernels.PRODUCT_TILES if kernels.multiplies(shape, dtype, device, tile)]
    tiles = tiles if kernels.counts(rows, max(shape)) else []
    if not tiles or not can_measure(device):
        return None
    a, b, d = (torch.zeros(each, dtype=dtype, device=device) for each in ((rows, shape[0]), shape, period))

    def call(tile: kernels.ProductTile | None) -> Tensor:
        if tile is None:
            return times_repeated(a @ b, elu_slope(d) if activated else d)
        return kernels.product_times(a, b, d, tile, activated=activated)

    return fastest(f"{rows} rows times {shape}, times slopes", [None, *tiles], call)


def as_images(a: Tensor, size: Size) -> Tensor:
    """View a matrix as images (n, channels, ...) in channels-last memory format."""
    return a.view(-1, *size, a.shape[1]).movedim(-1, 1)


def as_matrix(x: Tensor) -> Tensor:
    """Return images or vectors as a matrix; a view if they are in channels-last memory format."""
    return x.movedim(1, -1).reshape(-1, x.shape[1])


# ---------------------------------------------------------------------------------------------- choosing a map


def choose_map(step: Step, w: Tensor, size: Size, count: int, *, compiled: bool) -> Map:
    """Return the fastest map for a step with this weight, for `count` images of this size."""
    if step.kind == "linear":
        return Dense(tuple(w.shape))
    geometry = cast(Geometry, step.geometry)
    return _fastest_map(geometry, tuple(w.shape), w.dtype, w.device, size, count, compiled)


@cache
def _fastest_map(
    geometry: Geometry, shape: Size, dtype: torch.dtype, device: torch.device, size: Size, count: int, compiled: bool
) -> Map:
    options = candidates(geometry, shape, size, compiled)
    if len(options) == 1 or not can_measure(device):
        return options[0]
    w = torch.zeros(shape, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)
    matrices = {option: option.matrix(w) for option in options}
    a = torch.zeros(count * math.prod(size), shape[1], dtype=dtype, device=device)
    g = torch.zeros(count * math.prod(size), shape[0], dtype=dtype, device=device)

    def call(option: Map) -> None:
        m, sums = matrices[option], isinstance(option, Unrolled) and not option.widens
        seed = g.float() if sums else g  # sums over neighbours are in float32
        option.forward(a, m), option.transpose(seed, m), option.gradient(a, seed, m)

    return fastest(f"{count} images {size}, weight {shape}", options, call)


def may_unroll(program: Program, values: list[Tensor], x: Tensor) -> bool:
    """Whether a convolution of g between few channels and many can be unrolled."""
    size = tuple(x.shape[2:])
    found = [(step.geometry, own[0]) for step, _, own in program.with_tensors(values) if step.geometry is not None]
    return any(isinstance(candidates(g, tuple(w.shape), size, True)[0], Unrolled) for g, w in found)


def candidates(geometry: Geometry, shape: Size, size: Size, compiled: bool) -> list[Map]:
    """Return the maps for a convolution that may be the fastest, the likeliest first."""
    out, into, *window = shape
    one = (1,) * len(size)
    keeps = (geometry.stride, geometry.dilation, geometry.groups) == (one, one, 1)
    if keeps and all(n == 1 for n in window) and not any(geometry.before):
        return [Dense(shape)]
    library: list[Map] = [Convolution(geometry, size)]
    square = len(window) == 2 and window[0] == window[1] and window[0] % 2 == 1
    same = keeps and square and geometry.before == (window[0] // 2,) * 2
    if not (compiled and same) or min(out, into) * window[0] ** 2 > max(out, into):
        return library
    return [Unrolled(shape, size, compiled), *library]
