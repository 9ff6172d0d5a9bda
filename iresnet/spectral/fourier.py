"""An upper bound on the norm of a convolution, from its symbol S(theta) on a grid of frequencies.

1. Splitting positions by their residue modulo the stride turns every convolution into one of stride 1 with more
   channels, y[o] = sum_a W[a] x[o + a].
2. With zero padding, that map is a corner (a compression) of the circular convolution on a grid of N points, if N is
   large enough that no padding wraps around into the input: N >= n + (positions read before the input) and
   N >= m + (positions read after it), for n inputs and m outputs. A corner of an operator has no larger norm. (The
   n x n grid of the input itself is NOT enough.)
3. The circular convolution is block diagonal in Fourier space with blocks S(theta) = sum_a W[a] exp(i a theta), so
   sigma <= max over the grid of ||S(theta)||.
4. Between the points of a grid of M frequencies, a trigonometric polynomial with K taps exceeds its samples by a factor
   of at most 1 / cos(pi (K - 1) / (2 M)). That gives a bound for inputs of any size.

Under zero padding, the norm never decreases as the input grows along any axis: put the smaller input into the corner of
the larger one, with zeros beside it, and every output of the smaller is an output of the larger, for any stride,
dilation and padding. So a bound for the largest size along each axis holds for all smaller ones. Under circular padding
it does not: a grid of 3 frequencies may contain the maximum that a grid of 8 misses.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..precision import float32_matmul_precision
from .geometry import Geometry
from .operator import rescale, undo_rescale

#: Above this many grid points along an axis, the grid of `COARSE` points for any input size is used instead.
LARGEST_GRID, COARSE = 40, 32

#: From this many channels on, eigenvalues are expensive: frequencies are filtered first, and one grid must do.
WIDE = 32

#: Squarings after which the Schatten norm equals the largest singular value to 1e-7, for matrices of any size.
SQUARINGS = 26


@dataclass(frozen=True)
class Taps:
    """A convolution of stride 1: y[o] = sum_a weight[a] x[o + a], a = first, ..., first + K - 1 along every axis."""

    weight: Tensor  # (layers, groups, out / groups, in / groups * phases, *K)
    first: tuple[int, ...]


def to_stride_one(weight: Tensor, geometry: Geometry, merge: tuple[int, ...], step: tuple[int, ...]) -> Taps:
    """Rewrite a convolution with stride `merge` and dilation `step` as one of stride 1 with more channels.

    Positions of equal residue modulo `merge` become channels.
    """
    kernel = weight.shape[3:]
    offsets = [[d * j - b for j in range(k)] for k, d, b in zip(kernel, step, geometry.before, strict=True)]
    first = tuple(o[0] // s for o, s in zip(offsets, merge, strict=True))
    length = tuple(o[-1] // s - f + 1 for o, s, f in zip(offsets, merge, first, strict=True))
    layers, out, inputs = weight.shape[:3]
    merged = weight.new_zeros(layers, out, inputs, *merge, *length)
    for index in itertools.product(*(range(k) for k in kernel)):
        at = [o[j] for o, j in zip(offsets, index, strict=True)]
        phase = tuple(t % s for t, s in zip(at, merge, strict=True))
        place = tuple(t // s - f for t, s, f in zip(at, merge, first, strict=True))
        element = cast(Any, merged)  # the type of Tensor.__setitem__ has no index of variable length
        element[(slice(None),) * 3 + phase + place] = weight[(slice(None),) * 3 + index]
    return Taps(merged.reshape(layers, geometry.groups, out // geometry.groups, -1, *length), first)


def symbols(taps: Taps, grid: tuple[int, ...]) -> Tensor:
    """Evaluate S(theta) on a grid of frequencies: (layers, frequencies * groups, out, in), complex128.

    For a real kernel S(-theta) = conj S(theta), so half of the first axis is enough for norms.
    """
    s = taps.weight.to(torch.complex128)
    for axis, (points, first) in enumerate(zip(grid, taps.first, strict=True)):
        count = points // 2 + 1 if axis == 0 else points
        a = torch.arange(first, first + s.shape[4], device=s.device, dtype=torch.float64)
        f = torch.arange(count, device=s.device, dtype=torch.float64)
        angles = 2 * math.pi * torch.outer(a, f) / points
        s = torch.tensordot(s, torch.polar(torch.ones_like(angles), angles), dims=([4], [0]))
    return s.flatten(4).permute(0, 4, 1, 2, 3).flatten(1, 2)


def largest_singular_values(matrices: Tensor) -> Tensor:
    """Compute the largest singular value of every matrix, from the eigenvalues of the smaller Gram matrix.

    GPUs multiply matrices fast and compute eigenvalues slowly, so large matrices get an equally tight upper bound
    there: a Schatten norm of very high order.
    """
    if _prefers_matmul(matrices) and min(matrices.shape[-2:]) >= WIDE:
        return gram_bound(matrices, SQUARINGS)
    matrices, scale = rescale(matrices, (-2, -1))
    if matrices.shape[-1] == 1 or matrices.shape[-2] == 1:
        return undo_rescale(torch.linalg.vector_norm(matrices, dim=(-2, -1)), scale)
    return undo_rescale(torch.linalg.eigvalsh(_gram(matrices))[..., -1].clamp_min(0).sqrt(), scale)


def _gram(matrices: Tensor) -> Tensor:
    """Return the smaller of M M' and M' M."""
    return matrices @ matrices.mH if matrices.shape[-2] <= matrices.shape[-1] else matrices.mH @ matrices


def _largest_over_frequencies(matrices: Tensor) -> Tensor:
    """Compute the largest singular value over axis 1 of (layers, frequencies, a, b), filtering candidates first.

    Squaring a Gram matrix five times brackets its largest eigenvalue within a factor of side^(1/32). A matrix whose
    upper end is below the largest lower end needs no eigenvalues. The brackets are computed in single precision, where
    sums of n products over a side lose at most 8 n side units; the brackets are widened by that. All matrices of a
    layer share one scale, so a matrix that underflows cannot be the largest.
    """
    side, longer = sorted(matrices.shape[-2:])
    if side < WIDE:
        return largest_singular_values(matrices).amax(1)
    with float32_matmul_precision("ieee", matrices.device):
        upper = gram_bound(rescale(matrices, (1, 2, 3))[0].to(torch.complex64), iterations=5)
    lower = upper / side ** (1 / 64) * (1 - 1e-3 - 8 * side * longer * 2.0**-24)
    layer, place = (~(upper < lower.amax(1, keepdim=True))).nonzero(as_tuple=True)
    values = torch.zeros(matrices.shape[:2], dtype=torch.float64, device=matrices.device)
    values[layer, place] = largest_singular_values(matrices[layer, place])
    return values.amax(1)


def _prefers_matmul(matrices: Tensor) -> bool:
    return matrices.is_cuda


def gram_bound(matrices: Tensor, iterations: int) -> Tensor:
    """Compute the Schatten norm of order 2^(iterations + 1), an upper bound on the largest singular value.

    Gram iteration: (sum_i sigma_i^p)^(1/p), p = 2^(iterations + 1), by repeated squaring of the Gram matrix. It is
    differentiable, homogeneous of degree one, and at most min(a, b)^(1/p) times too large.
    """
    return gram_iteration(matrices, iterations)[0]


def gram_iteration(matrices: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Return `gram_bound` and the last power of the smaller of M M' and M' M, up to a factor.

    Its columns are close to the singular vector of the largest singular value.
    """
    matrices, scale = rescale(matrices, (-2, -1))
    gram, log = _gram(matrices), torch.zeros((), dtype=scale.dtype, device=scale.device)
    tiny = torch.finfo(gram.dtype).tiny
    for i in range(iterations):
        gram = gram @ gram if i else gram
        norm = torch.linalg.matrix_norm(gram, keepdim=True).clamp_min(tiny)
        log, gram = log + norm.log() / 2 ** (i + 1), gram / norm
    return undo_rescale(log.exp()[..., 0, 0], scale), gram


