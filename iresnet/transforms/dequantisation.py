"""Dequantisation noise for discrete data: uniform, or learned (variational; Ho et al., Flow++, ICML 2019).

P(x) = E_q [p(x + u) / q(u | x)] for every density q of the noise u in [0, 1)^d that is positive where p is, so that

    ln P(x) >= E_q [ln p(x + u) - ln q(u | x)]

by Jensen's inequality. Uniform noise has ln q = 0; the closer q is to p within the cell [x, x + 1)^d, the smaller the
gap. With uniform noise the flow has to model the edges of these cells; with learned noise it need not.

    u = sigmoid(v),    v = C_n o ... o C_1 (t(x) + e^s(x) e),    e ~ N(0, I)

with affine couplings C_i whose conditioners take the image as context. ln q is exact: ln N(e; 0, I) minus all
log-determinants.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..batch import Shape
from ..compiler import drawing_from
from ..shard import draw_rows
from ..tree import modules_of
from .columns import ColumnTransform
from .conditioner import zero_last_layer_
from .coupling import MAX_LOG_SCALE, AffineCoupling
from .elementary import Squeeze
from .given import Given
from .preprocess import dequantise
from .split import Halves

#: A normal variable times this is close to logistic, so that its sigmoid is close to uniform: the initial noise.
LOGISTIC_SCALE = 1.702


class LearnedNoise(nn.Module):
    """Computes the noise u in (0, 1) and ln q(u | x) from images x of integers and normal e.

    `width` is the number of hidden channels, `steps` the number of couplings. The height and width of the images must
    be even, since they are squeezed first.

    >>> noise, x = LearnedNoise((1, 4, 4), levels=16), torch.zeros(2, 1, 4, 4)
    >>> u, log_q = noise(x, torch.randn(2, 1, 4, 4))
    >>> u.shape, log_q.shape
    (torch.Size([2, 1, 4, 4]), torch.Size([2]))
    """

    def __init__(self, shape: Shape, levels: int, width: int = 32, steps: int = 4) -> None:
        super().__init__()
        if width < 1 or steps < 0:
            raise ValueError(f"width must be at least 1 and steps at least 0; got width {width}, steps {steps}.")
        self.levels, self.squeeze = levels, Squeeze()
        channels = self.squeeze.output_shape(shape)[0]
        self.features = nn.Sequential(_conv(channels, width), nn.SiLU(), _conv(width, width), nn.SiLU())
        self.first = zero_last_layer_(nn.Sequential(nn.Conv2d(width, 2 * channels, 1)))
        self.couplings = nn.ModuleList(
            AffineCoupling(ImageConditioner(channels // 2, width, channels), Halves(swapped=i % 2 == 1))
            for i in range(steps)
        )

    def forward(self, x: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        """Return (u, ln q(u | x)) for a batch of integers x and normal e of the same shape, in the model's dtype."""
        e = e.to(next(self.first.parameters()).dtype)
        features, e = self.features(self.squeeze(2 * x.to(e.dtype) / self.levels - 1)), self.squeeze(e)
        r, t = self.first(features).to(e.dtype).chunk(2, dim=1)
        s = MAX_LOG_SCALE * torch.tanh(r / MAX_LOG_SCALE) + math.log(LOGISTIC_SCALE)
        v, logdet = t + s.exp() * e, _sum(s)
        for coupling in self.couplings:
            v, more = cast(AffineCoupling, coupling).forward_and_logdet(v, features)
            logdet = logdet + more
        logdet = logdet + _sum(F.logsigmoid(v) + F.logsigmoid(-v))
        return self.squeeze.inverse(torch.sigmoid(v)), _sum(-0.5 * (e.square() + math.log(2 * math.pi))) - logdet


class ImageConditioner(nn.Module):
    """A conditioner that takes the kept part of the noise and, as context, features of the image."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        inside = [_conv(inputs + width, width), nn.SiLU(), nn.Conv2d(width, width, 1), nn.SiLU()]
        self.layers = zero_last_layer_(nn.Sequential(*inside, _conv(width, outputs)))

    def forward(self, kept: Tensor, context: Tensor) -> Tensor:
        # Bounded by tanh, so that rare extreme values get the output of moderate ones.
        return cast(Tensor, self.layers(torch.cat([torch.tanh(kept / 4), context.to(kept.dtype)], dim=1)))


def dequantise_for(
    flow: nn.Module,
    x: Tensor,
    levels: int | None,
    generator: torch.Generator | None = None,
    *,
    noise: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (x + u, ln q(u | x)) with the noise of this flow; (x, 0) for real numbers.

    Images of integers have `levels`. The columns of a table have none; a flow that was built for discrete columns adds
    uniform noise from the cell around each of their values. ln p(x + u) - ln q(u | x) is a lower bound of ln P(x) in
    expectation. `noise` is the raw noise (see `raw_noise`), the same for all samples; by default it is drawn from the
    generator.
    """
    zero = torch.zeros(len(x), device=x.device)  # ln q of uniform noise
    if levels is None:
        if (step := column_steps(flow)) is None:
            return x, zero
        u = raw_noise(flow, x.shape, x.device, generator) if noise is None else noise
        return x + (u.to(x.dtype) - 0.5) * step.to(x.dtype), zero
    if (learned := learned_noise(flow)) is None:
        return dequantise(x, levels, generator, noise=noise), zero
    e = raw_noise(flow, x.shape, x.device, generator) if noise is None else noise.expand(x.shape)
    u, log_q = learned(x, e)
    return dequantise(x, levels, noise=u), log_q


def raw_noise(flow: nn.Module, shape: Shape, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Draw the random numbers that the noise is computed from: normal if the noise is learned, otherwise uniform."""
    draw = torch.rand if learned_noise(flow) is None else torch.randn
    own = device if generator is None else generator.device
    return draw_rows(lambda s: draw(s, device=own, **drawing_from(generator)), shape).to(device)


def has_noise(flow: nn.Module, levels: int | None) -> bool:
    """Whether noise is added to the data, so that a likelihood is the mean over draws of it."""
    return levels is not None or column_steps(flow) is not None


def column_steps(flow: nn.Module) -> Tensor | None:
    """Return the steps between the values of each column of a table, 0 for real numbers; None if all are real."""
    first = next((m for m in modules_of(flow) if isinstance(m, ColumnTransform)), None)
    if first is None or not first.has_steps:
        return None
    given = getattr(flow, "transform", None)
    return given.spread(first.discrete_step) if isinstance(given, Given) else first.discrete_step


def learned_noise(flow: nn.Module) -> nn.Module | None:
    """Return the flow's learned noise, a module from (x, e) to (u, ln q), or None if its noise is uniform."""
    return getattr(flow, "dequantiser", None)


def _conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def _sum(a: Tensor) -> Tensor:
    return a.flatten(1).sum(1)
