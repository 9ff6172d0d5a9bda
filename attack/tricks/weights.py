"""Unusual weights: parametrized, pruned, tied, of another tensor class or memory layout."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import iresnet

from .base import NotApplicable, Scale, circular_convolution, factor, in_place_trick, linear, pick, plain_linear, trick


@in_place_trick
def own_parametrization(r: random.Random, g: nn.Sequential) -> nn.Module:
    parametrize.register_parametrization(linear(r, g), "weight", Scale(factor(r)))
    return g


@in_place_trick
def weight_norm(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer = linear(r, g)
    parametrizations.weight_norm(layer)
    with torch.no_grad():
        next(iter(layer.parametrizations.weight.parameters())).mul_(abs(factor(r)))
    return g


@in_place_trick
def spectral_norm(r: random.Random, g: nn.Sequential) -> nn.Module:
    parametrizations.spectral_norm(linear(r, g))
    return g


@in_place_trick
def orthogonal(r: random.Random, g: nn.Sequential) -> nn.Module:
    parametrizations.orthogonal(pick(r, g, nn.Linear))
    return g


@in_place_trick
def old_weight_norm(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer = plain_linear(r, g)
    nn.utils.weight_norm(layer)
    with torch.no_grad():
        layer.weight_g.mul_(abs(factor(r)))  # a hook recomputes the weight at the next call
    return g


@in_place_trick
def old_spectral_norm(r: random.Random, g: nn.Sequential) -> nn.Module:
    nn.utils.spectral_norm(plain_linear(r, g))
    return g


@in_place_trick
def pruned(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer = plain_linear(r, g)
    prune.l1_unstructured(layer, "weight", amount=0.3)
    with torch.no_grad():
        layer.weight_orig.mul_(abs(factor(r)))  # a hook recomputes the weight at the next call
    return g


class Louder(Tensor):
    """A tensor subclass whose linear operations return three times the result."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function in (F.linear, F.conv1d, F.conv2d):
            return 3 * result.as_subclass(Tensor)
        return result


@in_place_trick
def tensor_subclass(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer = plain_linear(r, g)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Louder))
    return g


@in_place_trick
def tied_weights(r: random.Random, g: nn.Sequential) -> nn.Module:
    layers = [m for m in g.modules() if isinstance(m, nn.Linear) and "weight" in m._parameters]
    pairs = [(a, b) for a in layers for b in layers if a is not b and a.weight.shape == b.weight.shape]
    if not pairs:
        raise NotApplicable
    a, b = r.choice(pairs)
    a.weight = b.weight
    with torch.no_grad():
        b.weight.mul_(r.choice([1.0, 3.0]))
    return g


@trick
def shared_layer(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Use the layers several times."""
    return nn.Sequential(*g, *list(g) * r.randint(1, 2))


@in_place_trick
def plain_tensor(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Replace a weight parameter by a plain tensor."""
    layer = plain_linear(r, g)
    weight = factor(r) * layer.weight.detach()
    del layer.weight
    layer.weight = weight
    return g


@in_place_trick
def scaled_weight(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Scale a weight in place, which no class can detect."""
    plain_linear(r, g).weight.data.mul_(factor(r))
    return g


@in_place_trick
def stale_padding(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Change the padding attribute of a circular convolution, which pads by a value cached at construction."""
    layer = circular_convolution(r, g)
    if r.random() < 0.5:
        layer.padding = tuple(0 for _ in layer.kernel_size)
    else:
        layer.padding = "same"
    return g


@in_place_trick
def rolled_padding(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Change that cached value: put all padding on one side."""
    layer = circular_convolution(r, g)
    pads = list(layer._reversed_padding_repeated_twice)
    layer._reversed_padding_repeated_twice = [p for a, b in zip(pads[::2], pads[1::2], strict=True) for p in (a + b, 0)]
    return g


@in_place_trick
def strange_layout(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Replace a weight by a sparse tensor or a view: expanded, lazily negated, transposed."""
    layer = plain_linear(r, g)
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


@in_place_trick
def tensor_setting(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Make the slope a tensor, and change it in place after it was read."""
    layer = pick(r, g, nn.ELU | nn.LeakyReLU)
    name = "alpha" if isinstance(layer, nn.ELU) else "negative_slope"
    slope = torch.tensor(0.5)
    setattr(layer, name, slope)
    if r.random() < 0.7:
        iresnet.lipschitz.lipschitz_constant(layer)
        slope.fill_(abs(factor(r)))
    return g


@in_place_trick
def not_numbers(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Put NaN or infinity into a bias or a parameter of an activation."""
    found = [p for name, p in g.named_parameters() if name.split(".")[-1] in ("bias", "raw_beta", "angle")]
    if not found:
        raise NotApplicable
    with torch.no_grad():
        r.choice(found).view(-1)[0] = r.choice([float("nan"), float("inf"), float("-inf")])
    return g


class Echoing(nn.ModuleList):
    """A ModuleList that iterates over its modules twice."""

    def __iter__(self) -> Any:
        return iter([*self._modules.values(), *self._modules.values()])


@trick
def meta_numbers(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Put NaN or infinity into a weight."""
    layer = plain_linear(r, g)
    with torch.no_grad():
        layer.weight.view(-1)[0] = r.choice([float("nan"), float("inf")])
    return g
