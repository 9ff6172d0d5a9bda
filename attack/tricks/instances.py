"""Changes of an instance: replaced methods, changed settings, in-place operations, hooks."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from iresnet.lipschitz import LipSwish, Sine

from .base import NotApplicable, Scale, activation, convolution, factor, in_place_trick, linear, trick


@in_place_trick
def instance_forward(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer, k = r.choice([linear, activation, lambda r, g: g])(r, g), factor(r)
    parent = layer.forward
    layer.forward = lambda x: k * parent(x)
    return g


@in_place_trick
def instance_conv_forward(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer, k = convolution(r, g), factor(r)
    parent = layer._conv_forward
    layer._conv_forward = lambda x, w, b: parent(x, k * w, b)
    return g


@in_place_trick
def instance_call_impl(r: random.Random, g: nn.Sequential) -> nn.Module:
    layer, k = r.choice([linear, activation, lambda r, g: g])(r, g), factor(r)
    layer._call_impl = lambda x: k * layer.forward(x)
    return g


@in_place_trick
def instance_compiled(r: random.Random, g: nn.Sequential) -> nn.Module:
    """The attribute that `module.compile(backend=...)` sets, for a backend that changes the function."""
    layer, k = r.choice([linear, activation, lambda r, g: g])(r, g), factor(r)
    layer._compiled_call_impl = lambda x: k * layer.forward(x)
    return g


@in_place_trick
def instance_copying(r: random.Random, g: nn.Sequential) -> nn.Module:
    """A layer that decides how it is copied: another layer, or itself; a lock, which cannot be copied."""
    layer, k = linear(r, g), factor(r)
    match r.randrange(3):
        case 0:
            twin = copy.deepcopy(layer)
            for p in twin.parameters():
                p.data.mul_(k)
            layer.__deepcopy__ = lambda memo: twin
        case 1:
            layer.__deepcopy__ = lambda memo: layer
        case _:
            layer.lock = threading.Lock()
            if layer.bias is not None:
                layer.bias.data.fill_(1e6 * k)
    return g


@in_place_trick
def attributes(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Change the attribute of an activation that decides its slope."""
    layer = activation(r, g)
    match layer:
        case nn.ELU():
            layer.alpha = r.choice([8.0, -3.0, 0.5])
        case nn.CELU():
            layer.alpha = r.choice([-0.3, 5.0])
        case nn.LeakyReLU():
            layer.negative_slope = r.choice([4.0, -4.0])
        case nn.Softplus():
            layer.beta, layer.threshold = r.choice([(1, 0.1), (3, 1.0), (-1, 20)])
        case Sine():
            layer.frequency = r.choice([-3.0, 5.0, 1e-9])
        case LipSwish():
            with torch.no_grad():
                layer.raw_beta.fill_(r.choice([-50.0, 50.0, 1e6]))
        case nn.Hardtanh():
            layer.min_val, layer.max_val = r.choice([(3.0, -3.0), (-9.0, 9.0)])
        case _:
            layer.inplace = True
    return g


@in_place_trick
def convolution_attributes(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Change attributes of a convolution that keep the output shape and change the operator."""
    layer = convolution(r, g)
    kernel = layer.kernel_size
    if r.random() < 0.5:
        layer.padding_mode = r.choice(["circular", "reflect", "replicate", "zeros"])
    else:
        layer.dilation = tuple(2 if k == 3 else 1 for k in kernel)
        layer.padding = tuple(2 if k == 3 else 0 for k in kernel)
    return g


@in_place_trick
def in_place(r: random.Random, g: nn.Sequential) -> nn.Module:
    found = [m for m in g.modules() if hasattr(m, "inplace")]
    if not found:
        raise NotApplicable
    cast(Any, r.choice(found)).inplace = True
    return g


@trick
def in_place_first(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Put an in-place activation at the front, where x has not been copied."""
    inplace = r.choice([nn.ReLU(inplace=True), nn.ELU(inplace=True), nn.Hardtanh(-0.1, 0.1, inplace=True)])
    front: list[nn.Module] = [r.choice([nn.Identity(), nn.Sequential(), nn.Flatten(1, 1), nn.Unflatten(1, (-1,))])]
    return nn.Sequential(*(front if r.random() < 0.8 else []), inplace, *g)


@in_place_trick
def forward_hook(r: random.Random, g: nn.Sequential) -> nn.Module:
    k = factor(r)
    _anywhere(r, g).register_forward_hook(lambda module, inputs, output: k * output)
    return g


@in_place_trick
def forward_hook_kwargs(r: random.Random, g: nn.Sequential) -> nn.Module:
    k = factor(r)
    _anywhere(r, g).register_forward_hook(lambda m, inputs, kwargs, output: k * output, with_kwargs=True)
    return g


@in_place_trick
def forward_pre_hook(r: random.Random, g: nn.Sequential) -> nn.Module:
    k = factor(r)
    _anywhere(r, g).register_forward_pre_hook(lambda module, inputs: (k * inputs[0],))
    return g


@in_place_trick
def backward_hook(r: random.Random, g: nn.Sequential) -> nn.Module:
    """Change gradients, not the function: vector-Jacobian products are then wrong."""
    where: Any = _anywhere(r, g)
    where.register_full_backward_hook(lambda module, to_input, to_output: tuple(3 * t for t in to_input))
    return g


@in_place_trick
def watching_hook(r: random.Random, g: nn.Sequential) -> nn.Module:
    """A hook that only reads, like those of profilers and feature extractors."""
    seen = list[Tensor]()
    _anywhere(r, g).register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    return g


def _anywhere(r: random.Random, g: nn.Module) -> nn.Module:
    return r.choice([m for m in g.modules() if not isinstance(m, parametrize.ParametrizationList | Scale)])
