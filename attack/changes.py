"""Ordinary changes of a model between two calls: weights, optimiser steps, buffers, attributes, modules."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

import iresnet
from iresnet import ResidualBlock
from iresnet.lipschitz import Concatenated, Conditioned, LipSwish, SpectralCap

from . import networks, tricks

Mutation: TypeAlias = Callable[[random.Random, nn.Module], None]

MUTATIONS: dict[str, Mutation] = {}


def mutation(function: Mutation) -> Mutation:
    """Register a change of a model; it raises `NotApplicable` if there is nothing to change."""
    MUTATIONS[function.__name__.strip("_")] = function
    return function


def parameters(r: random.Random, model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model, in random order."""
    found = list(model.parameters())
    if not found:
        raise tricks.NotApplicable
    r.shuffle(found)
    return found


# ------------------------------------------------------------------------------------------------- weights


@mutation
def negated(r: random.Random, model: nn.Module) -> None:
    with torch.no_grad():
        for p in parameters(r, model)[: r.choice([1, 100])]:
            p.neg_()


@mutation
def negated_data(r: random.Random, model: nn.Module) -> None:
    parameters(r, model)[0].data.neg_()


@mutation
def permuted(r: random.Random, model: nn.Module) -> None:
    p = parameters(r, model)[0]
    order = torch.randperm(p.numel(), generator=networks.generator(r))
    with torch.no_grad():
        p.copy_(p.flatten()[order].reshape(p.shape))


@mutation
def reflected(r: random.Random, model: nn.Module) -> None:
    """Reflect a parameter: same norm and same weighted sum (for weights from 1 to 2), other values."""
    p = parameters(r, model)[0]
    with torch.no_grad():
        w = p.detach().double().flatten()
        a = torch.linspace(1, 2, len(w), dtype=torch.float64)
        p.copy_((2 * (a @ w) / (a @ a) * a - w).reshape(p.shape))


@mutation
def swapped(r: random.Random, model: nn.Module) -> None:
    """Swap two parameters of the same shape."""
    found = parameters(r, model)
    pairs = [(a, b) for i, a in enumerate(found) for b in found[:i] if a.shape == b.shape]
    if not pairs:
        raise tricks.NotApplicable
    a, b = r.choice(pairs)
    with torch.no_grad():
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)


@mutation
def shrunk(r: random.Random, model: nn.Module) -> None:
    with torch.no_grad():
        parameters(r, model)[0].mul_(r.choice([0.5, -0.3, 0.0]))


@mutation
def one_number(r: random.Random, model: nn.Module) -> None:
    p = parameters(r, model)[0]
    with torch.no_grad():
        p.view(-1)[r.randrange(p.numel())] *= -1


@mutation
def new_data(r: random.Random, model: nn.Module) -> None:
    p = parameters(r, model)[0]
    p.data = -0.7 * p.data.clone()


@mutation
def new_parameter(r: random.Random, model: nn.Module) -> None:
    owners = [(m, n) for m in model.modules() for n, p in m._parameters.items() if p is not None]
    if not owners:
        raise tricks.NotApplicable
    owner, name = r.choice(owners)
    setattr(owner, name, nn.Parameter(-0.8 * cast(Tensor, owner._parameters[name]).detach()))


@mutation
def loaded(r: random.Random, model: nn.Module) -> None:
    names = dict(model.named_parameters())
    model.load_state_dict({k: -v if k in names else v for k, v in model.state_dict().items()})


@mutation
def stepped(r: random.Random, model: nn.Module) -> None:
    """Take an optimiser step; fused optimisers do not change version counters."""
    found = [p for p in parameters(r, model) if p.requires_grad]
    makers: list[Callable[[], torch.optim.Optimizer]] = [
        lambda: torch.optim.SGD(found, lr=0.3),
        lambda: torch.optim.AdamW(found, lr=0.05, fused=True),
        lambda: torch.optim.Adam(found, lr=0.05, foreach=True),
    ]
    for p in found:
        p.grad = torch.randn(p.shape, generator=networks.generator(r), dtype=torch.float64).to(p.dtype)
    r.choice(makers)().step()
    for p in found:
        p.grad = None


@mutation
def averaged(r: random.Random, model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(parameters(r, model)), -0.5)


# ------------------------------------------------------------------------------------------------- modules


