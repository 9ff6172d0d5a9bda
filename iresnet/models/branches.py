"""Branches g of residual blocks, contractive by construction, and a flow made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

from torch import nn

from ..base import DiagonalNormal
from ..batch import Shape
from ..chain import Chain
from ..flow import Flow
from ..lipschitz import Concatenated, Conditioned, NormRule, Potential, check_contractive, constrain_
from ..logdet import Estimator
from ..residual import ResidualBlock
from ..spelling import at_least
from ..transform import Transform
from ..transforms.conditioner import check_kernels, check_widths
from ..transforms.elementary import ActNorm

Activation: TypeAlias = Callable[[], nn.Module]


def linears(dimension: int, hidden: Sequence[int]) -> list[nn.Linear]:
    """Build linear layers of these hidden widths from R^dimension to itself."""
    check_widths(hidden)
    if dimension < 1 or any(h < 1 for h in hidden) or not hidden:
        raise ValueError(f"dimension and hidden widths must be positive; got {dimension} and {tuple(hidden)}.")
    return [nn.Linear(a, b) for a, b in pairwise((dimension, *hidden, dimension))]


def convolutions(channels: int, hidden: int, kernels: Sequence[int]) -> list[nn.Conv2d]:
    """Build convolutions with these kernels that keep the size of an image, from `channels` to `channels`."""
    at_least(1, channels=channels, hidden=hidden)
    check_kernels(kernels)
    widths = pairwise((channels, *[hidden] * (len(kernels) - 1), channels))
    return [nn.Conv2d(a, b, k, padding=k // 2) for (a, b), k in zip(widths, kernels, strict=True)]


def alternate(
    layers: Sequence[nn.Linear | nn.Conv2d],
    between: Callable[[int], Sequence[nn.Module]],
    *,
    preactivation: bool = False,
) -> nn.Sequential:
    """Chain layers with the modules that `between(channels)` builds between them; with `preactivation` also before."""
    steps: list[nn.Module] = []
    for i, layer in enumerate(layers):
        channels = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
        steps += [*(between(channels) if i or preactivation else []), layer]
    return nn.Sequential(*steps)


def potential(shape: Shape, width: int, activation: nn.Module, kernel: int = 0) -> nn.Module:
    """Build g(x) = -W' activation(W x + b) for x of this shape.

    W is a convolution to `width` channels that keeps the size of an image or, with kernel 0, a matrix to `width` units.
    """
    if kernel:
        if kernel % 2 == 0:
            raise ValueError(
                f"kernels must be odd, to keep the size of the image, or 0 for a dense layer; got {kernel}."
            )
        return Potential(nn.Conv2d(shape[0], width, kernel, padding=kernel // 2), activation)
    dense = Potential(nn.Linear(math.prod(shape), width), activation)
    return dense if len(shape) == 1 else nn.Sequential(nn.Flatten(), dense, nn.Unflatten(1, shape))


def dense(shape: Shape, growth: int, activation: Activation, kernels: Sequence[int]) -> nn.Sequential:
    """Build a DenseNet-like g: layers that each append `growth` channels to their input, and one back to those of x.

    For images, `kernels` lists the kernel sizes of all layers; for vectors only its length matters.
    """
    steps, channels = list[nn.Module](), shape[0]
    for kernel in kernels[:-1]:
        steps.append(Concatenated(nn.Sequential(_layer(channels, growth, kernel, len(shape)), activation())))
        channels += growth
    return nn.Sequential(*steps, _layer(channels, shape[0], kernels[-1], len(shape)))


def _layer(inputs: int, outputs: int, kernel: int, axes: int) -> nn.Module:
    if axes == 1:
        return nn.Linear(inputs, outputs)
    check_kernels((kernel,))
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)


def _check_activation(activation: Activation) -> None:
    """Refuse what does not build a contractive activation, such as one that is built already."""
    try:
        built = activation()
    except TypeError as error:
        raise ValueError(
            f"activation must be a class, or a function that builds a module; got {activation!r}. Use "
            "activation=nn.ReLU, or for settings activation=lambda: nn.Softplus(threshold=40)."
        ) from error
    check_contractive(built)


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
    """Build a contraction of R^dimension: linear layers with activations between them.

    Give `coefficient`, a bound per layer, or `lipschitz`, one for the whole (default 0.9). With `context`, the size of
    a context vector, an unconstrained network of the context shifts the first hidden layer: the map stays a
    contraction in x for every context.

    >>> contractive_mlp(2, hidden=(8,))(__import__("torch").zeros(5, 2)).shape
    torch.Size([5, 2])
    """
    _check_activation(activation)
    g = alternate(linears(dimension, hidden), lambda _: [activation()])
    _constrain(g, coefficient, lipschitz, norm)
    return g if context is None else conditioned(g, dimension, context)


def conditioned(g: nn.Module, dimension: int, context: int) -> Conditioned:
    """Give a branch on R^dimension a context: an unconstrained network of it shifts the output of the first layer."""
    if not isinstance(g, nn.Sequential) or len(g) < 2:
        raise ValueError(
            f"a branch with a context must be a sequence of layers; got a {type(g).__name__}. Use branch = 'chain'."
        )
    at_least(1, context=context)
    embed = nn.Sequential(nn.Linear(context, 64), nn.SiLU(), nn.Linear(64, _units(g[0], dimension)))
    return Conditioned(g[:1], embed, g[1:])


def _units(layer: nn.Module, dimension: int) -> int:
    """Return the size of the output of a branch's first layer."""
    if isinstance(layer, Concatenated):
        return dimension + next(m.out_features for m in layer.modules() if isinstance(m, nn.Linear))
    return layer.out_features if isinstance(layer, nn.Linear) else dimension


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
    """Build the paper's convolutional branch (3x3, 1x1, 3x3 by default), which keeps channels and size.

    It is a contraction, with `coefficient` and `lipschitz` as in `contractive_mlp`. `preactivation` puts an activation
    before the first layer as well, as in the paper's classifiers.
    """
    _check_activation(activation)
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
    """Build a flow on R^dimension: `contractive_mlp` blocks, with an ActNorm first and after each block (App. C.3)."""
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
