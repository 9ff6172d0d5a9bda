"""The noise that integers get before a density sees them: uniform, or learned (Ho et al., Flow++, ICML 2019).

P(x) = E_q [p(x + u) / q(u | x)] for every density q of the noise u in [0, 1)^d that is positive where p is, so that

    ln P(x) >= E_q [ln p(x + u) - ln q(u | x)]

by Jensen's inequality. Uniform noise has ln q = 0; the closer q is to p within the cell of x, the smaller the gap. A
flow has to end its density at the edges of such a cell if the noise is uniform, and need not if both learn to meet.

    u = sigmoid(v),    v = C_n o ... o C_1 (t(x) + e^s(x) e),    e ~ N(0, I)

with affine couplings C_i whose conditioners see the image. ln q is exact: that of e, less all log-determinants.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..transform import Shape
from .conditioner import zeroed
from .coupling import LARGEST, AffineCoupling
from .elementary import Squeeze
from .preprocess import dequantise
from .split import Halves

#: A normal times this is close to logistic, so that its sigmoid is close to uniform: how training begins.
SPREAD = 1.702


class LearnedNoise(nn.Module):
    """u and ln q(u | x) for images x of integers and normal e, in (0, 1) for every element.

    `width` is that of the networks inside. Images of an odd size are refused, since they are squeezed first.

    >>> noise, x = LearnedNoise((1, 4, 4), levels=16), torch.zeros(2, 1, 4, 4)
    >>> u, log_q = noise(x, torch.randn(2, 1, 4, 4))
    >>> u.shape, log_q.shape
    (torch.Size([2, 1, 4, 4]), torch.Size([2]))
    """

    def __init__(self, shape: Shape, levels: int, width: int = 32, steps: int = 4) -> None:
        super().__init__()
        if width < 1 or steps < 0:
            raise ValueError(f"width must be at least 1 and steps not negative; got width {width}, steps {steps}.")
        self.levels, self.squeeze = levels, Squeeze()
        channels = self.squeeze.output_shape(shape)[0]
        self.features = nn.Sequential(_conv(channels, width), nn.SiLU(), _conv(width, width), nn.SiLU())
        self.first = zeroed(nn.Sequential(nn.Conv2d(width, 2 * channels, 1)))
        self.couplings = nn.ModuleList(
            AffineCoupling(ImageConditioner(channels // 2, width, channels), Halves(swapped=i % 2 == 1))
            for i in range(steps)
        )

    def forward(self, x: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        """(u, ln q(u | x)) of a batch of integers and of normal numbers of the same shape, in the model's precision."""
        e = e.to(next(self.first.parameters()).dtype)
        seen, e = self.features(self.squeeze(2 * x.to(e.dtype) / self.levels - 1)), self.squeeze(e)
        r, t = self.first(seen).to(e.dtype).chunk(2, dim=1)
        s = LARGEST * torch.tanh(r / LARGEST) + math.log(SPREAD)
        v, logdet = t + s.exp() * e, _sum(s)
        for coupling in self.couplings:
            v, more = cast(AffineCoupling, coupling).forward_and_logdet(v, seen)
            logdet = logdet + more
        logdet = logdet + _sum(F.logsigmoid(v) + F.logsigmoid(-v))
        return self.squeeze.inverse(torch.sigmoid(v)), _sum(-0.5 * (e.square() + math.log(2 * math.pi))) - logdet


class ImageConditioner(nn.Module):
    """The conditioner of a coupling of the noise: convolutions of what stays beside features of the image."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        inside = [_conv(inputs + width, width), nn.SiLU(), nn.Conv2d(width, width, 1), nn.SiLU()]
        self.layers = zeroed(nn.Sequential(*inside, _conv(width, outputs)))

    def forward(self, kept: Tensor, context: Tensor) -> Tensor:
        # Bounded, so that a rare number far out is answered like one that is less far.
        seen: Tensor = self.layers(torch.cat([torch.tanh(kept / 4), context.to(kept.dtype)], dim=1))
        return seen


def dequantised(
    flow: nn.Module,
    x: Tensor,
    levels: int | None,
    generator: torch.Generator | None = None,
    *,
    noise: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(x + u, ln q(u | x)) with the noise of this flow; data that are no integers as they are, and zero.

    ln p of the first less the second bounds ln P of the integers. `noise` is what the noise is made of, for all rows
    alike, in place of the generator's (see `raw_noise`).
    """
    none = torch.zeros(len(x), device=x.device)  # ln q of uniform noise
    if levels is None:
        return x, none
    if (learned := learned_noise(flow)) is None:
        return dequantise(x, levels, generator, noise=noise), none
    e = raw_noise(flow, x.shape, x.device, generator) if noise is None else noise.expand(x.shape)
    u, log_q = learned(x, e)
    return dequantise(x, levels, noise=u), log_q


def raw_noise(flow: nn.Module, shape: Shape, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """What noise is made of: numbers that are normal where it is learned, uniform where it is not."""
    draw = torch.rand if learned_noise(flow) is None else torch.randn
    return draw(shape, generator=generator, device=device if generator is None else generator.device).to(device)


def learned_noise(flow: nn.Module) -> nn.Module | None:
    """The noise that a flow has learned, if it has: any module that takes (x, e) and gives (u, ln q) as above."""
    return getattr(flow, "dequantiser", None)


def _conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def _sum(a: Tensor) -> Tensor:
    return a.flatten(1).sum(1)
