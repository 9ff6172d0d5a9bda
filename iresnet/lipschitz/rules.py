"""How a layer's norm is taken at a refresh: the paper's power iteration, or a bound that holds at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from .. import spectral
from ..spectral import Geometry
from ..spelling import at_least


class NormRule(Protocol):
    """How a layer's norm is taken at a refresh: (sigma, the next v, G) with sigma = <W, G>, for a stack of layers.

    `size` is that of the largest input met, None where a convolution has met none; v has a size in any case.
    """

    @property
    def differentiate(self) -> bool: ...

    def refresh(
        self, weight: Tensor, geometry: Geometry, size: tuple[int, ...] | None, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def settle(
        self, weight: Tensor, geometry: Geometry, size: tuple[int, ...] | None, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True)
class PowerIteration:
    """The paper's rule: `iterations` steps of power iteration a refresh. An estimate from below: see `certify`.

    With `differentiate=False` sigma counts as a constant in the gradient: the alternative where a saturated layer seems
    to have stopped learning.
    """

    iterations: int = 1
    differentiate: bool = True

    def __post_init__(self) -> None:
        at_least(1, iterations=self.iterations)

    def refresh(
        self, weight: Tensor, geometry: Geometry, size: tuple[int, ...] | None, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return spectral.power_iteration(weight, geometry, _nudge(weight, geometry, v), self.iterations)

    def settle(
        self, weight: Tensor, geometry: Geometry, size: tuple[int, ...] | None, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # As much of the fixed vector as of v: convergence is told by sigma, which a small part moves too slowly.
        return spectral.converged_power_iteration(weight, geometry, _nudge(weight, geometry, v, 1.0))


#: How much of a fixed vector of unit norm is added to v before every refresh.
NUDGE = 1e-4

_starts: dict[tuple[object, ...], Tensor] = {}


def _nudge(weight: Tensor, geometry: Geometry, v: Tensor, share: float = NUDGE) -> Tensor:
    """v and a share of a vector without structure.

    Where an operator has invariant parts (groups, diagonals), v would never leave the one it has converged to, when
    another becomes the largest. Sigma is second order in it.
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
    """The strict rule: a sound upper bound (Schatten norm of order 2^(iterations + 1)) instead of an estimate.

    The layer's norm is at most the coefficient after every refresh, not only at the end, for inputs of every size; it
    is used a little less fully.
    """

    iterations: int = 6
    differentiate: bool = True

    #: Covers the rounding of <W, G> and of the scaled weight to float32.
    MARGIN = 1e-5

    def __post_init__(self) -> None:
        at_least(2, iterations=self.iterations)

    def refresh(
        self, weight: Tensor, geometry: Geometry, size: tuple[int, ...] | None, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        def bound(w: Tensor) -> Tensor:
            # For every size, so that an input unlike any before breaks nothing.
            return spectral.cheap_norm_bounds(w, geometry, None, self.iterations).sum()

        gradient = cast(Tensor, torch.func.grad(bound)(weight.detach().double()))
        # The bound is homogeneous of degree one, so <W, G> is the bound itself. A zero weight has norm zero.
        gradient = (torch.nan_to_num(gradient) * (1 + self.MARGIN)).to(weight.dtype)
        return (weight * gradient).flatten(1).sum(1), v, gradient

    settle = refresh
