"""What a unit computes: an ActNorm and a residual block as one function, g in another precision.

Between two blocks stand a sum, an ActNorm and an activation. The carried pair (x, y) is a state x + y whose sum is not
made yet, so that all three become one kernel:

    x <- (x + y + b + shift) exp(log_scale),   y <- g(x) without the bias b of its last layer

x stays in the precision of the data (float32); g computes in `dtype`, convolutions with their channels last. With a
log-determinant, the power series of ln det(I + J) is made beside it, products with J' in `dtype`, sums in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from ..lipschitz import Program, program
from ..lipschitz.program import Step
from ..logdet import Jacobian, Pull, series, series_weights

Affine = tuple[Tensor, Tensor]


@cache
def advance(steps: Program, dtype: torch.dtype, compiled: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function of all blocks with these steps: (x, y, bias, ActNorm, tensors of g) -> the next (x, y)."""
    bare = _without_last_bias(steps)

    def function(
        x: Tensor, y: Tensor | None, bias: Tensor | None, norm: Affine | None, values: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        x = _entered(x, y, bias, norm)
        return x, _linearised(bare, x, values, dtype, None)

    return cast(Any, torch.compile(function, dynamic=False)) if compiled else function


@cache
def advance_with_logdet(
    steps: Program, dtype: torch.dtype, terms: int, compiled: bool
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The same with a probe v: (x, y, bias, ActNorm, tensors of g, v) -> the next (x, y), and ln det of both maps."""
    bare = _without_last_bias(steps)

    def function(
        x: Tensor, y: Tensor | None, bias: Tensor | None, norm: Affine | None, values: list[Tensor], v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        transposes: list[Pull] = []
        x = _entered(x, y, bias, norm)
        y = _linearised(bare, x, values, dtype, transposes)
        logdet = series(Jacobian(lambda w: program.pull(transposes, w)), v, *series_weights(terms, x))
        if norm is not None:
            logdet = logdet + math.prod(x.shape[2:]) * norm[1].sum()
        return x, y, logdet

    return cast(Any, torch.compile(function, dynamic=False)) if compiled else function


def settled(x: Tensor, y: Tensor | None, bias: Tensor | None) -> Tensor:
    """The state that a pair stands for."""
    if y is None:
        return x
    return x + y if bias is None else x + y + _per_channel(bias, x)


def _entered(x: Tensor, y: Tensor | None, bias: Tensor | None, norm: Affine | None) -> Tensor:
    x = settled(x, y, bias)
    return x if norm is None else (x + _per_channel(norm[0], x)) * _per_channel(norm[1], x).exp()


def _linearised(
    steps: Program, x: Tensor, values: list[Tensor], dtype: torch.dtype, transposes: list[Pull] | None
) -> Tensor:
    """g(x) with linear maps in `dtype`; biases and activations in float32, where the compiler joins them.

    The transposes of the derivatives of all steps are noted, if a list is given for them.
    """
    h, used = x, 0
    for step in steps:
        taken, used = values[used : used + step.tensors], used + step.tensors
        if program.acts(step):
            y = program.apply(step, h, taken)
            if transposes is not None:
                transposes.append(_times(program.slope(step, h, y, taken).to(dtype)))
            h = y
            continue
        bare, a = Step(step.kind, 1, step.geometry), h.to(dtype)
        weight = [taken[0].to(dtype)]  # most come in it
        h = program.apply(bare, a, weight)
        if transposes is not None:
            transposes.append(program.transpose(bare, a, h, weight))
        if step.tensors == 2:
            h = h + _per_channel(taken[1], h)
    return h


def _times(d: Tensor) -> Pull:
    return lambda v: v.to(d.dtype) * d


def _without_last_bias(steps: Program) -> Program:
    last = steps[-1]
    return (*steps[:-1], Step(last.kind, min(last.tensors, 1), last.geometry, last.constant))


def _per_channel(value: Tensor, x: Tensor) -> Tensor:
    return value.view(-1, *(1,) * (x.dim() - 2))
