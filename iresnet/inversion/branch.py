"""A branch g in the precisions of a solve, and its Jacobian from the slopes of its activations.

exact       float64: what is inverted, and what proves the inverse
single      float32, between the two, where the working precision is half
working     where most evaluations are made
products    the same weights, every convolution a matrix product: what a proof can count on (`rounding`)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from ..lipschitz import Bound, program
from ..lipschitz.program import Program, Step
from ..lipschitz.rounding import errors
from ..residual import ResidualBlock
from ..transform import Shape
from .arithmetic import Arithmetic
from .convolution import (
    CONVOLUTIONS,
    Convolution,
    arranged,
    can_split,
    fastest,
    gathered,
    is_simple,
    native,
    parted,
    split,
)
from .reading import acts, advance, read, tensors
from .rounding import ProductRounding, rounding


@dataclass
class Form:
    """g in one precision: its tensors, and a way to compute each step; without ways, the library's own."""

    program: Program
    values: list[Tensor]
    ways: list[Convolution] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        return self.values[0].dtype

    def steps(self) -> Iterator[tuple[Step, Convolution, list[Tensor]]]:
        """Every step with its way and its tensors."""
        first = 0
        for i, step in enumerate(self.program):
            yield step, self.ways[i] if self.ways else native, self.values[first : first + step.tensors]
            first += step.tensors

    def __call__(self, x: Tensor) -> Tensor:
        """g(x)."""
        kept = list[Tensor]()
        for step, way, values in self.steps():
            x = advance(step, way, x, values, kept)
        return x

    def traced(self, x: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, list[Tensor]]:
        """g(x) and the slopes of its activations, in order, in `dtype`."""
        slopes, kept = [], list[Tensor]()
        for step, way, values in self.steps():
            y = advance(step, way, x, values, kept)
            if acts(step):
                slopes.append(slope(step, x, y, values, dtype or x.dtype))
            x = y
        return x, slopes

    def tangent(self, v: Tensor, slopes: list[Tensor]) -> Tensor:
        """J v."""
        slope_of, kept = iter(slopes), list[Tensor]()
        for step, way, values in self.steps():
            v = v * next(slope_of) if acts(step) else advance(_linear(step), way, v, values[:1], kept)
        return v


@dataclass
class Branch:
    """g of one block in every precision. `rounding` is None where a product with J proves nothing."""

    exact: Form
    working: Form
    products: Form
    single: Form | None = None
    rounding: ProductRounding | None = None

    @property
    def program(self) -> Program:
        return self.exact.program

    @property
    def dtype(self) -> torch.dtype:
        return self.working.dtype


def slope(step: Step, x: Tensor, y: Tensor, values: list[Tensor], dtype: torch.dtype) -> Tensor:
    """d y / d x of an activation y = step(x), rounded to `dtype` no more than `rounding.SLOPE` times."""
    if step.kind == "elu" and step.constant == 1 and y.dtype != dtype:
        return y.to(dtype).clamp_(max=0).add_(1)  # in the smaller precision, without a copy in the larger
    return program.slope(step, x, y, values).to(dtype)


def _linear(step: Step) -> Step:
    return Step(step.kind, 1, step.geometry, step.constant)


def laid_out(x: Tensor) -> Tensor:
    """Images with their channels last, which half precision and matrix products want."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.contiguous()


# --------------------------------------------------------------------------------------------- making them


class Maker:
    """Makes the branches of a chain; remembers which way to convolve is the fastest for a shape and a precision."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self.arithmetic = arithmetic
        self.ways: dict[tuple[torch.dtype, Shape, Shape], Convolution] = {}

    def branch(self, block: ResidualBlock, x: Tensor, bound: Bound) -> Branch:
        """The branch of this block for inputs like x."""
        steps = read(block.g)
        assert steps is not None
        values = [t.detach() for t in tensors(block.g)]
        dtype = self.arithmetic.dtype
        working = Form(steps, [laid_out(t.to(dtype)) for t in values])
        ways: list[Convolution] = [gathered if is_simple(step) else native for step in steps]
        products = Form(steps, self._arranged(Form(steps, working.values), ways), ways)
        exact = self._form(steps, values, x)
        single = None if dtype == torch.float32 else self._single(steps, [t.float() for t in values], x.float())
        return Branch(exact, working, products, single, self._rounding(block, exact, products, x, bound))

    def _single(self, steps: Program, values: list[Tensor], x: Tensor) -> Form:
        """g in float32, as it is asked for."""
        if self.arithmetic.single == "float32":
            return self._form(steps, values, x)
        ways: list[Convolution] = [split if can_split(step) else native for step in steps]
        prepared = list[Tensor]()
        for way, (_, _, own) in zip(ways, Form(steps, values).steps(), strict=True):
            prepared += [laid_out(parted(own[0])), *own[1:]] if way is split else own
        return Form(steps, prepared, ways)

    def _form(self, steps: Program, values: list[Tensor], x: Tensor) -> Form:
        """The form of these tensors with the ways that are asked for."""
        plain = Form(steps, values)
        if self.arithmetic.exact == "native":
            return plain
        ways, kept = list[Convolution](), list[Tensor]()
        for step, _, own in plain.steps():
            ways.append(self._way(step, x, own))
            x = advance(step, native, x, own, kept)
        return Form(steps, self._arranged(plain, ways), ways)

    def _arranged(self, form: Form, ways: list[Convolution]) -> list[Tensor]:
        own = [values for _, _, values in form.steps()]
        return list(
            chain.from_iterable(
                values if way is native else [arranged(values[0]), *values[1:]]
                for values, way in zip(own, ways, strict=True)
            )
        )

    def _way(self, step: Step, x: Tensor, values: list[Tensor]) -> Convolution:
        if not is_simple(step):
            return native
        if self.arithmetic.exact != "auto":
            return CONVOLUTIONS[self.arithmetic.exact]
        key = (x.dtype, tuple(x.shape), tuple(values[0].shape))
        if key not in self.ways:
            self.ways[key] = fastest(step, laid_out(x), [arranged(values[0]), *values[1:]])
        return self.ways[key]

    def _rounding(
        self, block: ResidualBlock, exact: Form, products: Form, x: Tensor, bound: Bound
    ) -> ProductRounding | None:
        """None where no proof by products is wanted, or there is none: a convolution, tf32, layers that keep."""
        products_only = all(step.geometry is None or is_simple(step) for step in exact.program)
        wanted = self.arithmetic.proof == "product" and self.arithmetic.working != "tf32"
        if not wanted or len(bound.parts) != len(exact.program) or not products_only:
            return None
        states = errors(block.g, bound, tuple(x.shape[1:]))
        return rounding(exact.program, exact.values, products.values, [p.bound for p in bound.parts], x, states)
