"""Proven upper bounds on layer norms, and exact singular values.

A small operator is written out as a matrix; a large convolution is bounded in Fourier space (`fourier`). All bounds are
computed in float64 and include a margin for rounding.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from ..batch import Shape
from ..precision import float32_matmul_precision
from ..trust import check_global_state
from .fourier import (
    fourier_bound,
    gram_bound,
    gram_iteration,
    largest_singular_values,
    sample_symbols,
    symbols,
    to_stride_one,
)
from .geometry import Geometry
from .operator import (
    converged_power_iteration,
    default_size,
    dense_matrix,
    rescale,
    spatial_size,
    start_vector,
    undo_rescale,
)

#: The smallest relative margin for rounding in the float64 computation of a bound; see `rounding_margin`.
ROUNDING_MARGIN = 1e-9

#: Up to this side of the smaller Gram matrix, the operator is written as a matrix and its norm computed exactly.
DENSE_LIMIT = 576


def norm_bounds(weight: Tensor, geometry: Geometry, size: Shape | None) -> Tensor:
    """Compute proven upper bounds on sigma for a stack of layers of one shape: (layers,), float64.

    `size` is the spatial size of the input; None means the supremum over all sizes.
    """
    weight = weight.detach().double()
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("a weight must be finite; got NaN or infinity. Restore the layer from a checkpoint.")
    weight, scale = rescale(weight, tuple(range(1, weight.dim())))
    if geometry.axes == 0:
        sigma, (rows, columns) = largest_singular_values(weight), weight.shape[1:]
    elif size is not None and _fits_dense(weight, geometry, size):
        groups = weight.reshape(len(weight) * geometry.groups, -1, *weight.shape[2:])
        single = Geometry(geometry.stride, geometry.before, geometry.after, geometry.dilation, 1, geometry.circular)
        dense = torch.stack([dense_matrix(w, single, size) for w in groups])
        sigma, (rows, columns) = largest_singular_values(dense).reshape(len(weight), -1).amax(1), dense.shape[1:]
    else:
        sigma, (rows, columns) = fourier_bound(weight, geometry, size), _symbol_shape(weight, geometry)
    return undo_rescale(sigma * (1 + rounding_margin(rows, columns)), scale)


def rounding_margin(rows: int, columns: int, unit: float = 2.0**-53) -> float:
    """Return the relative margin for rounding in the largest singular value of matrices of this shape.

    The error of the Gram matrix is at most n u || |M| |M|' || <= n side u sigma^2, for sums of n products in any order,
    and so is that of its eigenvalues or its squares. Complex products and the square root make it 4 n side u. `unit` is
    the u of the arithmetic, by default that of float64.
    """
    return max(ROUNDING_MARGIN, 4 * rows * columns * unit)


def _symbol_shape(weight: Tensor, geometry: Geometry) -> tuple[int, int]:
    """Return the largest shape of the matrices S(theta) of a convolution."""
    return weight.shape[1] // geometry.groups, weight.shape[2] * math.prod(geometry.stride)


def _fits_dense(weight: Tensor, geometry: Geometry, size: Shape) -> bool:
    inputs = weight.shape[2] * math.prod(size)
    outputs = weight.shape[1] // geometry.groups * math.prod(geometry.output_size(size, tuple(weight.shape[3:])))
    return min(inputs, outputs) <= DENSE_LIMIT and max(inputs, outputs) <= 8 * DENSE_LIMIT


def cheap_norm_bounds(weight: Tensor, geometry: Geometry, size: Shape | None, iterations: int) -> Tensor:
    """Compute upper bounds by Gram iteration: differentiable, and cheap enough for every training step."""
    weight, scale = rescale(weight.double(), tuple(range(1, weight.dim())))
    if geometry.axes == 0:
        return undo_rescale(gram_bound(weight, iterations) * (1 + rounding_margin(*weight.shape[1:])), scale)
    s, factor, _ = sample_symbols(weight, geometry, size, largest=12, coarse=12)
    sigma = gram_bound(s, iterations).amax(1) * (factor * (1 + rounding_margin(*_symbol_shape(weight, geometry))))
    return undo_rescale(sigma, scale)


def matrix_norm_bounds(weight: Tensor, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bound the norms of a stack of matrices by Gram iteration in their own precision, with a margin for its rounding.

    Returns (sigma, v, G): v is close to the right singular vector of the largest singular value, u = W v / ||W v||, and
    G = (sigma / ||W v||) u v', so that <W, G> = sigma. For a zero matrix, v and G are zero.
    """
    weight, scale = rescale(weight, (1, 2))
    rows, columns = weight.shape[1:]
    margin = 1 + rounding_margin(rows, columns, torch.finfo(weight.dtype).eps / 2)
    with float32_matmul_precision("ieee", weight.device):
        sigma, gram = gram_iteration(weight, iterations)
        largest = gram.diagonal(dim1=-2, dim2=-1).argmax(-1, keepdim=True)
        column = torch.take_along_dim(gram, largest[..., None], dim=-1)
        v, _ = _unit_vectors(column if weight.shape[-2] > weight.shape[-1] else weight.mT @ column)
        u, length = _unit_vectors(weight @ v)
        gradient = u * (v * (margin * sigma[:, None, None] / length)).mT
    return undo_rescale(margin * sigma, scale), v.squeeze(-1), gradient


