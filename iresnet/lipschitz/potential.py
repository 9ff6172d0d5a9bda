"""g(x) = -W' s(W x + b), the negative gradient of a convex function, so that x + g(x) never expands distances.

If s acts elementwise with slopes in [0, a], the Jacobian -W' D W with 0 <= D <= a is symmetric with eigenvalues in
[-L, 0], L = a ||W||^2. For L < 1 the block x + g(x) is invertible (Theorem 1), with tighter bounds than Lemmas 2 and 7:
Lip(F) <= 1, and ln det lies in [d ln(1 - L), 0]. The block is one step of gradient descent on the sum of S(W x + b),
where S' = s. A chain of such blocks has Lip(F) <= 1 at any depth.
"""

from __future__ import annotations

from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..spectral import Geometry, NoBoundKnown
from .activations import is_monotone
from .refresh import prepare_layer

Layer: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


class Potential(nn.Module):
    """-W' activation(W x + b), for W and b of `layer`: Lip <= ||W||^2 times the largest slope of the activation.

    Constrain the layer to sqrt(c), or use `constrain_(g, lipschitz=c)`. A convolution must have stride 1 and equal zero
    padding on both sides; the activation must be elementwise and never decrease.

    >>> from iresnet import ResidualBlock, constrain_
    >>> block = ResidualBlock(constrain_(Potential(nn.Linear(2, 16), nn.ELU()), lipschitz=0.9))
    >>> block.stretch().forward
    1.0
    """

    def __init__(self, layer: Layer, activation: nn.Module) -> None:
        super().__init__()
        self.layer, self.activation = layer, activation
        self.check()

    def check(self) -> None:
        """Raise `NoBoundKnown` if the potential is not convex, or if `forward` does not compute its gradient."""
        if not is_monotone(self.activation):
            raise NoBoundKnown(
                f"the activation of a Potential must be elementwise and never decrease; got {self.activation}. "
                "Use ELU, ReLU, Softplus(threshold=40) or Tanh."
            )
        geometry = Geometry.of(self.layer)
        if geometry.circular or geometry.before != geometry.after or set(geometry.stride) - {1}:
            raise NoBoundKnown(
                "the layer of a Potential must have stride 1 and equal zero padding on both sides; "
                f"got {self.layer}. Use an odd kernel with padding=kernel // 2."
            )

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        prepare_layer(layer, (x,))
        weight = layer.weight  # the same tensor for W and W', so that J is exactly symmetric
        if isinstance(layer, nn.Linear):
            return -functional.linear(self.activation(functional.linear(x, weight, layer.bias)), weight.mT)
        g, none = Geometry.unchecked(layer), (0,) * (weight.dim() - 2)
        h = torch.convolution(x, weight, layer.bias, g.stride, g.before, g.dilation, False, none, g.groups)
        h = cast(Tensor, self.activation(h))
        return -torch.convolution(h, weight, None, g.stride, g.before, g.dilation, True, none, g.groups)
