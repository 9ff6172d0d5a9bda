"""Subclasses of layers, activations, sequences and the library's combinators."""

from __future__ import annotations

import random
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from iresnet.lipschitz import Concatenated, Conditioned, LipSwish, Potential

from .base import Scale, activation, convolution, factor, linear, pick, plain_linear, replace, subclassed, trick


@trick
def subclass_forward(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer, k = r.choice([linear, activation])(r, g), factor(r)
    parent = type(layer).forward
    return replace(g, layer, subclassed(layer, forward=lambda self, x: k * parent(self, x)))


@trick
def subclass_conv_forward(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer, k = convolution(r, g), factor(r)
    parent = type(layer)._conv_forward
    return replace(g, layer, subclassed(layer, _conv_forward=lambda self, x, w, b: parent(self, x, k * w, b)))


@trick
def subclass_call(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer, k = r.choice([linear, activation])(r, g), factor(r)
    parent = type(layer).__call__
    return replace(g, layer, subclassed(layer, __call__=lambda self, x: k * parent(self, x)))


@trick
def subclass_call_impl(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer, k = r.choice([linear, activation])(r, g), factor(r)
    return replace(g, layer, subclassed(layer, _call_impl=lambda self, x: k * self.forward(x)))


@trick
def subclass_weight_property(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer, k = plain_linear(r, g), factor(r)
    return replace(g, layer, subclassed(layer, weight=property(lambda self: k * self._parameters["weight"])))


@trick
def subclass_attribute_property(r: random.Random, g: nn.Sequential) -> nn.Module:
    """A property that overrides the attribute that decides the slope."""
    layer = pick(r, g, nn.ELU | nn.LeakyReLU)
    name = "alpha" if isinstance(layer, nn.ELU) else "negative_slope"
    return replace(g, layer, subclassed(layer, **{name: property(lambda self: 9.0)}))


@trick
def subclass_getattr(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer, k = plain_linear(r, g), factor(r)

    def found(self: Any, name: str) -> Any:
        value: Any = nn.Module.__getattr__(self, name)
        return k * value if name == "weight" else value

    return replace(g, layer, subclassed(layer, __getattr__=found))


@trick
def subclass_by_mode(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer, k = linear(r, g), factor(r)
    parent = type(layer).forward
    return replace(g, layer, subclassed(layer, forward=lambda self, x: (1 if self.training else k) * parent(self, x)))


class Twice(nn.Sequential):
    """A sequence with a scaled output."""

    def forward(self, input: Any) -> Any:
        return 3 * super().forward(input)


class Skip(nn.Sequential):
    """A sequence with a skip connection."""

    def forward(self, input: Any) -> Any:
        return input + super().forward(input)


class Called(nn.Sequential):
    """A sequence with a custom __call__."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 3 * super().__call__(*args, **kwargs)


class Repeated(nn.Sequential):
    """A sequence that lists its first layer once and runs it three times."""

    def __iter__(self) -> Any:
        children = list(self._modules.values())
        return iter([children[0]] * 1 + children)


@trick
def subclass_sequential(r: random.Random, g: nn.Sequential) -> nn.Module:
    return r.choice([Twice, Skip, Called])(*g)


@trick
def subclass_nested(r: random.Random, g: nn.Sequential) -> nn.Module:
    return nn.Sequential(r.choice([Twice, Called])(*g))


@trick
def subclass_combinator(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Subclasses of the library's own combinators."""
    layer, k = pick(r, g, Potential | Concatenated), factor(r)
    parent = type(layer).forward
    return replace(g, layer, subclassed(layer, forward=lambda self, x: k * parent(self, x)))


class Steep(nn.ELU):
    """A user-defined activation that expands; parametrizing its parameter makes torch replace its class."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))

    def forward(self, input: Tensor) -> Tensor:
        return F.elu(input) * self.gain.to(input.dtype)


@trick
def parametrized_activation(r: random.Random, g: nn.Sequential) -> nn.Module:
    steep = Steep()
    parametrize.register_parametrization(steep, "gain", Scale(factor(r)))
    return replace(g, activation(r, g), steep)


@trick
def parametrized_lipswish(r: random.Random, g: nn.Sequential) -> nn.Module:
    swish = LipSwish().to(torch.float64)
    parametrize.register_parametrization(swish, "raw_beta", Scale(factor(r)))
    return replace(g, activation(r, g), swish)


@trick
def subclass_conditioned(r: random.Random, g: nn.Sequential) -> nn.Module:
    class Scaled(Conditioned):
        def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
            return cast(Tensor, 3 * self.rest(self.first(x)))

    return Scaled(g, nn.Identity(), nn.Identity())
