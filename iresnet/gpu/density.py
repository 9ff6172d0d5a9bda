"""A unit with its log-determinant, from the pair (y', J v) that `dual` computes.

    x' = (x + y + b + shift) exp(log_scale),   y' = g(x'),   s = sum_k c_(k+1) (J')^k v, held fixed,
    ln det ~ sum_k a_k v' J^k v,   d ln det ~ d (s' J v),     a and c the weights of value and gradient

Only the backward pass of (y', J v) is needed, with the incoming gradients (gradient of y', s). Since v' J^k v =
(J'^(k-1) v)' (J v), n terms take n - 1 products with J', which need no autograd graph. Neither the compiled functions
nor the saved tensors depend on n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..compiler import maybe_compile
from ..logdet import refuse_second_derivative
from .dual import ExecutionMode, Layer, Slope, Stage, forward, read_layers
from .maps import Unrolled, as_images, as_matrix


def advance_with_logdet(
    parts: Sequence[Stage], mode: ExecutionMode, x: Tensor, y: Tensor, bias: Tensor | None,
    norm: tuple[Tensor, Tensor] | None, values: list[Tensor], noise: Tensor, weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the next (x, y) and ln det of the block, one number per sample, without the ActNorm's.

    `values` are the tensors of g without the bias of its last layer, `noise` the probes (probes x batch, ...), as signs
    or as bits, `weights` the series weights as packed by `pack`.
    """
    layers: Sequence[Layer] = read_layers(parts, values, tuple(x.shape[2:]), len(x) * (1 + mode.probes), mode)
    after, v, h, layers, slopes = forward(mode, layers, as_matrix(x), as_matrix(y), bias, norm, noise)
    s, value = estimate(mode, layers, slopes, v, h.detach()[len(after) :], weights, len(x))
    y, logdet = LeaveUnit.apply(mode, h, s, value)  # type: ignore[no-untyped-call]
    return as_images(after, x.shape[2:]), as_images(y, x.shape[2:]), logdet


def advance_without_logdet(
    parts: Sequence[Stage], mode: ExecutionMode, x: Tensor, y: Tensor, bias: Tensor | None,
    norm: tuple[Tensor, Tensor] | None, values: list[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the next (x, y), without probes."""
    layers = read_layers(parts, values, tuple(x.shape[2:]), len(x), mode)
    after, _, h, *_ = forward(mode, layers, as_matrix(x), as_matrix(y), bias, norm, None)
    return as_images(after, x.shape[2:]), as_images(h, x.shape[2:])


class LeaveUnit(torch.autograd.Function):
    """(y', J v) -> y', ln det; the gradient of ln det is that of s' J v."""

    @staticmethod
    def forward(ctx: Any, mode: ExecutionMode, h: Tensor, s: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        ctx.mode, ctx.dtype = mode, h.dtype
        ctx.save_for_backward(s)
        return h[: len(h) // (1 + mode.probes)], value

    @staticmethod
    def backward(ctx: Any, gy: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        (s,) = ctx.saved_tensors
        return None, maybe_compile(seed, ctx.mode.compiled)(gy, g, s, ctx.mode.probes, ctx.dtype), None, None


def seed(gy: Tensor, g: Tensor, s: Tensor, probes: int, dtype: torch.dtype) -> Tensor:
    """Return the gradients of y' and of J v as one matrix, given those of y' and of ln det."""
    s = s.view(probes, len(g), -1, s.shape[1]) * (g / probes)[:, None, None]
    return torch.cat([gy.to(dtype), s.flatten(0, 2).to(dtype)])


def estimate(
    mode: ExecutionMode, layers: Sequence[Layer], slopes: Sequence[Slope], v: Tensor, jv: Tensor, weights: Tensor,
    batch: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return s and the value of the series, averaged over the probes; `jv` is J v."""
    with torch.no_grad():
        s, total, w = v, torch.zeros_like(v), v
        for row in weights[:-1]:
            w, s, total = term(mode, layers, slopes, w, s, total, row)
        return s, maybe_compile(finish, mode.compiled)(total, v, w, jv, weights[-1], mode.probes, batch)


def term(
    mode: ExecutionMode,
    layers: Sequence[Layer],
    slopes: Sequence[Slope],
    w: Tensor,
    s: Tensor,
    total: Tensor,
    row: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute J' w for all probes and add it to both sums with its two weights."""
    for layer, slope in zip(layers[:0:-1], slopes[:0:-1], strict=True):
        w = layer.map.transpose_times(w, layer.matrix, cast(Tensor, slope.values), activated=slope.activated)
    first, d = layers[0], slopes[0].values
    if d is None and isinstance(first.map, Unrolled) and first.map.widens:
        found: tuple[Tensor, Tensor, Tensor] = first.map.transpose_then(add, w, first.matrix, s, total, row)
        return found
    m = first.matrix
    w = first.map.transpose(w, m) if d is None else first.map.transpose_times(w, m, d)
    return cast("tuple[Tensor, Tensor, Tensor]", maybe_compile(add, mode.compiled)(w, s, total, row))


def add(w: Tensor, s: Tensor, total: Tensor, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add one term to both sums."""
    return w, s + row[1] * w, total + row[0] * w


def finish(total: Tensor, v: Tensor, w: Tensor, jv: Tensor, row: Tensor, probes: int, batch: int) -> Tensor:
    """Return the sum of all terms, one number per sample; the last term comes from J v."""
    terms = total * v + row[0] * w * jv
    return terms.view(probes, batch, -1).sum(2).mean(0)


def pack(value: Tensor, gradient: Tensor) -> Tensor:
    """Pack the weights of a series, (terms, 1) each: a row holds a term's value weight and the next gradient weight.

    Rows are padded with zeros to eight numbers, so that each is aligned in memory.
    """
    n = len(value)
    following = torch.cat([gradient[1:], torch.zeros_like(gradient[:1])])
    return torch.cat([value, following, value.new_zeros(n, 6)], dim=1)
