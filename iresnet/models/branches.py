"""The branches g of residual blocks, contractive by construction, and a density made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

from torch import nn

from ..base import DiagonalNormal
from ..chain import Chain
from ..flow import Flow
from ..lipschitz import Concatenated, Conditioned, NormRule, Potential, check_contractive, constrain_
from ..logdet import Estimator
from ..residual import ResidualBlock
from ..spelling import at_least
from ..transform import Shape, Transform
from ..transforms.elementary import ActNorm

Activation: TypeAlias = Callable[[], nn.Module]


def linears(dimension: int, hidden: Sequence[int]) -> list[nn.Linear]:
    """Linear layers of these hidden widths, from so many dimensions back to as many."""
    if dimension < 1 or any(h < 1 for h in hidden) or not hidden:
        raise ValueError(f"dimension and hidden widths must be positive; got {dimension} and {tuple(hidden)}.")
    return [nn.Linear(a, b) for a, b in pairwise((dimension, *hidden, dimension))]


def convolutions(channels: int, hidden: int, kernels: Sequence[int]) -> list[nn.Conv2d]:
    """Convolutions with these kernels that keep the size of an image, and the last of them its channels."""
    if channels < 1 or hidden < 1:
        raise ValueError(f"channels and hidden must be positive; got {channels} and {hidden}.")
    if not kernels or any(k < 1 or k % 2 == 0 for k in kernels):
        raise ValueError(f"kernels must be odd, so that the size is kept; got {tuple(kernels)}.")
    widths = pairwise((channels, *[hidden] * (len(kernels) - 1), channels))
    return [nn.Conv2d(a, b, k, padding=k // 2) for (a, b), k in zip(widths, kernels, strict=True)]


def alternate(
    layers: Sequence[nn.Linear | nn.Conv2d],
    between: Callable[[int], Sequence[nn.Module]],
    *,
    preactivation: bool = False,
) -> nn.Sequential:
    """Layers with what `between` makes for so many channels between them, and before the first if asked."""
    steps: list[nn.Module] = []
    for i, layer in enumerate(layers):
        channels = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
        steps += [*(between(channels) if i or preactivation else []), layer]
    return nn.Sequential(*steps)


def potential(shape: Shape, width: int, activation: nn.Module, kernel: int = 0) -> nn.Module:
    """-W' activation(W x + b) for x of this shape: W a convolution to so many channels that keeps the size of an image,
    or with kernel 0 a matrix to so many units."""
    if kernel:
        if kernel % 2 == 0:
            raise ValueError(f"kernels must be odd, so that the size is kept, or 0 for a dense layer; got {kernel}.")
        return Potential(nn.Conv2d(shape[0], width, kernel, padding=kernel // 2), activation)
    dense = Potential(nn.Linear(math.prod(shape), width), activation)
    return dense if len(shape) == 1 else nn.Sequential(nn.Flatten(), dense, nn.Unflatten(1, shape))


def dense(shape: Shape, growth: int, activation: Activation, kernels: Sequence[int]) -> nn.Sequential:
    """Layers that each add so many channels to those they are given, and one back to the channels of x.

    For images the kernels are those of convolutions, the last one's included; for rows only their number counts.
    """
    steps, channels = list[nn.Module](), shape[0]
    for kernel in kernels[:-1]:
        steps.append(Concatenated(nn.Sequential(_layer(channels, growth, kernel, len(shape)), activation())))
        channels += growth
    return nn.Sequential(*steps, _layer(channels, shape[0], kernels[-1], len(shape)))


def _layer(inputs: int, outputs: int, kernel: int, axes: int) -> nn.Module:
    if axes == 1:
        return nn.Linear(inputs, outputs)
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"kernels must be odd, so that the size is kept; got {kernel}.")
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)


def _constrain(
    g: nn.Sequential, coefficient: float | None, lipschitz: float | None, norm: NormRule | None
) -> nn.Sequential:
    if coefficient is None and lipschitz is None:
        lipschitz = 0.9
    constrain_(g, coefficient, lipschitz=lipschitz, norm=norm)
    return g


def contractive_mlp(
    dimension: int,
    hidden: Sequence[int] = (64, 64),
    *,
    coefficient: float | None = None,
    lipschitz: float | None = None,
    activation: Activation = nn.ELU,
    context: int | None = None,
    norm: NormRule | None = None,
) -> nn.Module:
    """A contraction of R^dimension: linear layers with activations between them.

    Give `coefficient` per layer or `lipschitz` for the whole (default 0.9). With `context`, a network of that many
    numbers shifts the first hidden layer, freely: the map stays a contraction in x for every context.

    >>> contractive_mlp(2, hidden=(8,))(__import__("torch").zeros(5, 2)).shape
    torch.Size([5, 2])
    """
    check_contractive(activation())
    g = alternate(linears(dimension, hidden), lambda _: [activation()])
    _constrain(g, coefficient, lipschitz, norm)
    if context is None:
        return g
    embed = nn.Sequential(nn.Linear(context, 64), nn.SiLU(), nn.Linear(64, hidden[0]))
    return Conditioned(g[:1], embed, g[1:])


def contractive_convnet(
    channels: int,
    hidden: int = 64,
    *,
    kernels: Sequence[int] = (3, 1, 3),
    coefficient: float | None = None,
    lipschitz: float | None = None,
    activation: Activation = nn.ELU,
    preactivation: bool = False,
    norm: NormRule | None = None,
) -> nn.Sequential:
    """The paper's convolutional branch (3x3, 1x1, 3x3 by default), keeping channels and size; contractive as above.

    `preactivation` puts an activation before the first layer as well, as the paper's classifiers do.
    """
    check_contractive(activation())
    g = alternate(convolutions(channels, hidden, kernels), lambda _: [activation()], preactivation=preactivation)
    return _constrain(g, coefficient, lipschitz, norm)


def mlp_flow(
    dimension: int,
    blocks: int = 16,
    hidden: Sequence[int] = (64, 64, 64),
    *,
    coefficient: float | None = None,
    lipschitz: float | None = None,
    activation: Activation = nn.ELU,
    context: int | None = None,
    norm: NormRule | None = None,
    estimator: Estimator | None = None,
) -> Flow:
    """A density on R^dimension: residual blocks of `contractive_mlp`, an ActNorm first and after each (App. C.3)."""
    at_least(1, blocks=blocks)
    chain: list[Transform] = [ActNorm(dimension)]
    for _ in range(blocks):
        g = contractive_mlp(
            dimension,
            hidden,
            coefficient=coefficient,
            lipschitz=lipschitz,
            activation=activation,
            context=context,
            norm=norm,
        )
        chain += [ResidualBlock(g), ActNorm(dimension)]
    return Flow(Chain(*chain), DiagonalNormal(dimension), estimator=estimator, event_shape=(dimension,))
