"""Unknown parts: other layers of torch, user-defined functions, operations that mix samples."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from .base import NotApplicable, Scale, factor, linear, pick, replace, trick


class Hidden(nn.Module):
    """A user-defined network with a custom forward."""

    def __init__(self, inner: nn.Module, k: float) -> None:
        super().__init__()
        self.inner, self.k = inner, k

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.k * self.inner(x))


class Counting(nn.Module):
    """A function that changes with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + self.calls % 5)


@trick
def hidden_skip(r: random.Random, g: nn.Sequential) -> nn.Module:
    return r.choice([lambda: Hidden(g, factor(r)), lambda: nn.Sequential(Hidden(g, factor(r)))])()


@trick
def unknown_layer(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Insert a torch module without a rule, or one with a slope above one, somewhere in g."""
    makers: list[Callable[[], nn.Module]] = [
        lambda: nn.Dropout(0.5),
        lambda: nn.AlphaDropout(0.5),
        lambda: nn.LayerNorm([], elementwise_affine=False),
        lambda: nn.PReLU(init=4.0),
        lambda: nn.Softmax(1),
        nn.Mish,
        nn.Hardswish,
        nn.GELU,
        nn.SiLU,
        nn.SELU,
        nn.ReLU6,
        nn.RReLU,
        lambda: nn.RReLU(3.0, 4.0),
        nn.Tanhshrink,
        lambda: nn.Hardshrink(0.1),
        lambda: nn.Threshold(0.1, 20.0),
        lambda: nn.Softshrink(0.1),
        nn.Hardsigmoid,
        lambda: nn.ELU(7.0),
        lambda: nn.LeakyReLU(-5.0),
        lambda: nn.Softplus(threshold=0.1),
        lambda: nn.LocalResponseNorm(2),
        lambda: nn.ChannelShuffle(1),
        Counting,
        lambda: Scale(3.0),
    ]
    layers = list(g)
    layers.insert(r.randint(0, len(layers)), r.choice(makers)())
    return nn.Sequential(*layers)


@trick
def batch_norm(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer = linear(r, g)
    made: Any = nn.BatchNorm1d if layer.weight.dim() < 4 else nn.BatchNorm2d
    return replace(g, layer, nn.Sequential(layer, made(len(layer.weight), dtype=layer.weight.dtype)))


@trick
def transposed(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer = pick(r, g, nn.Conv1d)
    made = nn.ConvTranspose1d(layer.in_channels, layer.out_channels, 3, padding=1, dtype=layer.weight.dtype)
    return replace(g, layer, made)


@trick
def mixed_samples(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Reshape so that two samples are joined: a function of the batch, not of single samples."""
    first = next((m for m in g.modules() if isinstance(m, nn.Linear)), None)
    if first is None or not isinstance(g[0], nn.Linear):
        raise NotApplicable
    d = first.in_features
    joint = nn.Linear(2 * d, 2 * d, dtype=first.weight.dtype)
    nn.init.orthogonal_(joint.weight)
    with torch.no_grad():
        joint.weight.mul_(0.5)
    return nn.Sequential(
        nn.Flatten(0, 1), nn.Unflatten(0, (-1, 2 * d)), joint, nn.Flatten(0, 1), nn.Unflatten(0, (-1, d))
    )