@dataclass(frozen=True)
class _AxisGrid:
    """The frequencies along one axis: sigma <= factor * max over `points`, after merging with `merge` and `step`."""

    merge: int
    step: int
    points: int
    size_free: bool
    factor: float


def _axis_grid(geometry: Geometry, axis: int, k: int, n: int | None, largest: int, coarse: int) -> _AxisGrid:
    """Choose a sound grid for one axis: that of input size n, or one for any size if n is unknown or large."""
    s, d = geometry.stride[axis], geometry.dilation[axis]
    b, a = geometry.before[axis], geometry.after[axis]
    surplus = b + a - d * (k - 1)  # outputs beyond inputs, before the stride
    if geometry.circular and (n is None or n % s):
        s = 1  # the strided outputs are a subset of the outputs at stride 1
    lowest, highest = -b // s, (d * (k - 1) - b) // s
    points, factor = None, 1.0
    if n is not None:
        m = (n + surplus - 1) // s + 1
        if geometry.circular:
            points = n // s
            factor = math.sqrt(math.ceil(m / points))  # repeated outputs count as often as they occur
        else:
            points = max(-(-n // s) + max(0, -lowest), m + max(0, highest))
    elif geometry.circular and surplus > 0:
        factor = math.sqrt(1 + math.ceil(surplus / max(a, b)))  # torch wraps around at most once: n >= max(a, b)
    if points is not None and points <= max(largest, 4 * (highest - lowest)) and k > 1:
        return _AxisGrid(s, d, points, False, factor)
    # Over all frequencies dilation does not change the maximum: without it, fewer points are enough.
    d = 1 if s == 1 else d
    span = (d * (k - 1) - b) // s - -b // s
    points = max(coarse, 4 * span) if span else 1
    return _AxisGrid(s, d, points, True, factor / math.cos(math.pi * span / (2 * points)))


def sample_symbols(
    weight: Tensor, geometry: Geometry, size: tuple[int, ...] | None, *, largest: int, coarse: int, extra: int = 0
) -> tuple[Tensor, float, bool]:
    """Return (S, factor, size_free) with sigma <= factor * max ||S||. `extra` adds points to grids for a given size."""
    kernel = weight.shape[3:]
    axes = [
        _axis_grid(geometry, i, k, None if size is None else size[i], largest, coarse) for i, k in enumerate(kernel)
    ]
    taps = to_stride_one(weight, geometry, tuple(a.merge for a in axes), tuple(a.step for a in axes))
    points = tuple(a.points if a.size_free else a.points + extra for a in axes)
    return symbols(taps, points), math.prod([a.factor for a in axes]), all(a.size_free for a in axes)


def fourier_bound(weight: Tensor, geometry: Geometry, size: tuple[int, ...] | None) -> Tensor:
    """Compute an upper bound on sigma for a stack of convolutions, without the margin for rounding.

    Under zero padding every longer grid is sound too, and the maximum is not monotone in its length: the smallest of
    three is taken where that is cheap.
    """
    best = torch.full((len(weight),), torch.inf, dtype=torch.float64, device=weight.device)
    wide = min(weight.shape[1] // geometry.groups, weight.shape[2]) >= WIDE
    for extra in range(1 if geometry.circular or wide else 3):
        s, factor, size_free = sample_symbols(weight, geometry, size, largest=LARGEST_GRID, coarse=COARSE, extra=extra)
        best = torch.minimum(best, _largest_over_frequencies(s) * factor)
        if size_free:
            break
    return best
