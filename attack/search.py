"""Search for counterexamples to a certificate: points whose images are too far apart, samples that mix."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from .networks import generator, log_uniform

Function: TypeAlias = Callable[[Tensor], Tensor]


def branch_of(block: nn.Module, x: Tensor) -> Tensor:
    """The residual branch of the live block, block(x) - x; x is not modified."""
    return cast(Tensor, block(x.clone())) - x


def norms(x: Tensor) -> Tensor:
    """The l2 norm of every sample, in float64."""
    return x.detach().double().flatten(1).norm(dim=1)


def largest_ratio(f: Function, x: Tensor, r: random.Random, steps: int = 4) -> float:
    """The largest ||f(a) - f(b)|| / ||a - b|| found by random pairs and power iteration, minus rounding errors."""
    g, best = generator(r), 0.0
    v = torch.randn(x.shape, generator=g, dtype=torch.float64)
    eps = torch.finfo(x.dtype).eps
    for _ in range(steps):
        length = log_uniform(r, -3 if x.dtype == torch.float64 else -1, 1) * norms(x).clamp_min(1e-3)
        across = v * (length / norms(v).clamp_min(1e-300)).view(-1, *(1,) * (x.dim() - 1))
        other = (x.double() + across).to(x.dtype)
        with torch.no_grad():
            a, b = f(x.clone()), f(other.clone())
        noise = 256 * eps * (norms(a) + norms(b) + norms(x) + 1)
        ratio = (norms(b.double() - a.double()) - noise) / norms(other.double() - x.double()).clamp_min(1e-300)
        best = max(best, float(ratio.nan_to_num(nan=0.0).max()))
        pulled = _vjp(f, x, b.detach() - a.detach())
        v = torch.randn(x.shape, generator=g, dtype=torch.float64) if pulled is None else pulled.double()
    return best


def _vjp(f: Function, x: Tensor, u: Tensor) -> Tensor | None:
    """J' u, or None if there is no usable gradient."""
    try:
        with torch.enable_grad():
            leaf = x.detach().clone().requires_grad_()
            (gradient,) = torch.autograd.grad((f(leaf + 0) * u).sum(), leaf)
    except RuntimeError:
        return None
    return gradient if bool(gradient.isfinite().all()) and bool((gradient != 0).any()) else None


def mixes_samples(f: Function, x: Tensor, r: random.Random) -> bool:
    """Whether the output for a sample depends on other samples of its batch."""
    other = x[:1] + torch.randn(x.shape, generator=generator(r), dtype=torch.float64).to(x.dtype)
    other[0] = x[0]
    with torch.no_grad():
        a, b = f(x.clone())[:1], f(other)[:1]
    slack = 1e4 * torch.finfo(x.dtype).eps * (1 + norms(a) + norms(x[:1]))
    return bool((norms(a.double() - b.double()) > slack).any())
