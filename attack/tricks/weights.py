"""Weights that are not what they seem: parametrized, pruned, tied, of a class or a layout of their own."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import iresnet

from .base import (
    Times,
    Unfit,
    afterwards,
    factor,
    linear,
    pick,
    trick,
    unchanged,
)


@afterwards
def own_parametrization(r: random.Random, g: nn.Sequential) -> nn.Module:
    parametrize.register_parametrization(linear(r, g), "weight", Times(factor(r)))
    return g


@afterwards
def weight_norm(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer = linear(r, g)
    parametrizations.weight_norm(layer)
    with torch.no_grad():
        next(iter(layer.parametrizations.weight.parameters())).mul_(abs(factor(r)))
    return g


@afterwards
def spectral_norm(r: random.Random, g: nn.Sequential) -> nn.Module:
    parametrizations.spectral_norm(linear(r, g))
    return g


@afterwards
def orthogonal(r: random.Random, g: nn.Sequential) -> nn.Module:
    parametrizations.orthogonal(pick(r, g, nn.Linear))
    return g


@afterwards
def old_weight_norm(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer = unchanged(r, g)
    nn.utils.weight_norm(layer)
    with torch.no_grad():
        layer.weight_g.mul_(abs(factor(r)))  # the weight is made anew by a hook of the next call
    return g


@afterwards
def old_spectral_norm(r: random.Random, g: nn.Sequential) -> nn.Module:
    nn.utils.spectral_norm(unchanged(r, g))
    return g


@afterwards
def pruned(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer = unchanged(r, g)
    prune.l1_unstructured(layer, "weight", amount=0.3)
    with torch.no_grad():
        layer.weight_orig.mul_(abs(factor(r)))  # the weight is made anew by a hook of the next call
    return g


class Louder(Tensor):
    """A weight whose products are three times as large."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function in (F.linear, F.conv1d, F.conv2d):
            return 3 * result.as_subclass(Tensor)
        return result


@afterwards
def tensor_subclass(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer = unchanged(r, g)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Louder))
    return g


@afterwards
def tied_weights(r: random.Random, g: nn.Sequential) -> nn.Module:
    layers = [m for m in g.modules() if isinstance(m, nn.Linear) and "weight" in m._parameters]
    pairs = [(a, b) for a in layers for b in layers if a is not b and a.weight.shape == b.weight.shape]
    if not pairs:
        raise Unfit
    a, b = r.choice(pairs)
    a.weight = b.weight
    with torch.no_grad():
        b.weight.mul_(r.choice([1.0, 3.0]))
    return g


@trick
def shared_layer(r: random.Random, g: nn.Sequential) -> nn.Module:
    """One layer used several times."""
    return nn.Sequential(*g, *list(g) * r.randint(1, 2))


@afterwards
def plain_tensor(r: random.Random, g: nn.Sequential) -> nn.Module:
    """A weight that is a tensor and no parameter."""
    layer = unchanged(r, g)
    weight = factor(r) * layer.weight.detach()
    del layer.weight
    layer.weight = weight
    return g


@afterwards
def scaled_weight(r: random.Random, g: nn.Sequential) -> nn.Module:
    """A weight written in place, which no class can see."""
    unchanged(r, g).weight.data.mul_(factor(r))
    return g


@afterwards
def stale_padding(r: random.Random, g: nn.Sequential) -> nn.Module:
    """A circular convolution pads by what it noted when it was made, not by its attribute."""
    found = [m for m in g.modules() if isinstance(m, nn.Conv1d | nn.Conv2d) and m.padding_mode == "circular"]
    if not found:
        raise Unfit
    layer = r.choice(found)
    if r.random() < 0.5:
        layer.padding = tuple(0 for _ in layer.kernel_size)
    else:
        layer.padding = "same"
    return g


@afterwards
def rolled_padding(r: random.Random, g: nn.Sequential) -> nn.Module:
    """The note itself is changed: all of the padding on one side."""
    found = [m for m in g.modules() if isinstance(m, nn.Conv1d | nn.Conv2d) and m.padding_mode == "circular"]
    if not found:
        raise Unfit
    layer = r.choice(found)
    pads = list(layer._reversed_padding_repeated_twice)
    layer._reversed_padding_repeated_twice = [p for a, b in zip(pads[::2], pads[1::2], strict=True) for p in (a + b, 0)]
    return g


@afterwards
def strange_layout(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Weights that are views: sparse, expanded, negated lazily, transposed."""
    layer = unchanged(r, g)
    w = layer.weight.detach()
    match r.randrange(4):
        case 0 if w.dim() == 2:
            w = (factor(r) * w).to_sparse()
        case 1:
            w = w[:1].expand_as(w) * 1 if r.random() < 0.5 else w[:1].expand_as(w)
        case 2:
            w = torch.complex(torch.zeros_like(w), factor(r) * w).conj().imag
        case _:
            w = (factor(r) * w).transpose(0, 1).contiguous().transpose(0, 1)
    layer.weight = nn.Parameter(w)
    return g


@afterwards
def tensor_setting(r: random.Random, g: nn.Sequential) -> nn.Module:
    """A slope that is a tensor, changed in place after it was set."""
    layer = pick(r, g, nn.ELU | nn.LeakyReLU)
    name = "alpha" if isinstance(layer, nn.ELU) else "negative_slope"
    slope = torch.tensor(0.5)
    setattr(layer, name, slope)
    if r.random() < 0.7:
        iresnet.lipschitz.lipschitz_constant(layer)
        slope.fill_(abs(factor(r)))
    return g


@afterwards
def not_numbers(r: random.Random, g: nn.Sequential) -> nn.Module:
    """A bias or a parameter of an activation that is not a number."""
    found = [p for name, p in g.named_parameters() if name.split(".")[-1] in ("bias", "raw_beta", "angle")]
    if not found:
        raise Unfit
    with torch.no_grad():
        r.choice(found).view(-1)[0] = r.choice([float("nan"), float("inf"), float("-inf")])
    return g


class Echoing(nn.ModuleList):
    """A list that iterates over its modules twice."""

    def __iter__(self) -> Any:
        return iter([*self._modules.values(), *self._modules.values()])


@trick
def meta_numbers(r: random.Random, g: nn.Sequential) -> nn.Module:
    """A weight that is not a number."""
    layer = unchanged(r, g)
    with torch.no_grad():
        layer.weight.view(-1)[0] = r.choice([float("nan"), float("inf")])
    return g
