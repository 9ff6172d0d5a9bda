"""Launch the kernels of a unit. Images are channels-last tensors (N, C, H, W); notation as in `forward`, `backward`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...streams import side_stream
from . import backward, forward, narrow, weights
from .tuning import Shape, divide


def enter(s: Shape, x: Tensor, y: Tensor, bias: Tensor | None, norm: tuple[Tensor, Tensor] | None) -> list[Tensor]:
    """Compute x' and a_0."""
    out, a0, tile = torch.empty_like(x), torch.empty_like(y), s.tuning.enter
    shift, log_scale = norm or (x, x)  # unused placeholders without an ActNorm
    _launch(forward.enter, tile.programs(s.pixels), x, y, x if bias is None else bias, shift, log_scale, out, a0,
            s.pixels, C=s.channels, M=tile.pixels, HAS_BIAS=bias is not None, HAS_NORM=norm is not None,
            num_warps=tile.warps)  # fmt: skip
    return [out, a0]


def inner(s: Shape, a0: Tensor, values: list[Tensor]) -> list[Tensor]:
    """Compute a_1, a_2 and y'."""
    w1, b1, w2, b2, w3 = values
    t, p, a1, a2 = s.tuning, s.pixels, torch.empty_like(a0), torch.empty_like(a0)
    if t.method == "library":
        columns = min(t.columns, s.channels)
        grid = (t.mix.programs(p), s.channels // columns)
        _launch(forward.mix, grid, _library(a0, w1), b1, w2, b2, a1, a2, p, C=s.channels, N=columns, K=t.depth,
                M=t.mix.pixels, STAGES=t.mix.stages, num_warps=t.mix.warps)  # fmt: skip
        return [a1, a2, _library(a2, w3)]
    y = torch.empty_like(a0)
    _launch(forward.convolve_mix, t.mix.programs(p), a0, w1, b1, w2, b2, a1, a2, p, **s.plane, M=t.mix.pixels,
            STAGES=t.mix.stages, num_warps=t.mix.warps)  # fmt: skip
    _launch(forward.convolve_plain, t.plain.programs(p), a2, w3, y, p, **s.plane, M=t.plain.pixels,
            STAGES=t.plain.stages, num_warps=t.plain.warps)  # fmt: skip
    return [a1, a2, y]


@dataclass(frozen=True)
class Saved:
    """The tensors of the forward pass that the backward pass needs; x is x'."""

    x: Tensor
    a0: Tensor
    a1: Tensor
    a2: Tensor
    w1: Tensor
    w2: Tensor
    w3: Tensor
    log_scale: Tensor | None


def back(s: Shape, gx: Tensor, gy: Tensor, saved: Saved) -> list[Tensor]:
    """Compute the gradients of x and y, of W_1, W_2 and W_3, and of five vectors: b_1, b_2, bias, shift, log_scale."""
    way = {"narrow": _back_narrow, "own": _back_own, "library": _back_library}[s.tuning.method]
    return way(s, gx, gy, saved)


def _back_narrow(s: Shape, gx: Tensor, gy: Tensor, v: Saved) -> list[Tensor]:
    t, p, g1 = s.tuning, s.pixels, torch.empty_like(v.a0)
    mixed, left = s.sums(t.mix_back, v.x), s.sums(t.leave, v.x)
    partial = v.x.new_empty(len(left), 19 * s.channels**2)
    _launch(narrow.convolve_mix_back, len(mixed), gy, v.w3, v.w2, v.a1, v.a2, g1, mixed, partial, p, **s.plane,
            M=t.mix_back.pixels, TILES=t.mix_back.tiles, STAGES=t.mix_back.stages,
            num_warps=t.mix_back.warps)  # fmt: skip
    dx, dy = torch.empty_like(v.x), torch.empty_like(v.a0)
    _launch(narrow.leave, len(left), g1, v.w1, v.a0, v.x, gx, v.x if v.log_scale is None else v.log_scale, dx, dy, left,
            partial, p, **s.plane, M=t.leave.pixels, TILES=t.leave.tiles, STAGES=t.leave.stages,
            HAS_NORM=v.log_scale is not None, num_warps=t.leave.warps)  # fmt: skip
    flat, vectors = _sum_up(s, partial, mixed, left, v.w1.dtype)
    return [dx, dy, *_kernels(flat, v), vectors]


def _back_own(s: Shape, gx: Tensor, gy: Tensor, v: Saved) -> list[Tensor]:
    t, p, g1, g2 = s.tuning, s.pixels, torch.empty_like(v.a0), torch.empty_like(v.a0)
    mixed = s.sums(t.mix_back, v.x)
    _launch(backward.convolve_mix_back, len(mixed), gy, v.w3, v.w2, v.a1, v.a2, g1, g2, mixed, p, **s.plane,
            M=t.mix_back.pixels, STAGES=t.mix_back.stages, num_warps=t.mix_back.warps)  # fmt: skip
    with _aside(s, v.x):
        partial = _partial_gradients(s, v, g1, g2, gy)
    dx, dy, left = _leave(s, g1, gx, v)
    _meet(s, v.x)
    flat, vectors = _sum_up(s, partial, mixed, left, v.w1.dtype)
    return [dx, dy, *_kernels(flat, v), vectors]


def _back_library(s: Shape, gx: Tensor, gy: Tensor, v: Saved) -> list[Tensor]:
    t, p, g1, g2 = s.tuning, s.pixels, torch.empty_like(v.a0), torch.empty_like(v.a0)
    mixed, columns = s.sums(t.mix_back, v.x), min(t.columns_back, s.channels)
    with _aside(s, v.x):
        dw3 = _library_gradient(gy, v.a2, v.w3, weight=True)
    d = _library_gradient(gy, v.a2, v.w3, weight=False)
    _launch(backward.mix_back, (len(mixed), s.channels // columns), d, v.w2, v.a1, v.a2, g1, g2, mixed, p, C=s.channels,
            N=columns, K=t.depth_back, M=t.mix_back.pixels, STAGES=t.mix_back.stages,
            num_warps=t.mix_back.warps)  # fmt: skip
    with _aside(s, v.x):
        partial = _partial_gradients(s, v, g1, g2, gy)
        dw1 = _library_gradient(g1, v.a0, v.w1, weight=True)
    dx, dy, left = _leave(s, _library_gradient(g1, v.a0, v.w1, weight=False), gx, v)
    _meet(s, v.x)
    flat, vectors = _sum_up(s, partial, mixed, left, v.w1.dtype)
    return [dx, dy, dw1, _kernel(flat, v.w2), dw3, vectors]


def _leave(s: Shape, g1: Tensor, gx: Tensor, v: Saved) -> tuple[Tensor, Tensor, Tensor]:
    t, dx, dy, left = s.tuning, torch.empty_like(v.x), torch.empty_like(v.a0), s.sums(s.tuning.leave, v.x)
    _launch(backward.leave, len(left), g1, v.w1, v.a0, v.x, gx, v.x if v.log_scale is None else v.log_scale, dx, dy,
            left, s.pixels, **s.plane, M=t.leave.pixels, TILES=t.leave.tiles, STAGES=t.leave.stages,
            CONVOLVE=t.method == "own", HAS_NORM=v.log_scale is not None, num_warps=t.leave.warps)  # fmt: skip
    return dx, dy, left


def _partial_gradients(s: Shape, v: Saved, g1: Tensor, g2: Tensor, gy: Tensor) -> Tensor:
    b, (splits, steps, jobs), own = s.tuning.gradients, s.split(), s.tuning.method == "own"
    out = v.x.new_empty(splits, (19 if own else 1) * s.channels**2)
    _launch(weights.partial_gradients, (splits, jobs), v.a0, v.a1, v.a2, g1, g2, gy, out, s.pixels, **s.plane,
            N=min(b.rows, s.channels), J=b.columns, K=b.pixels, STEPS=steps, CONVOLVE=own, STAGES=b.stages,
            num_warps=b.warps)  # fmt: skip
    return out


def _sum_up(s: Shape, partial: Tensor, mixed: Tensor, left: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    splits, length = partial.shape
    flat, vectors = partial.new_empty(length, dtype=dtype), partial.new_empty(5, s.channels)
    columns = 32 if length < 128 * 132 else 128
    _launch(weights.reduce, divide(length, columns) + s.channels // 4, partial, flat, mixed, left, vectors,
            C=s.channels, LENGTH=length, SPLITS=splits, MIX=len(mixed), LEAVE=len(left), L=columns, S=4096 // columns,
            R=256, num_warps=4)  # fmt: skip
    return flat, vectors


@contextmanager
def _aside(s: Shape, x: Tensor) -> Iterator[None]:
    """Run on the second stream, after everything launched so far; `_meet` waits for it."""
    if not (s.tuning.aside and x.is_cuda):
        yield
        return
    side = side_stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        yield


def _meet(s: Shape, x: Tensor) -> None:
    if s.tuning.aside and x.is_cuda:
        torch.cuda.current_stream(x.device).wait_stream(side_stream(x.device))


def _library(x: Tensor, w: Tensor) -> Tensor:
    return torch.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def _library_gradient(g: Tensor, x: Tensor, w: Tensor, *, weight: bool) -> Tensor:
    mask = [not weight, weight, False]
    both = torch.ops.aten.convolution_backward(g, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)
    found: Tensor = both[weight]
    return found.contiguous(memory_format=torch.channels_last)


def _kernels(flat: Tensor, v: Saved) -> list[Tensor]:
    size = v.w1.numel()
    return [_kernel(flat[:size], v.w1), _kernel(flat[2 * size :], v.w2), _kernel(flat[size : 2 * size], v.w3)]


def _kernel(flat: Tensor, like: Tensor) -> Tensor:
    """Return a gradient in the memory order of its weight: (out, height, width, in)."""
    out, inner, height, width = like.shape
    return flat.view(out, height, width, inner).permute(0, 3, 1, 2)


def _launch(kernel: Any, grid: int | tuple[int, int], *arguments: Any, **options: Any) -> None:
    kernel[grid if isinstance(grid, tuple) else (grid,)](*arguments, **options)