@mutation
def replaced(r: random.Random, model: nn.Module) -> None:
    """Replace an activation by another."""
    tricks.replace(model, tricks.activation(r, model), r.choice([nn.Tanh, nn.Softsign, nn.Sigmoid, nn.ReLU, nn.SiLU])())


@mutation
def removed(r: random.Random, model: nn.Module) -> None:
    tricks.replace(model, tricks.activation(r, model), nn.Identity())


@mutation
def another_branch(r: random.Random, model: nn.Module) -> None:
    """Replace the network of a block by another of the same shape."""
    block = next((m for m in model.modules() if isinstance(m, ResidualBlock)), None)
    if block is None or isinstance(block.g, Conditioned):
        raise tricks.NotApplicable
    twin = copy.deepcopy(block.g)
    with torch.no_grad():
        for p in twin.parameters():
            p.neg_()
    block.g = twin


@mutation
def slope(r: random.Random, model: nn.Module) -> None:
    """Change an attribute or parameter of an activation."""
    layer = tricks.activation(r, model)
    match layer:
        case nn.ELU() | nn.CELU():
            layer.alpha = r.choice([0.1, 0.9])
        case nn.LeakyReLU():
            layer.negative_slope = -layer.negative_slope
        case nn.Softplus():
            layer.beta = r.choice([0.3, 7.0])
        case LipSwish():
            with torch.no_grad():
                layer.raw_beta.fill_(r.choice([-3.0, 3.0]))
        case nn.Hardtanh():
            layer.min_val, layer.max_val = -0.01, 0.01
        case iresnet.Sine():
            layer.frequency = r.choice([0.2, 5.0])
        case _:
            raise tricks.NotApplicable


@mutation
def angle(r: random.Random, model: nn.Module) -> None:
    layer = next((m for m in model.modules() if isinstance(m, Concatenated)), None)
    if layer is None:
        raise tricks.NotApplicable
    layer.angle.data.fill_(r.uniform(-4, 4))


@mutation
def of_parametrization(r: random.Random, model: nn.Module) -> None:
    """Change an attribute of a parametrization, including the constraint's."""
    found = [m for m in model.modules() if isinstance(m, tricks.Scale | SpectralCap)]
    if not found:
        raise tricks.NotApplicable
    chosen = r.choice(found)
    if isinstance(chosen, SpectralCap):
        chosen.coefficient = r.choice([0.1, 0.5])
    else:
        chosen.k = -chosen.k / 2


@mutation
def played(r: random.Random, model: nn.Module) -> None:
    """Apply any in-place trick: hooks, forward, parametrizations, attributes."""
    block = next((m for m in model.modules() if isinstance(m, ResidualBlock)), None)
    if block is None or not isinstance(block.g, nn.Sequential):
        raise tricks.NotApplicable
    tricks.IN_PLACE[r.choice(sorted(tricks.IN_PLACE))](r, block.g)


@mutation
def mode(r: random.Random, model: nn.Module) -> None:
    model.train()
    if r.random() < 0.5:
        model.eval()


@mutation
def buffers(r: random.Random, model: nn.Module) -> None:
    """Change a buffer of a closed form or of a context network."""
    found = [b for name, b in model.named_buffers() if b.is_floating_point() and "parametrizations" not in name]
    if not found:
        raise tricks.NotApplicable
    b = r.choice(found)
    with torch.no_grad():
        b.copy_(torch.where(b.isfinite(), 0.5 * b, b) if r.random() < 0.5 else torch.where(b > 0, 2 * b, b))


@mutation
def nothing(r: random.Random, model: nn.Module) -> None:
    """Change nothing: the proof must be the same."""


class Masked(nn.Module):
    """A context network with a mask of minus infinities, as in attention, and an attribute."""

    mask: Tensor

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(size, width)
        self.gain = 1.0
        self.register_buffer("mask", torch.full((3,), -torch.inf))

    def forward(self, c: Tensor) -> Tensor:
        weights = torch.softmax(torch.cat([c.new_zeros(1), self.mask.to(c.dtype)]), 0)
        return cast(Tensor, self.gain * weights[0] * self.inner(c))


@mutation
def gain(r: random.Random, model: nn.Module) -> None:
    """Change an attribute of a context network."""
    found = [m for m in model.modules() if isinstance(m, Masked)]
    if not found:
        raise tricks.NotApplicable
    found[0].gain = r.choice([-1.0, 2.0])
