"""A unit: an ActNorm and a residual block as one function, with g in another precision.

Between two blocks there are a sum, an ActNorm and an activation. The pair (x, y) passed from unit to unit is a state
x + y that is not summed yet, so that these three become one kernel:

    x <- (x + y + b + shift) exp(log_scale),   y <- g(x) without the bias b of its last layer

x stays in the precision of the data (float32); g computes in `dtype`, with channels-last convolutions. `density` adds
the log-determinant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from ..branch import Program, Step, StepFunction, run_program
from ..branch.program import apply_step
from ..lipschitz.scaling import broadcast_over

Affine = tuple[Tensor, Tensor]


@cache
def unit_function(program: Program, dtype: torch.dtype, compiled: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function of all units with this program: (x, y, bias, ActNorm, tensors of g) -> the next (x, y)."""
    bare, step_functions = _without_last_bias(program), [_mixed_precision(dtype)] * len(program.steps)

    def function(
        x: Tensor, y: Tensor | None, bias: Tensor | None, norm: Affine | None, values: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        x = _enter(x, y, bias, norm)
        return x, run_program(bare, x, values, step_functions)

    return cast(Any, torch.compile(function, dynamic=False)) if compiled else function


def state_sum(x: Tensor, y: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return the state x + y + bias."""
    if y is None:
        return x
    return x + y if bias is None else x + y + broadcast_over(bias, x.dim() - 2)


def _enter(x: Tensor, y: Tensor | None, bias: Tensor | None, norm: Affine | None) -> Tensor:
    x = state_sum(x, y, bias)
    return (
        x if norm is None else (x + broadcast_over(norm[0], x.dim() - 2)) * broadcast_over(norm[1], x.dim() - 2).exp()
    )


def _mixed_precision(dtype: torch.dtype) -> StepFunction:
    """Return a step function with linear maps in `dtype`, and biases and activations in float32, which are fused."""

    def mixed_step(step: Step, h: Tensor, own: list[Tensor]) -> Tensor:
        # Most weights already have this dtype.
        h = apply_step(Step(step.kind, 1, step.geometry), [h.to(dtype)], [own[0].to(dtype)])
        return h + broadcast_over(own[1], h.dim() - 2) if step.tensors == 2 else h

    return mixed_step


def _without_last_bias(program: Program) -> Program:
    *steps, last = program.steps
    return replace(program, steps=(*steps, replace(last, tensors=min(last.tensors, 1))))
