"""A layer as a linear operator T: T x, its transpose, its gradient, and power iteration for its norm (Eq. 2).

Weights are stacked, (layers, out, in / groups, *kernel), so that one call handles all layers of one shape.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from .geometry import Geometry

#: Power iteration has converged if sigma changes by at most this fraction over so many iterations.
CONVERGED, STRIDE = 1e-6, 10


def apply_operator(weight: Tensor, geometry: Geometry, x: Tensor) -> Tensor:
    """Compute y = T x for a stack of layers, without bias. x: (layers, in, *size), one input per layer."""
    if geometry.axes == 0:
        return torch.bmm(weight, x.unsqueeze(-1)).squeeze(-1)
    if _uses_matmul(weight, geometry):
        size = geometry.output_size(tuple(x.shape[2:]), tuple(weight.shape[3:]))
        return torch.bmm(_as_matrices(weight), _unfold(weight, geometry, x)).reshape(*weight.shape[:2], *size)
    padded, flat, groups = _pad(geometry, x), weight.flatten(0, 1), geometry.groups * len(weight)
    n = geometry.axes
    y = torch.convolution(
        padded.flatten(0, 1)[None], flat, None, geometry.stride, (0,) * n, geometry.dilation, False, (0,) * n, groups
    )
    return y[0].reshape(*weight.shape[:2], *y.shape[2:])


def apply_adjoint(weight: Tensor, geometry: Geometry, y: Tensor, size: tuple[int, ...]) -> Tensor:
    """Compute T' y for a stack of layers, (layers, in, *size)."""
    if geometry.axes == 0:
        return torch.bmm(weight.mT, y.unsqueeze(-1)).squeeze(-1)
    if _uses_matmul(weight, geometry):
        columns = torch.bmm(_as_matrices(weight).mT, y.flatten(2))
        return _fold(_as_kernels(columns, weight, y.shape[2:]), tuple(weight.shape[3:]), geometry, size)
    x = y.new_empty(len(weight), weight.shape[2] * geometry.groups, *size)
    return _convolution_backward(weight, geometry, x, y, (True, False))[0]


def weight_gradient(weight: Tensor, geometry: Geometry, x: Tensor, y: Tensor) -> Tensor:
    """Compute d<y, T x>/dW, the gradient of the bilinear form, for a stack of layers."""
    if geometry.axes == 0:
        return y.unsqueeze(-1) * x.unsqueeze(-2)
    if _uses_matmul(weight, geometry):
        product = torch.bmm(y.flatten(2), _unfold(weight, geometry, x).mT)
        if not _is_channels_last(weight):
            return product.reshape(weight.shape)
        return product.reshape(*weight.shape[:2], *weight.shape[3:], weight.shape[2]).movedim(-1, 2)
    return _convolution_backward(weight, geometry, x, y, (False, True))[1]


def _uses_matmul(weight: Tensor, geometry: Geometry) -> bool:
    """Whether to compute this convolution as a matrix product of unfolded patches."""
    plain = geometry.axes == 2 and geometry.groups == 1 and not geometry.circular and geometry.before == geometry.after
    return plain and _grouped_conv_is_slow(weight)


def _grouped_conv_is_slow(weight: Tensor) -> bool:
    """Whether grouped convolutions are slow on the device of this weight: on a GPU they are."""
    return weight.is_cuda


def _is_channels_last(weight: Tensor) -> bool:
    """Whether the input channels are last in memory; sums then run in that order."""
    return weight.stride(2) == 1


def _as_matrices(weight: Tensor) -> Tensor:
    """View a stack of kernels as matrices, in memory order: (layers, out, in * kernel or kernel * in)."""
    return (weight.movedim(2, -1) if _is_channels_last(weight) else weight).flatten(2)


def _as_kernels(columns: Tensor, weight: Tensor, size: Sequence[int]) -> Tensor:
    """Reshape columns in the order of `_as_matrices` to (layers, in, kernel, *positions)."""
    channels = weight.shape[2]
    if _is_channels_last(weight):
        return columns.reshape(len(columns), -1, channels, *size).transpose(1, 2)
    return columns.reshape(len(columns), channels, -1, *size)


def _is_pointwise(kernel: tuple[int, ...], geometry: Geometry) -> bool:
    return set(kernel) == {1} and set(geometry.stride) == {1} and not any(geometry.before)


