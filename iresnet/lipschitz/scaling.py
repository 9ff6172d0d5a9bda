"""Weights of one shape constrained at once, W -> W min(1, c / sigma), in few kernels: what makes a step cheap.

Layers of one shape are stacked, in the layout their weights have in memory. With sigma = <W, G> and s = c / sigma where
sigma > c, a gradient D of the scaled weights becomes s D - (s / sigma) <D, W> G, one of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..compiler import maybe_compile


@dataclass(frozen=True)
class ScalingRule:
    """How a stack is scaled: its coefficient, whether sigma has a gradient, the precision of the result, if another.

    In another precision convolutions have their channels last. `compiled` joins the elementwise work.
    """

    coefficient: float
    differentiate: bool = True
    dtype: torch.dtype | None = None
    compiled: bool = False


def scale_weights(
    weight: Tensor, gradient: Tensor, sigma: Tensor, rule: ScalingRule, originals: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The constrained weights of layers, given a stack of their weights, its G and its sigma; with gradient."""
    found: tuple[Tensor, ...] = Scaling.apply(weight, gradient, sigma, rule, *originals)  # type: ignore[no-untyped-call]
    return found


def cast_weights(weights: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Weights of one shape, without a constraint, in another precision, their channels last; with gradient."""
    found: tuple[Tensor, ...] = Casting.apply(dtype, *weights)  # type: ignore[no-untyped-call]
    return found


class Scaling(torch.autograd.Function):
    """W min(1, c / sigma) of a stack; the gradient of every layer goes to its own weight."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, gradient: Tensor, sigma: Tensor, rule: ScalingRule, *originals: Tensor
    ) -> tuple[Tensor, ...]:
        scale = rule.coefficient / sigma.clamp_min(rule.coefficient)
        # How much of <D, W> G is taken off: none where the weight is small enough, or sigma counts as constant.
        part = torch.where(sigma > rule.coefficient, scale / sigma, 0.0) if rule.differentiate else None
        ctx.save_for_backward(weight, gradient, scale, part)
        ctx.rule = rule
        ctx.set_materialize_grads(False)
        if rule.dtype is None:
            return (weight * broadcast_over(scale, weight.dim() - 1)).to(originals[0].dtype).unbind(0)
        small: Tensor = maybe_compile(scale_and_cast, rule.compiled)(weight, scale, rule.dtype)
        return small.unbind(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        weight, gradient, scale, part = ctx.saved_tensors
        d = _stack_gradients(gradients, weight)
        result = maybe_compile(scaling_backward, ctx.rule.compiled)(d, weight, gradient, scale, part)
        return (None, None, None, None, *_unstack_gradients(gradients, result))


class Casting(torch.autograd.Function):
    """Weights of one shape in another precision."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.like = stack_weights(weights)
        ctx.set_materialize_grads(False)
        return _channels_last(ctx.like, dtype).unbind(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *_unstack_gradients(gradients, _stack_gradients(gradients, ctx.like).to(ctx.like.dtype)))


def scale_and_cast(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The stack times its scales, in another precision."""
    return _channels_last(weight * broadcast_over(scale, weight.dim() - 1), dtype)


def scaling_backward(d: Tensor, weight: Tensor, gradient: Tensor, scale: Tensor, part: Tensor | None) -> Tensor:
    """The gradient D of the scaled weights as one of the weights: s D - part <D, W> G."""
    d = d.to(weight.dtype)
    if part is None:
        return d * broadcast_over(scale, d.dim() - 1)
    inner = (d * weight).sum(tuple(range(1, d.dim())))
    return d * broadcast_over(scale, d.dim() - 1) - broadcast_over(inner * part, d.dim() - 1) * gradient


def stack_weights(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape as one, (layers, ...), each in the layout it has: channels last stay last."""
    if tensors[0].dim() == 4 and tensors[0].stride(1) == 1:
        return torch.stack([t.movedim(1, -1) for t in tensors]).movedim(-1, 2)
    return torch.stack(list(tensors))


def _stack_gradients(gradients: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Gradients of a stack's layers as one tensor; what got none is zero."""
    known = next((g for g in gradients if g is not None), like[0])
    return stack_weights([torch.zeros_like(known) if g is None else g for g in gradients])


def _unstack_gradients(gradients: Sequence[Tensor | None], stack: Tensor) -> list[Tensor | None]:
    """The layers of a stack; None for those that had no part in the result, so that no optimiser moves them."""
    return [None if g is None else one for g, one in zip(gradients, stack.unbind(0), strict=True)]


def _channels_last(stack: Tensor, dtype: torch.dtype) -> Tensor:
    """The stack in another precision, each layer of it with its input channels last in memory."""
    if stack.dim() == 3:
        return stack.to(dtype)
    return stack.movedim(2, -1).to(dtype, memory_format=torch.contiguous_format).movedim(-1, 2)


def broadcast_over(value: Tensor, axes: int) -> Tensor:
    """One number after another, each for all positions of so many axes after it."""
    return value.view(-1, *(1,) * axes)
