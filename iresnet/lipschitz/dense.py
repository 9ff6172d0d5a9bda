"""h -> (a h, b f(h)): a layer that keeps what it was given beside what it makes of it (dense networks).

With a^2 + b^2 = 1 both together stretch no more than either,

    ||(a h, b f(h)) - (a k, b f(k))||^2 <= (a^2 + b^2 Lip(f)^2) ||h - k||^2,

so a chain of such layers with Lip(f) <= 1 has the constant 1 at any depth, and what follows decides that of g.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from ..spectral import ROUNDING_MARGIN


class Concatenated(nn.Module):
    """(cos(t) h, sin(t) f(h)), side by side along dimension 1, with a learned angle t, at first that of equal parts.

    >>> Concatenated(nn.Linear(2, 3))(torch.zeros(5, 2)).shape
    torch.Size([5, 5])
    """

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        for layer in f.modules():
            if getattr(layer, "inplace", False):
                raise ValueError(f"f must leave h as it is, which is kept beside f(h); got {layer}. Use inplace=False.")
        self.f = f
        self.angle = nn.Parameter(torch.tensor(math.pi / 4))

    def forward(self, h: Tensor) -> Tensor:
        return concatenate_weighted(mixing_weights(self.angle), h, cast(Tensor, self.f(h)))

    def constant(self, kept: float, made: float) -> float:
        """The Lipschitz constant, for those of h and of f(h)."""
        a, b = math.cos(float(self.angle.detach())), math.sin(float(self.angle.detach()))
        return math.hypot(a * kept, b * made) * (1 + ROUNDING_MARGIN)


def mixing_weights(angle: Tensor) -> Tensor:
    """(cos(t), sin(t))."""
    return torch.stack([angle.cos(), angle.sin()])


def concatenate_weighted(parts: Tensor, h: Tensor, made: Tensor) -> Tensor:
    """(a h, b made), along dimension 1."""
    a, b = parts.unbind()
    return torch.cat([a * h, b * made], dim=1)
