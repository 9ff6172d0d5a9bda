"""Attacks on constrained layers: after training and eval the norm respects its coefficient, whatever the weights."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from iresnet import GramIteration, NoBoundKnown, PowerIteration, ResidualBlock, certify, constrain_, tighten_

from . import Violation, kind, networks
from .reference import dense, spectral_norm

#: The relative error allowed for power iteration with many close singular values; none is allowed for a norm bound.
LAG = 1e-2


@kind("constraints", cases=500)
def constraints(r: random.Random) -> str:
    """Norms of constrained layers with weights of size 1e-30 to 1e15 after training steps, and after tighten_."""
    layer, shape = _layer(r)
    dtype = r.choices([torch.float32, torch.float64, torch.bfloat16], [3, 2, 1])[0]
    weight = networks.fill_(layer.weight, r).detach().double() * networks.log_uniform(r, -30, 15)
    layer.to(dtype)
    with torch.no_grad():
        layer.weight.copy_(weight.to(dtype))
    coefficient = r.uniform(0.1, 0.99)
    norm: Any = r.choice([PowerIteration(), PowerIteration(3), GramIteration()])
    try:
        net = constrain_(nn.Sequential(layer), coefficient, norm=norm)
    except NoBoundKnown:
        return "refused"
    x = torch.randn(2, *shape, generator=networks.generator(r)).to(dtype)
    strict = isinstance(norm, GramIteration) and dtype != torch.bfloat16
    with torch.no_grad():
        net(x)  # power iteration is for the largest input size seen in training
    for _ in range(r.choice([0, 1, 2])):
        net.train()
        net(x).square().sum().backward()
        with torch.no_grad():
            for p in net.parameters():
                size = float(p.detach().double().norm())
                p.add_(torch.randn(p.shape, generator=networks.generator(r)).to(dtype) * 0.1 * size)
                p.grad = None
    net.eval()
    with torch.no_grad():
        net(x)
    _check(layer, shape, coefficient * (1 + (1e-6 if strict else LAG) + 4 * torch.finfo(dtype).eps), str(norm))
    if _same(layer, shape, x):
        block = ResidualBlock(net).eval()
        tighten_(block, shape)
        certificate = certify(block, shape)
        if not certificate.passed:
            raise Violation(f"tighten_ leaves {certificate.lipschitz['block']:.6g} of {layer.extra_repr()} {dtype}")
        _check(layer, shape, certificate.lipschitz["block"] * (1 + 1e-12), "certify")
        return "tightened"
    return "constrained"


def _layer(r: random.Random) -> tuple[Any, tuple[int, ...]]:
    if r.random() < 0.5:
        n = r.randint(1, 12)
        return nn.Linear(n, n if r.random() < 0.7 else r.randint(1, 12)), (n,)
    while True:
        made, shape = networks.convolution(r)
        if made.padding_mode in ("zeros", "circular") and made.weight.dim() < 5:
            return made, shape


def _same(layer: Any, shape: tuple[int, ...], x: torch.Tensor) -> bool:
    with torch.no_grad():
        return bool(layer(x).shape == x.shape)


def _check(layer: Any, shape: tuple[int, ...], allowed: float, by: str) -> None:
    norm = spectral_norm(dense(layer, shape))
    if not norm <= allowed:
        raise Violation(
            f"norm {norm:.8g} > {allowed:.8g} by {by} of {layer.extra_repr()} {layer.weight.dtype} at {shape}"
        )