def _unit_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a stack of columns divided by their lengths, and the lengths; zero columns stay zero."""
    length = torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    return x / length, length


def absolute_norm(weight: Tensor, groups: int = 1, repeats: int = 1) -> float:
    """Bound the norm of |W|, as a matrix or a convolution: sqrt(largest column sum x largest row sum).

    `repeats` is how often one kernel element can read the same input, under circular padding.
    """
    out, channels = weight.shape[:2]
    size = weight.detach().abs().double().reshape(groups, out // groups, channels, -1)
    rows, columns = size.sum((2, 3)).amax(), size.sum((1, 3)).amax()
    return float(rows.sqrt() * columns.sqrt()) * math.sqrt(repeats) * (1 + 2.0**-30)


def norm_bound(layer: nn.Module, input_shape: Shape | None = None) -> float:
    """Compute a proven upper bound on the norm of a Linear or Conv layer, for inputs of shape (channels, *size).

    Without `input_shape` the bound holds for every input size.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> _ = nn.init.eye_(layer.weight)
    >>> round(norm_bound(layer), 6)
    1.0
    """
    check_global_state()
    geometry, weight, size = _unpack_layer(layer, input_shape)
    return float(norm_bounds(weight[None], geometry, size))


def _unpack_layer(layer: nn.Module, input_shape: Shape | None) -> tuple[Geometry, Tensor, Shape | None]:
    """Return the geometry and weight of a layer, and the spatial size of its input."""
    geometry, weight = Geometry.of(layer), layer.weight
    assert isinstance(weight, Tensor)
    return geometry, weight, spatial_size(geometry, weight, input_shape)


def norm_estimate(layer: nn.Module, input_shape: Shape | None = None, iterations: int = 200) -> float:
    """Estimate the norm of a layer from below, by power iteration in float64 from a fixed start."""
    geometry, weight, size = _unpack_layer(layer, input_shape)
    stack = weight.detach().double()[None]
    v = start_vector(stack, geometry, default_size(geometry, weight) if size is None else size)
    return float(converged_power_iteration(stack, geometry, v, limit=iterations)[0])


def singular_values(layer: nn.Module, input_shape: Shape) -> Tensor:
    """Compute all singular values of a Linear or Conv layer, descending, from its dense matrix in float64.

    >>> singular_values(nn.Linear(3, 2), (3,)).shape
    torch.Size([2])
    """
    geometry, weight, size = _unpack_layer(layer, input_shape)
    matrix = weight.detach().double()
    if size:
        geometry.output_size(size, tuple(weight.shape[2:]))  # raises for a size that is too small
        matrix = dense_matrix(matrix, geometry, size)
    return cast(Tensor, torch.linalg.svdvals(matrix))


def circular_singular_values(layer: nn.Module, input_shape: Shape) -> Tensor:
    """Compute all singular values, descending, of a circular convolution of stride 1 that keeps the input size."""
    geometry, weight, size = _unpack_layer(layer, input_shape)
    if not geometry.circular or size is None or geometry.output_size(size, tuple(weight.shape[2:])) != size:
        raise ValueError(
            "circular_singular_values needs padding_mode='circular', stride 1 and an output of the input's size; "
            f"got {layer}. Use norm_bound for an upper bound."
        )
    taps = to_stride_one(weight.detach().double()[None], geometry, (1,) * geometry.axes, geometry.dilation)
    # `symbols` has one of each conjugate pair of frequencies along the first axis: add the mirrored ones.
    matrices = symbols(taps, size)[0]
    values = torch.linalg.svdvals(matrices.reshape(size[0] // 2 + 1, -1, *matrices.shape[1:]))
    mirrored = values[1 : (size[0] + 1) // 2]
    return torch.cat([values.flatten(), mirrored.flatten()]).sort(descending=True).values
