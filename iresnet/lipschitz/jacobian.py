"""The Jacobian of g at x as a map v -> J' v: the only thing that series and solvers need of it.

A g that can be read (`program`) is multiplied out, J' = W_1' D_1 W_2' D_2 ...: one ordinary graph, which is faster to
differentiate than a vector-Jacobian product; layers that keep their input add what comes back along both ways. Any
other g goes through `torch.func.vjp`. Where tr J has a closed form (`trace`) it comes along.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ..logdet import Jacobian, Pull
from . import program
from .bound import Conditioned
from .program import Program
from .trace import closed_trace


def linearise(g: nn.Module, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Jacobian]:
    """g(x) and its Jacobian at x, differentiable in x and in the parameters where gradients are on."""
    stages = _stages(g, x)
    if stages is None:
        y, vjp = cast(Any, torch.func.vjp(lambda t: g(t) if context is None else g(t, context), x))
        return y, Jacobian(lambda v: cast(Tensor, vjp(v)[0]))
    whole: Program = ()
    tensors: list[Tensor] = []
    transposes: list[Pull] = []
    y = x
    for i, (stage, steps) in enumerate(stages):
        if i:
            y = cast(Conditioned, g).shifted(y, context)
        if y.dim() > 2:  # what the hooks of constrained layers do when they are called, which they are not here
            program.note_sizes(stage, tuple(y.shape[2:]))
        own = _laid_out(program.tensors(stage), y)
        y, more = program.linearise(steps, y, own)
        whole, tensors, transposes = whole + steps, tensors + own, transposes + more
    trace = closed_trace(whole, x, tensors, transposes)
    return y, Jacobian(lambda v: program.pull(transposes, v), broadcasts=x.dim() == 2, trace=trace)


def _stages(g: nn.Module, x: Tensor) -> list[tuple[nn.Module, Program]] | None:
    """The readable networks that g is made of: itself, or what stands before and after a context's shift."""
    found = []
    for stage in (g.first, g.rest) if type(g) is Conditioned else (g,):
        steps = program.read(stage, nested=True)
        if steps is None or not program.has_slopes(steps) or not program.takes(steps, x):
            return None
        found.append((stage, steps))
    return found


def _laid_out(tensors: list[Tensor], x: Tensor) -> list[Tensor]:
    """On a CPU, for images and without a graph: weights with their channels last, which products take on. That halves
    the time of a series."""
    if x.device.type != "cpu" or x.dim() != 4 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return tensors
    return [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors]
