"""Spectral norms of linear layers and convolutions: estimates from below, exact values, and proven upper bounds.

A layer is a linear operator T; its Lipschitz constant is its largest singular value sigma(T). Three ways to it:

* `power_iteration` (Eq. 2 of the paper, on the operator itself and its transpose, after Gouk et al.): cheap, from below.
* `circular_singular_values` (Sec. 2.1, after Sedghi et al.): all singular values, where the operator is a circulant.
* `norm_bound`: an upper bound that holds, for every supported kind of layer.

The bound rests on one identity. Splitting positions by their residue modulo the stride turns every convolution into
one of stride 1, y[o] = sum_a W[a] x[o + a], with more channels. Such a map with zero padding is a corner of the circular
convolution on any grid so long that nothing read outside the input wraps around into it: N >= n + (what is read
before the input) and N >= m + (what is read after it). A corner of an operator has no larger norm, and the circular
convolution is block diagonal in Fourier space, S(theta) = sum_a W[a] exp(i a theta), so sigma <= max over that grid.
(The n x n grid of the input itself is NOT enough.) Between the points of a grid of M frequencies, a trigonometric
polynomial of K taps exceeds its samples by at most 1 / cos(pi (K - 1) / (2 M)): that gives the bound for any input size.

Weights come in stacks (layers, out, in / groups, *kernel), so that one call serves all layers of one shape.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Relative allowance for rounding in the float64 computation of a bound. The backward error of the eigenvalue
#: computation is a small multiple of the matrix side times 1.1e-16, far below this for any layer that fits.
ROUNDING_MARGIN = 1e-9

#: Up to this side of the (smaller) Gram matrix the operator is written out and its norm computed exactly.
DENSE_LIMIT = 576

#: Above this many grid points along an axis, the size-free grid of `COARSE` points is used instead.
LARGEST_GRID, COARSE = 40, 32


class NoBoundKnown(ValueError):
    """No rigorous bound is implemented for this layer: nothing can be certified."""


@dataclass(frozen=True)
class Geometry:
    """What a layer's operator is beside its weight. A linear layer has no axes; a convolution has one to three."""

    stride: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    circular: bool = False

    @classmethod
    def of(cls, layer: nn.Module) -> Geometry:
        """The geometry of a Linear or Conv1d/2d/3d layer; `NoBoundKnown` for anything else."""
        if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
            return cls()
        kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        if not any(isinstance(layer, kind) and type(layer).forward is kind.forward for kind in kinds):
            raise NoBoundKnown(f"no norm bound is known for {type(layer).__name__}; Linear, Conv1d, Conv2d and Conv3d have one.")
        assert isinstance(layer, kinds)
        if layer.padding_mode not in ("zeros", "circular"):
            raise NoBoundKnown(
                f"no norm bound is known for padding_mode={layer.padding_mode!r}; use 'zeros' or 'circular'."
            )
        pads = list(layer._reversed_padding_repeated_twice)[::-1]  # last axis first, (after, before) once reversed
        return cls(
            stride=tuple(layer.stride),
            before=tuple(pads[1::2]),
            after=tuple(pads[0::2]),
            dilation=tuple(layer.dilation),
            groups=layer.groups,
            circular=layer.padding_mode == "circular",
        )

    @property
    def axes(self) -> int:
        return len(self.stride)

    def output_size(self, size: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[int, ...]:
        """The spatial size of the output; ValueError where the kernel does not fit."""
        out = tuple(
            (n + b + a - d * (k - 1) - 1) // s + 1
            for n, b, a, d, k, s in zip(size, self.before, self.after, self.dilation, kernel, self.stride, strict=True)
        )
        if any(m < 1 for m in out):
            raise ValueError(f"the input size {size} is smaller than the kernel {kernel} with its padding.")
        return out


# ---------------------------------------------------------------------------------------------- the operator and its adjoint


def apply(weight: Tensor, geometry: Geometry, x: Tensor) -> Tensor:
    """y = T x for a stack of layers, without bias. x: (layers, in, *size), one input per layer."""
    if geometry.axes == 0:
        return torch.bmm(weight, x.unsqueeze(-1)).squeeze(-1)
    padded, flat, groups = _pad(geometry, x), weight.flatten(0, 1), geometry.groups * len(weight)
    n = geometry.axes
    y = torch.convolution(
        padded.flatten(0, 1)[None], flat, None, geometry.stride, (0,) * n, geometry.dilation, False, (0,) * n, groups
    )
    return y[0].unflatten(0, weight.shape[:2])


def pull_back(weight: Tensor, geometry: Geometry, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """T' y and d<y, T x>/dW, the adjoint and the derivative of the bilinear form, in one pass."""
    if geometry.axes == 0:
        return torch.bmm(weight.mT, y.unsqueeze(-1)).squeeze(-1), y.unsqueeze(-1) * x.unsqueeze(-2)
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
        (True, True, False),
    )
    folded = _unpad(geometry, to_x[0].unflatten(0, x.shape[:2]), tuple(x.shape[2:]))
    return folded, to_weight.reshape(weight.shape)


def _pad(geometry: Geometry, x: Tensor) -> Tensor:
    pads = [p for pair in zip(geometry.before[::-1], geometry.after[::-1], strict=True) for p in pair]
    if not any(pads):
        return x
    return functional.pad(x, pads, mode="circular" if geometry.circular else "constant")


def _unpad(geometry: Geometry, padded: Tensor, size: tuple[int, ...]) -> Tensor:
    """The adjoint of `_pad`: cut the zero padding off, or add the circular padding to where it was copied from."""
    for axis, (n, b, a) in enumerate(zip(size, geometry.before, geometry.after, strict=True), start=2):
        middle = padded.narrow(axis, b, n)
        if geometry.circular and (b or a):
            middle = middle.clone()
            middle.narrow(axis, n - b, b).add_(padded.narrow(axis, 0, b))
            middle.narrow(axis, 0, a).add_(padded.narrow(axis, b + n, a))
        padded = middle
    return padded


def power_iteration(weight: Tensor, geometry: Geometry, v: Tensor, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    """(sigma, v, G): the estimate u' T v, the next v, and G = d sigma / d W, after `iterations` steps from v.

    sigma <= sigma(T) up to rounding. A zero operator keeps its v, so that sigma recovers once the weight moves.
    """
    axes = tuple(range(1, v.dim()))
    for _ in range(iterations):
        u = _normalise(apply(weight, geometry, v), axes)
        back, gradient = pull_back(weight, geometry, v, u)
        norm = torch.linalg.vector_norm(back, dim=axes, keepdim=True)
        v = torch.where(norm > 0, back / norm.clamp_min(torch.finfo(norm.dtype).tiny), v)
    u = _normalise(apply(weight, geometry, v), axes)
    gradient = pull_back(weight, geometry, v, u)[1]
    return (weight * gradient).flatten(1).sum(1), v, gradient


def converged_power_iteration(
    weight: Tensor, geometry: Geometry, v: Tensor, tolerance: float = 1e-6, limit: int = 200, stride: int = 10
) -> tuple[Tensor, Tensor, Tensor]:
    """`power_iteration` until the relative change over `stride` iterations is below `tolerance`, or `limit` is reached."""
    previous = torch.zeros(len(weight), dtype=weight.dtype, device=weight.device)
    for _ in range(0, limit, stride):
        sigma, v, gradient = power_iteration(weight, geometry, v, stride)
        if bool(((sigma - previous).abs() <= tolerance * sigma).all()):
            break
        previous = sigma
    return sigma, v, gradient


def _normalise(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=axes, keepdim=True)
    return x / norm.clamp_min(torch.finfo(norm.dtype).tiny)


# ---------------------------------------------------------------------------------------------- the operator in Fourier space


@dataclass(frozen=True)
class _Taps:
    """A convolution rewritten with stride 1: y[o] = sum_a weight[a] x[o + a], a = first .. first + K - 1 on every axis."""

    weight: Tensor  # (layers, groups, out / groups, in / groups * phases, *K)
    first: tuple[int, ...]
    stride: tuple[int, ...]  # the factor by which positions were merged into channels


def _taps(weight: Tensor, geometry: Geometry, stride: tuple[int, ...], *, dilated: bool = True) -> _Taps:
    """Merge positions of equal residue modulo `stride` into channels. `dilated=False` closes the holes of a dilation,
    which changes no supremum over all frequencies and shortens the kernel."""
    kernel = weight.shape[3:]
    step = geometry.dilation if dilated else (1,) * geometry.axes
    offsets = [[d * j - b for j in range(k)] for k, d, b in zip(kernel, step, geometry.before, strict=True)]
    first = tuple(o[0] // s for o, s in zip(offsets, stride, strict=True))
    length = tuple(o[-1] // s - f + 1 for o, s, f in zip(offsets, stride, first, strict=True))
    layers, out, inputs = weight.shape[:3]
    merged = weight.new_zeros(layers, out, inputs, *stride, *length)
    for index in itertools.product(*(range(k) for k in kernel)):
        at = [o[j] for o, j in zip(offsets, index, strict=True)]
        phase = tuple(t % s for t, s in zip(at, stride, strict=True))
        place = tuple(t // s - f for t, s, f in zip(at, stride, first, strict=True))
        merged[(slice(None), slice(None), slice(None), *phase, *place)] = weight[(..., *index)]
    merged = merged.reshape(layers, geometry.groups, out // geometry.groups, -1, *length)
    return _Taps(merged, first, stride)


def _symbols(taps: _Taps, grid: tuple[int, ...]) -> Tensor:
    """S(theta) on a grid of frequencies, (layers, frequencies * groups, out, in), complex128.

    A real kernel has S(-theta) = conj S(theta): half of the first axis is enough for norms.
    """
    s = taps.weight.to(torch.complex128)
    for axis, (points, first) in enumerate(zip(grid, taps.first, strict=True)):
        count = points // 2 + 1 if axis == 0 else points
        a = torch.arange(first, first + s.shape[4], device=s.device, dtype=torch.float64)
        f = torch.arange(count, device=s.device, dtype=torch.float64)
        angles = 2 * math.pi * torch.outer(a, f) / points
        s = torch.tensordot(s, torch.polar(torch.ones_like(angles), angles), dims=([4], [0]))
    return s.flatten(4).permute(0, 4, 1, 2, 3).flatten(1, 2)


def _largest_singular_values(matrices: Tensor) -> Tensor:
    """The largest singular value of every matrix of a stack, from the eigenvalues of the smaller Gram matrix."""
    if matrices.shape[-1] == 1 or matrices.shape[-2] == 1:
        return torch.linalg.vector_norm(matrices, dim=(-2, -1))
    gram = matrices @ matrices.mH if matrices.shape[-2] <= matrices.shape[-1] else matrices.mH @ matrices
    return torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0).sqrt()


def _largest_of_stack(matrices: Tensor) -> Tensor:
    """max over axis 1 of the largest singular values, for (layers, many, a, b); hopeless candidates are dropped first.

    Squaring a Gram matrix five times brackets its largest eigenvalue within side^(1/32): what cannot reach the largest
    lower end needs no eigenvalues.
    """
    if min(matrices.shape[-2:]) < 32:
        return _largest_singular_values(matrices).amax(1)
    upper = gram_bound(matrices, iterations=5)
    lower = upper / min(matrices.shape[-2:]) ** (1 / 64)
    best = []
    for stack, high, low in zip(matrices, upper, lower, strict=True):
        best.append(_largest_singular_values(stack[high >= low.max()]).max())
    return torch.stack(best)


def gram_bound(matrices: Tensor, iterations: int) -> Tensor:
    """The Schatten norm of order 2^(iterations + 1), an upper bound of the largest singular value (Gram iteration).

    (sum_i sigma_i^p)^(1/p), p = 2^(iterations + 1), by repeated squaring of the Gram matrix; differentiable, homogeneous
    of degree one, and at most min(a, b)^(1/p) times too large.
    """
    gram = matrices @ matrices.mH if matrices.shape[-2] <= matrices.shape[-1] else matrices.mH @ matrices
    scale = torch.linalg.matrix_norm(gram).clamp_min(torch.finfo(torch.float64).tiny)
    log, gram = scale.log() / 2, gram / scale[..., None, None]
    for i in range(1, iterations):
        gram = gram @ gram
        norm = torch.linalg.matrix_norm(gram).clamp_min(torch.finfo(torch.float64).tiny)
        log, gram = log + norm.log() / 2 ** (i + 1), gram / norm[..., None, None]
    return log.exp()


def _spectrum_grid(
    geometry: Geometry, kernel: tuple[int, ...], size: tuple[int, ...] | None, largest: int, coarse: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...], float]:
    """A sound grid: (stride to merge, points per axis, whether an axis is sampled size-free, factor).

    sigma(T) <= factor * max over the grid of |S|.
    """
    merge, points, free, factor = [], [], [], 1.0
    for axis in range(geometry.axes):
        n = None if size is None else size[axis]
        s, d, k = geometry.stride[axis], geometry.dilation[axis], kernel[axis]
        b, a = geometry.before[axis], geometry.after[axis]
        if geometry.circular and (n is None or n % s):
            s = 1  # outputs of a stride are a part of those of stride 1
        lowest, highest = -b // s, (d * (k - 1) - b) // s
        span = highest - lowest + 1 if s > 1 else k
        exact = None
        if geometry.circular:
            wraps = b + a - d * (k - 1) > 0
            if wraps and n is None:
                raise NoBoundKnown("circular padding wider than the kernel needs an input size for its bound.")
            if n is not None:
                m = (n + b + a - d * (k - 1) - 1) // s + 1
                exact = n // s
                factor *= math.sqrt(math.ceil(m / exact))  # an output that is repeated counts as often
        elif n is not None:
            m = (n + b + a - d * (k - 1) - 1) // s + 1
            exact = max(-(-n // s) + max(0, -lowest), m + max(0, highest), m)
        size_free = exact is None or exact > max(largest, 2 * span)
        if size_free or span == 1:
            exact = 1 if span == 1 else max(coarse, 4 * (span - 1))
            factor /= math.cos(math.pi * (span - 1) / (2 * exact))
        merge.append(s)
        points.append(exact)
        free.append(size_free)
    return tuple(merge), tuple(points), tuple(free), factor


def _fourier_bound(weight: Tensor, geometry: Geometry, size: tuple[int, ...] | None) -> Tensor:
    kernel = tuple(weight.shape[3:])
    merge, points, free, factor = _spectrum_grid(geometry, kernel, size, LARGEST_GRID, COARSE)
    holes = not all(f or p == 1 or d == 1 for f, p, d in zip(free, points, geometry.dilation, strict=True))
    if holes and any(free):  # mixed axes of a dilated kernel: sample every axis size-free, where holes do not matter
        merge, points, free, factor = _spectrum_grid(geometry, kernel, None, LARGEST_GRID, COARSE)
        holes = False
    bound = _largest_of_stack(_symbols(_taps(weight, geometry, merge, dilated=holes or max(merge) > 1), points)) * factor
    if any(free) or geometry.circular:
        return bound
    # Every larger grid is sound as well, and the maximum is not monotone in the grid: take the best of three.
    for extra in (1, 2):
        larger = tuple(p if p == 1 else p + extra for p in points)
        taps = _taps(weight, geometry, merge)
        bound = torch.minimum(bound, _largest_of_stack(_symbols(taps, larger)) * factor)
    return bound


# ---------------------------------------------------------------------------------------------- what the library calls


def dense_matrix(weight: Tensor, geometry: Geometry, size: tuple[int, ...]) -> Tensor:
    """The operator of one layer as a matrix, (out * outputs, in * inputs). weight: (out, in / groups, *kernel)."""
    channels = weight.shape[1] * geometry.groups
    n = channels * math.prod(size)
    basis = torch.eye(n, dtype=weight.dtype, device=weight.device).reshape(n, channels, *size)
    if geometry.axes == 0:
        return weight
    stack = _pad(geometry, basis)
    zero = (0,) * geometry.axes
    y = torch.convolution(stack, weight, None, geometry.stride, zero, geometry.dilation, False, zero, geometry.groups)
    return y.flatten(1).T


def norm_bounds(weight: Tensor, geometry: Geometry, size: tuple[int, ...] | None) -> Tensor:
    """Proven upper bounds of sigma for a stack of layers of one shape, (layers,), float64.

    `size` is the spatial size of the input; None asks for the supremum over all sizes.
    """
    weight = weight.detach().double()
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("a weight holds NaN or infinity; no bound exists. Restore the layer from a checkpoint.")
    if geometry.axes == 0:
        return _largest_singular_values(weight) * (1 + ROUNDING_MARGIN)
    if size is not None and _is_small(weight, geometry, size):
        groups = weight.unflatten(1, (geometry.groups, -1)).flatten(0, 1)
        alone = Geometry(geometry.stride, geometry.before, geometry.after, geometry.dilation, 1, geometry.circular)
        dense = torch.stack([dense_matrix(w, alone, size) for w in groups])
        exact = _largest_singular_values(dense).unflatten(0, (len(weight), -1)).amax(1)
        return exact * (1 + ROUNDING_MARGIN)
    if not geometry.circular or size is not None:
        return _fourier_bound(weight, geometry, size) * (1 + ROUNDING_MARGIN)
    return _fourier_bound(weight, geometry, None) * (1 + ROUNDING_MARGIN)


def _is_small(weight: Tensor, geometry: Geometry, size: tuple[int, ...]) -> bool:
    inputs = weight.shape[2] * math.prod(size)
    outputs = weight.shape[1] // geometry.groups * math.prod(geometry.output_size(size, tuple(weight.shape[3:])))
    return min(inputs, outputs) <= DENSE_LIMIT and max(inputs, outputs) <= 8 * DENSE_LIMIT


def cheap_norm_bounds(weight: Tensor, geometry: Geometry, size: tuple[int, ...] | None, iterations: int) -> Tensor:
    """Sound upper bounds from Gram iteration, differentiable in the weight, for normalising at every training step."""
    weight = weight.double()
    if geometry.axes == 0:
        return gram_bound(weight, iterations)
    merge, points, _, factor = _spectrum_grid(geometry, tuple(weight.shape[3:]), size, largest=12, coarse=12)
    return gram_bound(_symbols(_taps(weight, geometry, merge), points), iterations).amax(1) * factor


def norm_bound(layer: nn.Module, input_shape: tuple[int, ...] | None = None) -> float:
    """A proven upper bound of the norm of a Linear or convolution layer for inputs (channels, *size), as a float.

    Without `input_shape` the bound holds for every input size.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> _ = nn.init.eye_(layer.weight)
    >>> round(norm_bound(layer), 6)
    1.0
    """
    geometry, weight = Geometry.of(layer), layer.weight
    assert isinstance(weight, Tensor)
    return float(norm_bounds(weight[None], geometry, spatial_size(geometry, weight, input_shape)))


def norm_estimate(layer: nn.Module, input_shape: tuple[int, ...] | None = None, iterations: int = 200) -> float:
    """The norm from below, by power iteration in float64 from a fixed start. For a convolution a size is needed."""
    geometry, weight = Geometry.of(layer), layer.weight
    assert isinstance(weight, Tensor)
    size = spatial_size(geometry, weight, input_shape)
    stack = weight.detach().double()[None]
    v = start_vector(stack, geometry, default_size(geometry, weight) if size is None else size)
    return float(converged_power_iteration(stack, geometry, v, limit=iterations)[0])


def circular_singular_values(layer: nn.Module, input_shape: tuple[int, ...]) -> Tensor:
    """All singular values, descending, of a circular convolution of stride 1 that keeps the size (exact, float64)."""
    geometry, weight = Geometry.of(layer), layer.weight
    assert isinstance(weight, Tensor)
    size = spatial_size(geometry, weight, input_shape)
    if not geometry.circular or size is None or geometry.output_size(size, tuple(weight.shape[2:])) != size:
        raise ValueError(
            "exact Fourier singular values need padding_mode='circular', stride 1 and an output of the input's size; "
            f"got {layer}. Use norm_bound for an upper bound."
        )
    taps = _taps(weight.detach().double()[None], geometry, (1,) * geometry.axes)
    # All frequencies are wanted here, not one of each conjugate pair: undo the halving of the first axis by weight.
    matrices = _symbols(taps, size)[0].unflatten(0, (size[0] // 2 + 1, -1))
    values = torch.linalg.svdvals(matrices)
    mirrored = values[1 : (size[0] + 1) // 2]
    return torch.cat([values.flatten(), mirrored.flatten()]).sort(descending=True).values


def spatial_size(geometry: Geometry, weight: Tensor, input_shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The spatial part of an input shape (channels, *size), checked against the layer."""
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
    """The size a convolution's norm is estimated at before it has seen an input: a few kernels wide."""
    kernel = weight.shape[-geometry.axes :] if geometry.axes else ()
    return tuple(max(8, 2 * d * k + 2) for k, d in zip(kernel, geometry.dilation, strict=True))


def start_vector(weight: Tensor, geometry: Geometry, size: tuple[int, ...]) -> Tensor:
    """A reproducible start for power iteration without structure (a chirp), (layers, in, *size), of unit norm."""
    shape = (weight.shape[2] * geometry.groups, *size)
    i = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64, device=weight.device)
    v = torch.cos(math.sqrt(2) * i.square())
    return (v / v.norm()).to(weight.dtype).reshape(shape).expand(len(weight), *shape).clone()
