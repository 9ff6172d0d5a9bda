"""A unit as a torch.autograd.Function: the tensors saved for the backward pass, and the gradient of each input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import launch
from .tuning import Shape


class UnitFunction(torch.autograd.Function):
    """(x, y, bias, shift, log_scale, W_1, b_1, W_2, b_2, W_3) -> (x', y'), in the notation of `forward`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, bias: Tensor | None, shift: Tensor | None, log_scale: Tensor | None,
        *values: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x, y, values = _last(x), _last(y), tuple(_last(v) if v.dim() == 4 else v for v in values)
        shape = Shape.of(x)
        norm = None if shift is None or log_scale is None else (shift, log_scale)
        out, a0 = launch.enter(shape, x, y, bias, norm)
        a1, a2, y = launch.inner(shape, a0, list(values))
        ctx.shape, ctx.bias = shape, bias is not None
        ctx.save_for_backward(out, a0, a1, a2, values[0], values[2], values[4], log_scale)
        return out, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gx: Tensor, gy: Tensor) -> tuple[Tensor | None, ...]:
        saved = launch.Saved(*ctx.saved_tensors)
        dx, dy, dw1, dw2, dw3, vectors = launch.back(ctx.shape, _last(gx), _last(gy), saved)
        b1, b2, bias, shift, scale = vectors.unbind(0)
        norm = (None, None) if saved.log_scale is None else (shift, scale)
        return dx, dy, bias if ctx.bias else None, *norm, dw1, b1, dw2, b2, dw3


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)
