"""A branch g in the precisions that a mixed-precision solve needs.

exact       float64: the function that is inverted and that proves the inverse
single      float32: between the two, if the working precision is half precision
working     the precision of most evaluations
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import Shape
from ..branch import PreparedBranch, Program, Step, StepFunction, to_channels_last, try_parse
from ..branch.convolution import CONVOLUTIONS, fastest_convolution, is_simple, native, pack_weight, pack_weights
from ..branch.program import apply_step, interpret
from ..residual import ResidualBlock
from .arithmetic import Arithmetic


@dataclass
class MixedPrecisionBranch:
    """The branch g of one block in every precision; `single` is None if the working precision is float32."""

    exact: PreparedBranch
    working: PreparedBranch
    single: PreparedBranch | None = None

    @property
    def program(self) -> Program:
        return self.exact.program

    @property
    def dtype(self) -> torch.dtype:
        return self.working.dtype


class BranchBuilder:
    """Builds the branches of a chain; remembers the fastest convolution method for each shape and precision."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self.arithmetic = arithmetic
        self.functions: dict[tuple[torch.dtype, Shape, Shape], StepFunction] = {}

    def branch(self, block: ResidualBlock, x: Tensor) -> MixedPrecisionBranch:
        """Build the branch of this block for inputs like x."""
        parsed = try_parse(block.g)
        assert parsed is not None
        program, values = parsed.program, [t.detach() for t in parsed.tensors(dtype=torch.float64)]
        dtype = self.arithmetic.dtype
        working = PreparedBranch(program, [to_channels_last(t.to(dtype)) for t in values])
        exact = self._prepared_branch(program, values, x)
        single = (
            None if dtype == torch.float32 else self._prepared_branch(program, [t.float() for t in values], x.float())
        )
        return MixedPrecisionBranch(exact, working, single)

    def _prepared_branch(self, program: Program, values: list[Tensor], x: Tensor) -> PreparedBranch:
        """Build g with these tensors, each step computed by the method that `Arithmetic.exact` selects."""
        if self.arithmetic.exact == "native":
            return PreparedBranch(program, values)
        functions = list[StepFunction]()

        def select(i: int, step: Step, inputs: list[Tensor], own: list[Tensor]) -> Tensor:
            functions.append(self._function_for(step, inputs[0], own))
            return apply_step(step, inputs, own)

        interpret(program, x, values, select)
        return PreparedBranch(program, pack_weights(program, values, functions), functions)

    def _function_for(self, step: Step, x: Tensor, values: list[Tensor]) -> StepFunction:
        if not is_simple(step):
            return native
        if self.arithmetic.exact != "auto":
            return CONVOLUTIONS[self.arithmetic.exact]
        key = (x.dtype, tuple(x.shape), tuple(values[0].shape))
        if key not in self.functions:
            self.functions[key] = fastest_convolution(step, to_channels_last(x), [pack_weight(values[0]), *values[1:]])
        return self.functions[key]
