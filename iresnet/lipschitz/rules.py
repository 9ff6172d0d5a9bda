"""How a refresh computes the norm of a layer: power iteration (Eq. 2), or an upper bound by Gram iteration.

Power iteration follows the weights from step to step, and lags where one step changes them much: at a learning rate of
3e-3, Adam outruns it, and layers exceed their coefficient (tests/test_lipschitz.py shows a flow that does). For small
matrices the upper bound costs about as much, so `default_rule` uses it for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

import torch
from torch import Tensor

from .. import spectral
from ..spectral import Geometry
from ..spelling import at_least

Size: TypeAlias = tuple[int, ...] | None

#: (sigma, the new v, G) with sigma = <W, G>, for a stack of layers.
Norms: TypeAlias = tuple[Tensor, Tensor, Tensor]


class NormRule(Protocol):
    """Computes the norms of a stack of layers: `refresh` once per training step, `settle` to convergence.

    `size` is the largest input size seen; None if a convolution has seen no input. v always has a spatial size.
    """

    @property
    def differentiate(self) -> bool: ...

    def refresh(self, weight: Tensor, geometry: Geometry, size: Size, v: Tensor) -> Norms: ...

    def settle(self, weight: Tensor, geometry: Geometry, size: Size, v: Tensor) -> Norms: ...


@dataclass(frozen=True)
class PowerIteration:
    """The rule of the paper: `iterations` steps of power iteration per refresh. It estimates from below; see `certify`.

    With `differentiate=False`, sigma is a constant in the gradient; try it where a saturated layer stops learning.
    """

    iterations: int = 1
    differentiate: bool = True

    def __post_init__(self) -> None:
        at_least(1, iterations=self.iterations)

    def refresh(self, weight: Tensor, geometry: Geometry, size: Size, v: Tensor) -> Norms:
        return spectral.power_iteration(weight, geometry, _nudge(weight, geometry, v), self.iterations)

    def settle(self, weight: Tensor, geometry: Geometry, size: Size, v: Tensor) -> Norms:
        # Equal shares of v and the fixed vector: convergence is judged by sigma, which a small share moves too slowly.
        return spectral.converged_power_iteration(weight, geometry, _nudge(weight, geometry, v, 1.0))


#: The share of a fixed unit vector that is added to v before every refresh.
NUDGE = 1e-4

_starts: dict[tuple[object, ...], Tensor] = {}


def _nudge(weight: Tensor, geometry: Geometry, v: Tensor, share: float = NUDGE) -> Tensor:
    """Add a share of a fixed, unstructured unit vector to v.

    If an operator has invariant subspaces (groups, diagonals), v could otherwise never leave the one it has converged
    to when another becomes the largest. The effect on sigma is second order in the share.
    """
    size = tuple(v.shape[2:])
    in_graph = weight.is_cuda and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or in_graph:
        return v + share * spectral.start_vector(weight[:1], geometry, size)
    key = (v.shape[1:], v.dtype, v.device)
    if key not in _starts:
        _starts[key] = spectral.start_vector(weight[:1], geometry, size)
    return torch.add(v, _starts[key], alpha=share)


@dataclass(frozen=True)
class GramIteration:
    """The strict rule: an upper bound (the Schatten norm of order 2^(iterations + 1)) instead of an estimate.

    The norm of the layer is at most the coefficient after every refresh, for inputs of any size, not only at the end of
    training. In exchange it stays a little below the coefficient.
    """

    iterations: int = 6
    differentiate: bool = True

    #: Covers rounding of <W, G> and of the scaled weight in float32.
    MARGIN = 1e-5

    def __post_init__(self) -> None:
        at_least(2, iterations=self.iterations)

    def refresh(self, weight: Tensor, geometry: Geometry, size: Size, v: Tensor) -> Norms:
        if not geometry.axes:
            sigma, new, gradient = spectral.matrix_norm_bounds(weight.detach(), self.iterations)
            return sigma * (1 + self.MARGIN), torch.where(sigma[:, None] > 0, new, v), gradient * (1 + self.MARGIN)

        def bound(w: Tensor) -> Tensor:
            # For any input size, so that the bound also holds for a size not seen before.
            return spectral.cheap_norm_bounds(w, geometry, None, self.iterations).sum()

        gradient = cast(Tensor, torch.func.grad(bound)(weight.detach().double()))
        # The bound is homogeneous of degree one, so <W, G> equals the bound. A zero weight has norm zero.
        gradient = (torch.nan_to_num(gradient) * (1 + self.MARGIN)).to(weight.dtype)
        return (weight * gradient).flatten(1).sum(1), v, gradient

    settle = refresh


#: The most inputs or outputs, whichever is fewer, of a linear layer with the strict rule by default; its iterations,
#: with which the bound is at most 128^(1/512), .95 %, above the norm.
STRICT_UP_TO, STRICT_ITERATIONS = 128, 8


def default_rule(shape: tuple[int, ...]) -> NormRule:
    """Return the rule for a weight of this shape: strict for small matrices, power iteration for all others."""
    strict = len(shape) == 2 and min(shape) <= STRICT_UP_TO
    return GramIteration(STRICT_ITERATIONS) if strict else PowerIteration()
