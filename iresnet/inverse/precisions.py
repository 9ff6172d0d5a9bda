"""A branch g in the precisions of a solve, and its Jacobian from the slopes of its activations.

exact       float64: what is inverted, and what proves the inverse
single      float32, between the two, where the working precision is half
working     where most evaluations are made
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..branch import PreparedBranch, Program, Step, StepFunction, to_channels_last, try_parse
from ..branch.convolution import CONVOLUTIONS, fastest_convolution, is_simple, native, pack_weight, pack_weights
from ..branch.program import apply_step, interpret
from ..residual import ResidualBlock
from ..transform import Shape
from .arithmetic import Arithmetic


@dataclass
class Branch:
    """g of one block in every precision; without `single`, where nothing lies between the others."""

    exact: PreparedBranch
    working: PreparedBranch
    single: PreparedBranch | None = None

    @property
    def program(self) -> Program:
        return self.exact.program

    @property
    def dtype(self) -> torch.dtype:
        return self.working.dtype


class Maker:
    """Makes the branches of a chain; remembers which way to convolve is the fastest for a shape and a precision."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self.arithmetic = arithmetic
        self.functions: dict[tuple[torch.dtype, Shape, Shape], StepFunction] = {}

    def branch(self, block: ResidualBlock, x: Tensor) -> Branch:
        """The branch of this block for inputs like x."""
        found = try_parse(block.g)
        assert found is not None
        program, values = found.program, [t.detach() for t in found.tensors(dtype=torch.float64)]
        dtype = self.arithmetic.dtype
        working = PreparedBranch(program, [to_channels_last(t.to(dtype)) for t in values])
        exact = self._form(program, values, x)
        single = None if dtype == torch.float32 else self._form(program, [t.float() for t in values], x.float())
        return Branch(exact, working, single)

    def _form(self, program: Program, values: list[Tensor], x: Tensor) -> PreparedBranch:
        """The form of these tensors with the ways that are asked for."""
        if self.arithmetic.exact == "native":
            return PreparedBranch(program, values)
        functions = list[StepFunction]()

        def function(i: int, step: Step, inputs: list[Tensor], own: list[Tensor]) -> Tensor:
            functions.append(self._way(step, inputs[0], own))
            return apply_step(step, inputs, own)

        interpret(program, x, values, function)
        return PreparedBranch(program, pack_weights(program, values, functions), functions)

    def _way(self, step: Step, x: Tensor, values: list[Tensor]) -> StepFunction:
        if not is_simple(step):
            return native
        if self.arithmetic.exact != "auto":
            return CONVOLUTIONS[self.arithmetic.exact]
        key = (x.dtype, tuple(x.shape), tuple(values[0].shape))
        if key not in self.functions:
            self.functions[key] = fastest_convolution(step, to_channels_last(x), [pack_weight(values[0]), *values[1:]])
        return self.functions[key]