def _unfold(weight: Tensor, geometry: Geometry, x: Tensor) -> Tensor:
    """Collect the input patch of every output position (im2col): (layers, patch as in `_as_matrices`, positions)."""
    kernel = tuple(weight.shape[3:])
    if _is_pointwise(kernel, geometry):
        return x.flatten(2)
    windows = _pad(geometry, x)
    for axis, (k, d, s) in enumerate(zip(kernel, geometry.dilation, geometry.stride, strict=True), start=2):
        windows = windows.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    order = (0, 4, 5, 1, 2, 3) if _is_channels_last(weight) else (0, 1, 4, 5, 2, 3)
    return windows.permute(order).reshape(len(x), x.shape[1] * math.prod(kernel), -1)


def _fold(columns: Tensor, kernel: tuple[int, ...], geometry: Geometry, size: tuple[int, ...]) -> Tensor:
    """Adjoint of `_unfold`: add every patch back at its position. columns: (layers, in, kernel, *positions)."""
    if _is_pointwise(kernel, geometry):
        return columns[:, :, 0]
    x = columns.new_zeros(*columns.shape[:2], *(n + 2 * b for n, b in zip(size, geometry.before, strict=True)))
    (d, e), (s, t), (m, n) = geometry.dilation, geometry.stride, columns.shape[3:]
    for i, (a, b) in enumerate(itertools.product(*map(range, kernel))):
        x[:, :, d * a : d * a + s * (m - 1) + 1 : s, e * b : e * b + t * (n - 1) + 1 : t] += columns[:, :, i]
    return _unpad(geometry, x, size)


def _convolution_backward(
    weight: Tensor, geometry: Geometry, x: Tensor, y: Tensor, wanted: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    padded, n = _pad(geometry, x), geometry.axes
    to_x, to_weight, _ = torch.ops.aten.convolution_backward(
        y.flatten(0, 1)[None],
        padded.flatten(0, 1)[None],
        weight.flatten(0, 1),
        None,
        geometry.stride,
        (0,) * n,
        geometry.dilation,
        False,
        (0,) * n,
        geometry.groups * len(weight),
        (*wanted, False),
    )
    if wanted[0]:
        to_x = _unpad(geometry, to_x[0].reshape(*x.shape[:2], *to_x.shape[2:]), tuple(x.shape[2:]))
    return to_x, to_weight.reshape(weight.shape) if wanted[1] else to_weight


def _pad(geometry: Geometry, x: Tensor) -> Tensor:
    pads = [p for pair in zip(geometry.before[::-1], geometry.after[::-1], strict=True) for p in pair]
    if not any(pads):
        return x
    return functional.pad(x, pads, mode="circular" if geometry.circular else "constant")


def _unpad(geometry: Geometry, padded: Tensor, size: tuple[int, ...]) -> Tensor:
    """Adjoint of `_pad`: crop zero padding, or add circular padding back to where it was copied from."""
    for axis, (n, b, a) in enumerate(zip(size, geometry.before, geometry.after, strict=True), start=2):
        middle = padded.narrow(axis, b, n)
        if geometry.circular and (b or a):
            middle = middle.clone()
            middle.narrow(axis, n - b, b).add_(padded.narrow(axis, 0, b))
            middle.narrow(axis, 0, a).add_(padded.narrow(axis, b + n, a))
        padded = middle
    return padded


#: The exponent bits of a floating-point number, by dtype.
_EXPONENT = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}

#: Powers of two by which a unit vector can be divided without losing digits.
_SAFE = {torch.float32: (2.0**-100, 2.0**100), torch.float64: (2.0**-900, 2.0**900)}


