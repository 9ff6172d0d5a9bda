"""Weighted sums of v' J^k v: the weights, the value with its gradient, and early stopping.

The value and gradient of Algorithm 2 in one pass; see `iresnet.logdet` for the formulas.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from ..compiler import can_read_values
from ..shard import draw_rows
from .jacobian import Jacobian

#: On a GPU, the number of terms between two checks whether a series may stop: a check waits for the device.
CHECK_EVERY = 4


def series_weights(terms: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the (value, gradient) weights of the truncated series, each (terms, 1)."""
    k = torch.arange(1, terms + 1, dtype=x.dtype, device=x.device)
    sign = 1 - 2 * ((k - 1) % 2)
    return (sign / k)[:, None], sign[:, None]


def roulette_weights(terms: int, q: float, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Draw a number of terms per sample; return (value, gradient) weights, each (N, batch), N the largest number drawn.

    A sample draws N = terms + floor(ln U / ln q), so that P(N >= k) = q^(k - terms) for k > terms. It is computed as a
    power: a difference of distribution functions would lose all digits.
    """
    u = draw_rows(lambda shape: torch.rand(shape, dtype=torch.float64, device=x.device, generator=generator), (len(x),))
    extra = torch.floor(u.clamp_min(1e-300).log() / math.log(q))
    n = int(extra.max()) + terms
    k = torch.arange(1, n + 1, dtype=torch.float64, device=x.device)[:, None]
    value, gradient = survival_weights(k, terms, q, x.dtype)
    drawn = (k <= extra + terms).to(x.dtype)
    return value * drawn, gradient * drawn


def survival_weights(k: Tensor, terms: int, q: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the (value, gradient) weights of terms k, each divided by its survival probability P(N >= k)."""
    survival = q ** (k - terms).clamp_min(0)
    sign = 1 - 2 * ((k - 1) % 2)
    return (sign / k / survival).to(dtype), (sign / survival).to(dtype)


def power_series(jacobian: Jacobian, v: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
    """Compute sum_k value_k v' J^k v, with the gradient of s' J v, s = sum_k gradient_k (J')^(k-1) v."""
    lead = (-1, *(1,) * (v.dim() - 1))
    with torch.no_grad():
        total = torch.zeros(len(v), dtype=v.dtype, device=v.device)
        s, w = gradient[0].reshape(lead) * v, v
        for k in range(len(value)):
            w = jacobian(w)
            total = total + value[k] * (w * v).flatten(1).sum(1)
            if k + 1 < len(value):
                s = s + gradient[k + 1].reshape(lead) * w
    if not torch.is_grad_enabled():
        return total
    surrogate = (jacobian(s) * v).flatten(1).sum(1)
    return attach_gradient(total, surrogate)


def adaptive_series(
    jacobian: Jacobian,
    v: Tensor,
    max_terms: int,
    lipschitz: float,
    tolerance: float,
    trace: Tensor | None = None,
    u: Tensor | None = None,
) -> Tensor:
    """Compute sum_k (-1)^(k+1) v' J^k v / k, for each sample until the remainder is at most `tolerance`.

    After n terms the remainder is at most ||v|| ||(J')^n v|| sum_k>n L^(k-n) / k. Every sample stops on its own, so its
    value does not depend on the rest of the batch. `trace`, where tr J is known, replaces the first term v' J v.

    With `u`, uniform in (0, 1], a sample stops at a remainder of at most `u * tolerance` instead. A term is reached
    with the probability that the last bound of the remainder exceeds `u * tolerance`; divided by it, the terms have
    the mean of the whole series.
    """
    total, w, reached = v.new_zeros(len(v)), v, v.new_ones(len(v))
    active, u = torch.ones_like(reached, dtype=torch.bool), reached if u is None else u.to(v.dtype)
    factor = v.flatten(1).norm(dim=1) * (lipschitz / (1 - lipschitz) / tolerance)
    for k in range(1, max_terms + 1):
        w = jacobian(w)
        term = (w * v).flatten(1).sum(1) if k > 1 or trace is None else trace
        total = total + torch.where(active, term * ((1 - 2 * ((k - 1) % 2)) / k) / reached, 0.0)
        remainder = factor * w.flatten(1).norm(dim=1) / (k + 1)  # its bound, as a multiple of the tolerance
        reached, active = torch.minimum(reached, remainder), active & ~(remainder <= u)
        if k % (CHECK_EVERY if v.is_cuda else 1) == 0 and can_read_values(v) and not bool(active.any()):
            break
    return total


def attach_gradient(value: Tensor, surrogate: Tensor) -> Tensor:
    """Return a tensor with the value of `value` and the gradient of `surrogate`; double backward raises."""
    if torch.compiler.is_compiling():
        return value + (surrogate - surrogate.detach())
    return cast(Tensor, _AttachGradient.apply(value, surrogate))  # type: ignore[no-untyped-call]


def refuse_second_derivative() -> None:
    """Raise inside a backward pass with `create_graph=True`: its own gradient would be wrong."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "trying to differentiate twice: the gradient of an estimated log-determinant or of an inverse cannot be "
            "differentiated. Use Exact() and first-order methods, or drop create_graph=True; torch.func.grad always "
            "creates a graph, torch.autograd.grad does not."
        )


class _AttachGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, surrogate: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[None, Tensor]:
        refuse_second_derivative()
        return None, grad
