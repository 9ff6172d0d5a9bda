"""Registration of tricks, and helpers that choose what a trick acts on."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, nn

from iresnet.lipschitz import LipSwish, Sine

Trick: TypeAlias = Callable[[random.Random, nn.Sequential], nn.Module]

TRICKS: dict[str, Trick] = {}
IN_PLACE: dict[str, Trick] = {}


class NotApplicable(Exception):
    """The trick does not apply to this network."""


def trick(function: Trick) -> Trick:
    """Register a trick that builds another network."""
    TRICKS[function.__name__.strip("_")] = function
    return function


def in_place_trick(function: Trick) -> Trick:
    """Register a trick that changes a network in place."""
    IN_PLACE[function.__name__.strip("_")] = function
    return trick(function)


def linear(r: random.Random, g: nn.Module) -> Any:
    """A linear layer or convolution of g."""
    return pick(r, g, nn.Linear | nn.Conv1d | nn.Conv2d)


def plain_linear(r: random.Random, g: nn.Module) -> Any:
    """A linear layer or convolution of g whose weight is a plain parameter."""
    layer = linear(r, g)
    if "weight" not in layer._parameters:
        raise NotApplicable
    return layer


def convolution(r: random.Random, g: nn.Module) -> Any:
    """A convolution of g."""
    return pick(r, g, nn.Conv1d | nn.Conv2d)


def circular_convolution(r: random.Random, g: nn.Module) -> Any:
    """A convolution of g with circular padding."""
    return _choose(r, [m for m in g.modules() if isinstance(m, nn.Conv1d | nn.Conv2d) and m.padding_mode == "circular"])


def activation(r: random.Random, g: nn.Module) -> Any:
    """An activation of g."""
    return pick(r, g, nn.ELU | nn.ReLU | nn.Tanh | nn.Softplus | nn.LeakyReLU | nn.CELU | LipSwish | Sine | nn.Hardtanh)


def pick(r: random.Random, g: nn.Module, kinds: Any) -> Any:
    """A module of g of one of these classes."""
    return _choose(r, [m for m in g.modules() if isinstance(m, kinds)])


def _choose(r: random.Random, modules: list[nn.Module]) -> Any:
    if not modules:
        raise NotApplicable
    return r.choice(modules)


def replace(g: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Replace a module of g by another."""
    for parent in list(g.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[name] = new
    return new if g is old else g


def subclassed(layer: nn.Module, **methods: Any) -> nn.Module:
    """The layer as an instance of a user-defined subclass with these methods."""
    twin = copy.copy(layer)
    twin.__dict__ = dict(layer.__dict__)
    twin.__class__ = type(f"User{type(layer).__name__}", (type(layer),), {**methods, "__module__": __name__})
    return twin


def factor(r: random.Random) -> float:
    """The factor by which a trick scales."""
    return r.choice([3.0, 30.0, -4.0, 1.5])


class Scale(nn.Module):
    """A parametrization W -> k W."""

    def __init__(self, k: float) -> None:
        super().__init__()
        self.k = k

    def forward(self, w: Tensor) -> Tensor:
        return self.k * w
