"""The constraint W -> W min(1, c / sigma) for a stack of weights of one shape at once, in few kernels.

Layers of one shape are stacked in the memory layout of their weights. With sigma = <W, G> and s = c / sigma where
sigma > c, the gradient D of the scaled weights turns into the gradient s D - (s / sigma) <D, W> G of the weights.
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
    """How a stack is scaled: the coefficient c, whether sigma has a gradient, and the dtype of the result.

    With a `dtype`, the scaled weights of convolutions are in channels-last layout. `compiled` fuses elementwise work.
    """

    coefficient: float
    differentiate: bool = True
    dtype: torch.dtype | None = None
    compiled: bool = False


def scale_weights(
    weight: Tensor, gradient: Tensor, sigma: Tensor, rule: ScalingRule, originals: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Scale a stack of weights, given its G and sigma; return one weight per layer, with gradients to `originals`."""
    result: tuple[Tensor, ...] = Scaling.apply(weight, gradient, sigma, rule, *originals)  # type: ignore[no-untyped-call]
    return result


def cast_weights(weights: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Cast unconstrained weights of one shape to another dtype, channels last, with gradients."""
    result: tuple[Tensor, ...] = Casting.apply(dtype, *weights)  # type: ignore[no-untyped-call]
    return result


class Scaling(torch.autograd.Function):
    """W min(1, c / sigma) for a stack; backward sends each layer's gradient to its own weight."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, gradient: Tensor, sigma: Tensor, rule: ScalingRule, *originals: Tensor
    ) -> tuple[Tensor, ...]:
        scale = rule.coefficient / sigma.clamp_min(rule.coefficient)
        # The factor of <D, W> G: zero where the weight is within the bound; None where sigma counts as constant.
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
    """Cast weights of one shape to another dtype."""

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
    """Multiply the stack by its scales and cast it."""
    return _channels_last(weight * broadcast_over(scale, weight.dim() - 1), dtype)


def scaling_backward(d: Tensor, weight: Tensor, gradient: Tensor, scale: Tensor, part: Tensor | None) -> Tensor:
    """Turn the gradient D of the scaled weights into that of the weights: s D - part <D, W> G."""
    d = d.to(weight.dtype)
    if part is None:
        return d * broadcast_over(scale, d.dim() - 1)
    inner = (d * weight).sum(tuple(range(1, d.dim())))
    return d * broadcast_over(scale, d.dim() - 1) - broadcast_over(inner * part, d.dim() - 1) * gradient


def stack_weights(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors of one shape, (layers, ...), keeping their memory layout: channels last stay last."""
    if tensors[0].dim() == 4 and tensors[0].stride(1) == 1:
        return torch.stack([t.movedim(1, -1) for t in tensors]).movedim(-1, 2)
    return torch.stack(list(tensors))


def _stack_gradients(gradients: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Stack the gradients of the layers; a missing gradient is zero."""
    known = next((g for g in gradients if g is not None), like[0])
    return stack_weights([torch.zeros_like(known) if g is None else g for g in gradients])


def _unstack_gradients(gradients: Sequence[Tensor | None], stack: Tensor) -> list[Tensor | None]:
    """Split a stack of gradients; None for layers without a gradient, so that no optimiser moves them."""
    return [None if g is None else result for g, result in zip(gradients, stack.unbind(0), strict=True)]


def _channels_last(stack: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a stack, with the input channels of each layer last in memory."""
    if stack.dim() == 3:
        return stack.to(dtype)
    return stack.movedim(2, -1).to(dtype, memory_format=torch.contiguous_format).movedim(-1, 2)


def broadcast_over(value: Tensor, axes: int) -> Tensor:
    """Reshape a vector so that it broadcasts over `axes` further axes."""
    return value.view(-1, *(1,) * axes)
