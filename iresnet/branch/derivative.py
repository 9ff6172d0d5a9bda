"""g(x) and the Jacobian J of g at x, as the map v -> J' v, which is all that the series for ln det needs.

For a g with a program, J' = W_1' D_1 W_2' D_2 ... is multiplied out, D_i the slopes of the activations: an ordinary
graph, which is faster to differentiate than a vector-Jacobian product. If a result is used twice, its gradients are
added. Any other g uses `torch.func.vjp`. tr J is included where it has a closed form (`trace`).
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
    """Return g(x) and its Jacobian at x, both differentiable in x and the parameters if gradients are enabled."""
    parsed = try_parse(g)
    if parsed is None or not parsed.program.has_slopes or not parsed.program.accepts(x):
        y, vjp = cast(Any, torch.func.vjp(lambda t: g(t) if context is None else g(t, context), x))
        return y, Jacobian(lambda v: cast(Tensor, vjp(v)[0]))
    if x.dim() > 2:  # the hooks of constrained layers do this when a layer is called; here none is
        parsed.record_sizes(tuple(x.shape[2:]))
    program = parsed.program
    shift = cast(Conditioned, unwrap(g)).embed_context(context, len(x)) if program.is_conditional else None
    values = _channels_last_weights(parsed.tensors(shift), x)
    y, transposes = linearise_program(program, x, values)
    trace = closed_form_trace(program, x, values, transposes)
    return y, Jacobian(lambda v: vector_jacobian_product(program, transposes, v), broadcasts=x.dim() == 2, trace=trace)


def linearise_program(program: Program, x: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, list[StepTranspose]]:
    """Return g(x) and the transposed derivative of every step, as one graph, differentiable in x and the tensors."""
    transposes: list[StepTranspose] = []

    def linearise_step(i: int, step: Step, inputs: list[Tensor], own: list[Tensor]) -> Tensor:
        y = apply_step(step, inputs, own)
        transposes.append(_step_transpose(step, inputs, y, own))
        return y

    return interpret(program, x, values, linearise_step), transposes


def vector_jacobian_product(program: Program, transposes: Sequence[StepTranspose], v: Tensor) -> Tensor:
    """Compute J' v by reverse accumulation through the steps."""
    gradients = {len(transposes): v}  # of the result with this number
    for n in range(len(transposes), 0, -1):
        for into, gradient in zip(program.inputs[n - 1], transposes[n - 1](gradients.pop(n)), strict=True):
            gradients[into] = gradients[into] + gradient if into in gradients else gradient
    return gradients[0]


def _step_transpose(step: Step, inputs: list[Tensor], y: Tensor, own: list[Tensor]) -> StepTranspose:
    """Return the transposed derivative of y = step(inputs), as a function of v."""
    x = inputs[0]
    if step.kind == "join":
        (a, b), channels, dim = own[0].unbind(), x.shape[1], 1 if x.dim() > 2 else -1
        return lambda v: _weigh_parts(a, b, *torch.split(v, [channels, v.shape[dim] - channels], dim))
    if step.kind == "shift":
        return lambda v: [v]
    if step.kind == "descent":
        forward = Step("linear" if step.geometry is None else "conv", 1, step.geometry)
        return lambda v: [-apply_step(forward, [v.to(own[0].dtype)], own)]
    if step.kind in LAYERS:
        size = x.shape[2:] if step.geometry is not None and max(step.geometry.stride) > 1 else ()
        return lambda v: [apply_transpose(step, v, own[0], size)]
    d = activation_slope(step, x, y, own)
    return lambda v: [v * d]


def _weigh_parts(a: Tensor, b: Tensor, of_input: Tensor, of_f: Tensor) -> list[Tensor]:
    return [a * of_input, b * of_f]


def activation_slope(step: Step, x: Tensor, y: Tensor, own: Sequence[Tensor]) -> Tensor:
    """Compute dy/dx of an activation y = step(x), differentiable in x."""
    record = step.activation
    if record is None or record.slope is None:
        raise ValueError(f"the slope of {step.kind} has no closed form.")
    return record.slope(x, y, *step.settings, *own)


def _channels_last_weights(tensors: list[Tensor], x: Tensor) -> list[Tensor]:
    """Return the weights in channels-last layout, on a CPU for images without a graph: a series takes half the time."""
    if x.device.type != "cpu" or x.dim() != 4 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return tensors
    return [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors]