def rescale(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return (x / s, s), s the power of two of the largest entry over `dims`, so that squares do not overflow.

    Exact, except for entries 2^-1000 times smaller than the largest.
    """
    s = largest_power(x, dims)
    return x / s, s


def largest_power(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the power of two of the largest entry over `dims`, which remain with size one."""
    parts = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    dims = tuple(d % x.dim() for d in dims)
    within = (*dims, x.dim()) if x.is_complex() else dims
    if x.is_cuda:
        largest = cast(Tensor, torch.linalg.vector_norm(parts, torch.inf, within, keepdim=True))
    else:  # which takes twenty times as long on a CPU
        largest = parts.abs().amax(within, keepdim=True)
    kind, bits = _EXPONENT[largest.dtype]
    s = (largest.view(kind) & bits).view(largest.dtype).clamp_min(torch.finfo(largest.dtype).tiny)
    return s.squeeze(-1) if x.is_complex() else s


def undo_rescale(sigma: Tensor, scale: Tensor) -> Tensor:
    """Return sigma(x) given sigma(x / s) and s. Results in the subnormal range lose digits and are rounded up."""
    value = sigma * scale.reshape(sigma.shape)
    least = 2.0**-1000 if value.dtype == torch.float64 else 2.0**-100
    return torch.where(sigma > 0, value.clamp_min(least), value)


def power_iteration(weight: Tensor, geometry: Geometry, v: Tensor, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    """Run `iterations` steps from v; return (sigma, v, G): the estimate u' T v, the new v, and G = d sigma / d W.

    One step is u = T v, v = T' u, both normalised, so sigma = ||T' u|| <= sigma(T) up to rounding. For a zero operator
    v stays as it is, so that sigma recovers once the weight changes.
    """
    axes, size = tuple(range(1, v.dim())), tuple(v.shape[2:])
    # T / s is T of vectors over s: a power of two, which changes no digit, and vectors are smaller than weights.
    scale = largest_power(weight, tuple(range(1, weight.dim()))).clamp(*_SAFE[weight.dtype])
    s = scale.view(-1, *(1,) * len(axes))
    for _ in range(iterations):
        u = _normalise(apply_operator(weight, geometry, v / s), axes)
        back = apply_adjoint(weight, geometry, u / s, size).contiguous()
        norm = torch.linalg.vector_norm(back, dim=axes, keepdim=True)
        v = torch.where(norm > 0, back / norm.clamp_min(torch.finfo(norm.dtype).tiny), v)
    return norm.flatten() * scale.flatten(), v, weight_gradient(weight, geometry, v, u)


def converged_power_iteration(
    weight: Tensor, geometry: Geometry, v: Tensor, limit: int = 200
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `power_iteration` until sigma has converged, or for `limit` iterations."""
    previous = torch.zeros(len(weight), dtype=weight.dtype, device=weight.device)
    for _ in range(0, limit, STRIDE):
        sigma, v, gradient = power_iteration(weight, geometry, v, STRIDE)
        if bool(((sigma - previous).abs() <= CONVERGED * sigma).all()):
            break
        previous = sigma
    return sigma, v, gradient


def _normalise(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=axes, keepdim=True)
    return cast(Tensor, x / norm.clamp_min(torch.finfo(norm.dtype).tiny))


def dense_matrix(weight: Tensor, geometry: Geometry, size: tuple[int, ...]) -> Tensor:
    """Write one layer as a matrix, (out * outputs, in * inputs). weight: (out, in / groups, *kernel)."""
    channels = weight.shape[1] * geometry.groups
    n = channels * math.prod(size)
    basis = torch.eye(n, dtype=weight.dtype, device=weight.device).reshape(n, channels, *size)
    if geometry.axes == 0:
        return weight
    stack = _pad(geometry, basis)
    zero = (0,) * geometry.axes
    y = torch.convolution(stack, weight, None, geometry.stride, zero, geometry.dilation, False, zero, geometry.groups)
    return y.flatten(1).T


def spatial_size(geometry: Geometry, weight: Tensor, input_shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the spatial part of an input shape (channels, *size), after checking it against the layer."""
    if input_shape is None:
        return None
    channels = weight.shape[1] * geometry.groups
    shape = tuple(input_shape)
    if geometry.axes == 0:
        if shape[-1:] != (channels,):
            raise ValueError(f"the layer takes {channels} features; got an input of shape {shape}.")
        return ()
    if len(shape) != geometry.axes + 1 or shape[0] != channels:
        raise ValueError(
            f"the layer takes inputs of shape ({channels}{', n' * geometry.axes}); got input_shape={shape}."
        )
    return shape[1:]


def default_size(geometry: Geometry, weight: Tensor) -> tuple[int, ...]:
    """Return the input size at which a norm is estimated before the layer has seen an input: a few kernels wide."""
    kernel = weight.shape[-geometry.axes :] if geometry.axes else ()
    return tuple(max(8, 2 * d * k + 2) for k, d in zip(kernel, geometry.dilation, strict=True))


def start_vector(weight: Tensor, geometry: Geometry, size: tuple[int, ...]) -> Tensor:
    """Return a deterministic, unstructured unit vector (a chirp) to start power iteration, (layers, in, *size)."""
    shape = (weight.shape[2] * geometry.groups, *size)
    i = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64, device=weight.device)
    v = torch.cos(math.sqrt(2) * i.square())
    unit = v / torch.linalg.vector_norm(v)
    return cast(Tensor, unit.to(weight.dtype).reshape(shape).expand(len(weight), *shape).clone())
