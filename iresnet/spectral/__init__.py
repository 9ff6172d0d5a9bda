"""Spectral norms of linear layers and convolutions: lower estimates, exact values, and proven upper bounds.

A layer is a linear operator T. Its Lipschitz constant is its largest singular value sigma(T), computed in three ways:

* `power_iteration` (Eq. 2 of the paper, on the operator and its transpose): cheap, converges from below.
* `circular_singular_values` (Sec. 2.1): all singular values, where the operator is a circulant.
* `norm_bound`: a proven upper bound, for every supported kind of layer.

Reading order: `geometry` (what is not the weight), `operator` (a layer as a linear map), `fourier` (why the upper bound
holds), `bounds`.
"""

from ..trust import NoBoundKnown
from .bounds import (
    DENSE_LIMIT,
    ROUNDING_MARGIN,
    absolute_norm,
    cheap_norm_bounds,
    circular_singular_values,
    matrix_norm_bounds,
    norm_bound,
    norm_bounds,
    norm_estimate,
    rounding_margin,
    singular_values,
)
from .fourier import fourier_bound, gram_bound
from .geometry import Geometry, weight_shape
from .operator import (
    apply_adjoint,
    apply_operator,
    converged_power_iteration,
    default_size,
    dense_matrix,
    power_iteration,
    spatial_size,
    start_vector,
    weight_gradient,
)

__all__ = [
    "DENSE_LIMIT",
    "ROUNDING_MARGIN",
    "Geometry",
    "NoBoundKnown",
    "absolute_norm",
    "apply_adjoint",
    "apply_operator",
    "cheap_norm_bounds",
    "circular_singular_values",
    "converged_power_iteration",
    "default_size",
    "dense_matrix",
    "fourier_bound",
    "gram_bound",
    "matrix_norm_bounds",
    "rounding_margin",
    "norm_bound",
    "norm_bounds",
    "norm_estimate",
    "power_iteration",
    "singular_values",
    "spatial_size",
    "start_vector",
    "weight_gradient",
    "weight_shape",
]
