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

from ..branch import Program, Step, StepFunction, run_program
from ..branch.program import apply_step
from ..lipschitz.scaling import broadcast_over

Affine = tuple[Tensor, Tensor]


@cache
def unit_function(program: Program, dtype: torch.dtype, compiled: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function of all blocks with this program: (x, y, bias, ActNorm, tensors of g) -> the next (x, y)."""
    bare, ways = _without_last_bias(program), [_mixed(dtype)] * len(program.steps)

    def function(
        x: Tensor, y: Tensor | None, bias: Tensor | None, norm: Affine | None, values: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        x = _entered(x, y, bias, norm)
        return x, run_program(bare, x, values, ways)

    return cast(Any, torch.compile(function, dynamic=False)) if compiled else function


def state_sum(x: Tensor, y: Tensor | None, bias: Tensor | None) -> Tensor:
    """The state that a pair stands for."""
    if y is None:
        return x
    return x + y if bias is None else x + y + broadcast_over(bias, x.dim() - 2)


def _entered(x: Tensor, y: Tensor | None, bias: Tensor | None, norm: Affine | None) -> Tensor:
    x = state_sum(x, y, bias)
    return (
        x if norm is None else (x + broadcast_over(norm[0], x.dim() - 2)) * broadcast_over(norm[1], x.dim() - 2).exp()
    )


def _mixed(dtype: torch.dtype) -> StepFunction:
    """Linear maps in `dtype`; biases and activations in float32, where the compiler joins them."""

    def mode(step: Step, h: Tensor, own: list[Tensor]) -> Tensor:
        # Most weights come in this precision.
        h = apply_step(Step(step.kind, 1, step.geometry), [h.to(dtype)], [own[0].to(dtype)])
        return h + broadcast_over(own[1], h.dim() - 2) if step.tensors == 2 else h

    return mode


def _without_last_bias(program: Program) -> Program:
    *steps, last = program.steps
    return replace(program, steps=(*steps, replace(last, tensors=min(last.tensors, 1))))
