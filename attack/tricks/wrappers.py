"""Wrappers around a network."""

from __future__ import annotations

import copy
import random
from typing import Any, cast

import torch
from torch import Tensor, nn

import iresnet

from .base import factor, linear, trick
from .weights import own_parametrization, spectral_norm, weight_norm


@trick
def averaged(r: random.Random, g: nn.Sequential) -> nn.Module:
    wrapped = torch.optim.swa_utils.AveragedModel(g)
    with torch.no_grad():
        for p in wrapped.parameters():
            p.mul_(factor(r))
    return wrapped


@trick
def wrapped_forward(r: random.Random, g: nn.Sequential) -> nn.Module:
    """A torch wrapper with a replaced forward or a hook."""
    wrapped = r.choice([torch.optim.swa_utils.AveragedModel, nn.DataParallel])(g)
    inner, k = wrapped.module, factor(r)
    match r.randrange(3):
        case 0:
            wrapped.forward = lambda x: k * inner(x)
        case 1:
            wrapped._call_impl = lambda x: k * inner(x)
        case _:
            wrapped.register_forward_hook(lambda module, inputs, output: k * output)
    return wrapped


@trick
def wrapped_subclass(r: random.Random, g: nn.Sequential) -> nn.Module:
    class Loud(nn.DataParallel):
        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, 3 * self.module(x))

    return Loud(g)


@trick
def data_parallel(r: random.Random, g: nn.Sequential) -> nn.Module:
    return nn.DataParallel(g)


@trick
def traced(r: random.Random, g: nn.Sequential) -> nn.Module:
    return cast(nn.Module, torch.fx.symbolic_trace(g))


@trick
def compiled(r: random.Random, g: nn.Sequential) -> nn.Module:
    """`torch.compile` with a hook, a replaced forward, or another module in the place of the one that was compiled."""
    wrapped = cast(Any, torch.compile(g, backend="eager"))
    k = factor(r)
    match r.randrange(4):
        case 0:
            wrapped.register_forward_hook(lambda module, inputs, output: k * output)
        case 1:
            wrapped.forward = lambda x: k * g(x)
        case 2:
            other = torch.compile(lambda x: k * g(x), backend="eager")
            wrapped.forward = other
        case _:
            other = copy.deepcopy(g)
            for p in other.parameters():
                p.data.mul_(0.1)
            wrapped._orig_mod = other
    return cast(nn.Module, wrapped)


@trick
def listed(r: random.Random, g: nn.Sequential) -> nn.Module:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(g)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x) * 2
            return x

    return Listed()


@trick
def nested_block(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Use a residual block as the network of another."""
    return r.choice([lambda: iresnet.ResidualBlock(g), lambda: nn.Sequential(iresnet.ResidualBlock(g), *g)])()


@trick
def constrained_over(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Combine the library's constraint with another parametrization, in either order."""
    layer = linear(r, g)
    below = r.choice([own_parametrization, weight_norm, spectral_norm])
    if r.random() < 0.5:
        below(r, nn.Sequential(layer))
        iresnet.constrain_(g, coefficient=0.9)
    else:
        iresnet.constrain_(g, coefficient=0.9)
        own_parametrization(r, nn.Sequential(layer))
    return g


@trick
def harmless(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Change nothing."""
    return g
