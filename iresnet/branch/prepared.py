"""g prepared for evaluation in one precision: its tensors, and an implementation of every linear step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .derivative import activation_slope
from .program import Program, Step, StepFunction, interpret, run_program, run_step


@dataclass
class PreparedBranch:
    """A program with its tensors in one dtype; `functions`, if given, implement its linear steps."""

    program: Program
    values: Sequence[Tensor]
    functions: Sequence[StepFunction] = ()

    @property
    def dtype(self) -> torch.dtype:
        return self.values[0].dtype

    def __call__(self, x: Tensor) -> Tensor:
        """g(x)."""
        return run_program(self.program, x, self.values, self.functions)

    def value_and_slopes(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return g(x) and the slopes of its activations, in order."""
        slopes = list[Tensor]()

        def function(i: int, step: Step, inputs: list[Tensor], own: list[Tensor]) -> Tensor:
            y = run_step(self.functions, i, step, inputs, own)
            if step.activation is not None:
                slopes.append(activation_slope(step, inputs[0], y, own))
            return y

        return interpret(self.program, x, self.values, function), slopes

    def jvp(self, v: Tensor, slopes: list[Tensor]) -> Tensor:
        """Compute J v from the slopes at x."""
        remaining = iter(slopes)

        def function(i: int, step: Step, inputs: list[Tensor], own: list[Tensor]) -> Tensor:
            if step.activation is not None:
                return inputs[0] * next(remaining)
            if step.kind == "shift":
                return inputs[0]
            return run_step(self.functions, i, _without_bias(step), inputs, own[:1])

        return interpret(self.program, v, self.values, function)


def _without_bias(step: Step) -> Step:
    return Step(step.kind, 1, step.geometry) if step.tensors == 2 else step


def to_channels_last(x: Tensor) -> Tensor:
    """Return images in channels-last layout, which is faster in half precision and for matrix products."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.contiguous()
