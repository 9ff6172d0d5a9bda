"""Dense layers h -> (a h, b f(h)), which concatenate their input with a function of it.

With a^2 + b^2 = 1,

    ||(a h, b f(h)) - (a k, b f(k))||^2 <= (a^2 + b^2 Lip(f)^2) ||h - k||^2,

so a sequence of such layers with Lip(f) <= 1 has Lipschitz constant 1 at any depth, and the layers after it determine
the constant of g.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from ..spectral import ROUNDING_MARGIN


class Concatenated(nn.Module):
    """(cos(t) h, sin(t) f(h)), concatenated along dimension 1, with a learned angle t, initially pi / 4.

    >>> Concatenated(nn.Linear(2, 3))(torch.zeros(5, 2)).shape
    torch.Size([5, 5])
    """

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        for layer in f.modules():
            if getattr(layer, "inplace", False):
                raise ValueError(f"f must not modify its input in place; got {layer}. Use inplace=False.")
        self.f = f
        self.angle = nn.Parameter(torch.tensor(math.pi / 4))

    def forward(self, h: Tensor) -> Tensor:
        return concatenate_weighted(mixing_weights(self.angle), h, cast(Tensor, self.f(h)))

    def constant(self, of_input: float, of_f: float) -> float:
        """Return the Lipschitz constant of the output, given those of h and of f(h)."""
        a, b = math.cos(float(self.angle.detach())), math.sin(float(self.angle.detach()))
        return math.hypot(a * of_input, b * of_f) * (1 + ROUNDING_MARGIN)


def mixing_weights(angle: Tensor) -> Tensor:
    """Return (cos(t), sin(t))."""
    return torch.stack([angle.cos(), angle.sin()])


def concatenate_weighted(weights: Tensor, h: Tensor, y: Tensor) -> Tensor:
    """Return (a h, b y) with weights (a, b), concatenated along dimension 1."""
    a, b = weights.unbind()
    return torch.cat([a * h, b * y], dim=1)
