"""The Jacobian J of g at x: J v from the slopes of its activations, and J' v, the only thing that series need of it.

A g that can be read is multiplied out, J' = W_1' D_1 W_2' D_2 ...: one ordinary graph, which is faster to differentiate
than a vector-Jacobian product; where a result is taken twice, what comes back is added. Any other g goes through
`torch.func.vjp`. Where tr J has a closed form (`trace`) it comes along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..lipschitz.conditioned import Conditioned
from ..logdet import Jacobian
from ..trust import unwrap
from .program import LAYERS, Program, Step, apply_step, apply_transpose, interpret, try_parse
from .trace import StepTranspose, closed_form_trace


def linearise(g: nn.Module, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Jacobian]:
    """g(x) and its Jacobian at x, differentiable in x and in the parameters where gradients are on."""
    found = try_parse(g)
    if found is None or not found.program.has_slopes or not found.program.accepts(x):
        y, vjp = cast(Any, torch.func.vjp(lambda t: g(t) if context is None else g(t, context), x))
        return y, Jacobian(lambda v: cast(Tensor, vjp(v)[0]))
    if x.dim() > 2:  # what the hooks of constrained layers do when they are called, which they are not here
        found.record_sizes(tuple(x.shape[2:]))
    program = found.program
    shift = cast(Conditioned, unwrap(g)).embed_context(context, len(x)) if program.is_conditional else None
    values = _channels_last_weights(found.tensors(shift), x)
    y, backs = linearise_program(program, x, values)
    trace = closed_form_trace(program, x, values, backs)
    return y, Jacobian(lambda v: vector_jacobian_product(program, backs, v), broadcasts=x.dim() == 2, trace=trace)


def linearise_program(program: Program, x: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, list[StepTranspose]]:
    """g(x) and the transpose of every step's derivative there, all one graph, differentiable in x and the tensors."""
    backs: list[StepTranspose] = []

    def step_by_step(i: int, step: Step, inputs: list[Tensor], own: list[Tensor]) -> Tensor:
        y = apply_step(step, inputs, own)
        backs.append(_step_transpose(step, inputs, y, own))
        return y

    return interpret(program, x, values, step_by_step), backs


def vector_jacobian_product(program: Program, backs: Sequence[StepTranspose], v: Tensor) -> Tensor:
    """J' v."""
    waiting = {len(backs): v}
    for n in range(len(backs), 0, -1):
        for into, back in zip(program.inputs[n - 1], backs[n - 1](waiting.pop(n)), strict=True):
            waiting[into] = waiting[into] + back if into in waiting else back
    return waiting[0]


def _step_transpose(step: Step, inputs: list[Tensor], y: Tensor, own: list[Tensor]) -> StepTranspose:
    """The transpose of the derivative of y = step(inputs)."""
    x = inputs[0]
    if step.kind == "join":
        (a, b), channels, dim = own[0].unbind(), x.shape[1], 1 if x.dim() > 2 else -1
        return lambda v: _parted(a, b, *torch.split(v, [channels, v.shape[dim] - channels], dim))
    if step.kind == "shift":
        return lambda v: [v]
    if step.kind == "descent":
        forwards = Step("linear" if step.geometry is None else "conv", 1, step.geometry)
        return lambda v: [-apply_step(forwards, [v.to(own[0].dtype)], own)]
    if step.kind in LAYERS:
        return lambda v: [apply_transpose(step, v, own[0], x.shape[2:])]
    d = activation_slope(step, x, y, own)
    return lambda v: [v * d]


def _parted(a: Tensor, b: Tensor, kept: Tensor, made: Tensor) -> list[Tensor]:
    return [a * kept, b * made]


def activation_slope(step: Step, x: Tensor, y: Tensor, own: Sequence[Tensor]) -> Tensor:
    """d y / d x of an activation y = step(x), differentiable in x."""
    record = step.activation
    if record is None or record.slope is None:
        raise ValueError(f"no closed slope is known for {step.kind}.")
    return record.slope(x, y, *step.settings, *own)


def _channels_last_weights(tensors: list[Tensor], x: Tensor) -> list[Tensor]:
    """On a CPU, for images and without a graph: weights with their channels last, which products take on. That halves
    the time of a series."""
    if x.device.type != "cpu" or x.dim() != 4 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return tensors
    return [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors]
