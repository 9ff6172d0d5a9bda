"""What a unit computes: an ActNorm and a residual block as one function, g in another precision.

Between two blocks stand a sum, an ActNorm and an activation. The carried pair (x, y) is a state x + y whose sum is not
made yet, so that all three become one kernel:

    x <- (x + y + b + shift) exp(log_scale),   y <- g(x) without the bias b of its last layer

x stays in the precision of the data (float32); g computes in `dtype`, convolutions with their channels last. What it
computes beside that with a log-determinant is in `density`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from ..lipschitz import Program, program
from ..lipschitz.program import Step

Affine = tuple[Tensor, Tensor]


@cache
def advance(steps: Program, dtype: torch.dtype, compiled: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function of all blocks with these steps: (x, y, bias, ActNorm, tensors of g) -> the next (x, y)."""
    bare = _without_last_bias(steps)

    def function(
        x: Tensor, y: Tensor | None, bias: Tensor | None, norm: Affine | None, values: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        x = _entered(x, y, bias, norm)
        return x, _branch(bare, x, values, dtype)

    return cast(Any, torch.compile(function, dynamic=False)) if compiled else function


def settled(x: Tensor, y: Tensor | None, bias: Tensor | None) -> Tensor:
    """The state that a pair stands for."""
    if y is None:
        return x
    return x + y if bias is None else x + y + _per_channel(bias, x)


def _entered(x: Tensor, y: Tensor | None, bias: Tensor | None, norm: Affine | None) -> Tensor:
    x = settled(x, y, bias)
    return x if norm is None else (x + _per_channel(norm[0], x)) * _per_channel(norm[1], x).exp()


def _branch(steps: Program, x: Tensor, values: list[Tensor], dtype: torch.dtype) -> Tensor:
    """g(x) with linear maps in `dtype`; biases and activations in float32, where the compiler joins them."""
    h, used = x, 0
    for step in steps:
        taken, used = values[used : used + step.tensors], used + step.tensors
        if program.acts(step):
            h = program.apply(step, h, taken)
            continue
        # Most weights come in this precision.
        h = program.apply(Step(step.kind, 1, step.geometry), h.to(dtype), [taken[0].to(dtype)])
        if step.tensors == 2:
            h = h + _per_channel(taken[1], h)
    return h


def _without_last_bias(steps: Program) -> Program:
    return (*steps[:-1], replace(steps[-1], tensors=min(steps[-1].tensors, 1)))


def _per_channel(value: Tensor, x: Tensor) -> Tensor:
    return value.view(-1, *(1,) * (x.dim() - 2))
