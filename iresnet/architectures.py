"""Named networks: functions that return ordinary modules, contractive by construction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import nn

from .elementary import ActNorm
from .flow import DiagonalNormal, Flow
from .lipschitz import Conditioned, NormRule, check_contractive, constrain_
from .logdet import Estimator
from .residual import ResidualBlock
from .transform import Chain, Transform

Activation = Callable[[], nn.Module]


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
    if dimension < 1 or any(h < 1 for h in hidden) or not hidden:
        raise ValueError(f"dimension and hidden widths must be positive; got {dimension} and {tuple(hidden)}.")
    check_contractive(activation())
    widths = [dimension, *hidden, dimension]
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        layers += [nn.Linear(a, b)] if i == 0 else [activation(), nn.Linear(a, b)]
    g = _constrain(nn.Sequential(*layers), coefficient, lipschitz, norm)
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
    if channels < 1 or hidden < 1:
        raise ValueError(f"channels and hidden must be positive; got {channels} and {hidden}.")
    if not kernels or any(k < 1 or k % 2 == 0 for k in kernels):
        raise ValueError(f"kernels must be odd, so that the size is kept; got {tuple(kernels)}.")
    check_contractive(activation())
    widths = [channels, *[hidden] * (len(kernels) - 1), channels]
    layers: list[nn.Module] = [activation()] if preactivation else []
    for i, (a, b, k) in enumerate(zip(widths, widths[1:], kernels, strict=False)):
        layers += [activation()] if i else []
        layers.append(nn.Conv2d(a, b, k, padding=k // 2))
    return _constrain(nn.Sequential(*layers), coefficient, lipschitz, norm)


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
    if blocks < 1:
        raise ValueError(f"blocks must be at least 1; got {blocks}.")
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
