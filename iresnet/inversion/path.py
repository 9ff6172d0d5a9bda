"""A transform as a path: its residual blocks and closed forms in order, and what a Multiscale does between them.

The state on a path is a stack of tensors, and a block or a closed form acts on the top one. Between the stages of a
`Multiscale` the state is cut in two, of which the second half goes on (`Halves`), and in the end all that lies on the
stack becomes one row (`Row`). Both only move numbers about: they have no error and stretch nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ..elementary import ActNorm, InjectivePad, Squeeze
from ..mixing import InvertibleConv1x1, PrincipalAxes
from ..multiscale import Flatten, Multiscale
from ..preprocess import Logit, Standardise
from ..residual import ResidualBlock
from ..transform import Chain, Transform
from ..trust import doubt
from .branch import laid_out
from .reading import read, unknown

#: Transforms whose inverse is a formula.
CLOSED = (ActNorm, Flatten, InjectivePad, InvertibleConv1x1, PrincipalAxes, Squeeze, Standardise, Logit)


class Halves:
    """Half of the channels are laid aside, the rest goes on."""

    def forward(self, stack: list[Tensor]) -> None:
        """x -> its first half, its second half on top."""
        stack.extend(laid_out(half) for half in stack.pop().chunk(2, dim=1))

    def inverse(self, stack: list[Tensor]) -> None:
        """The two on top side by side again."""
        second, first = stack.pop(), stack.pop()
        stack.append(laid_out(torch.cat([first, second], dim=1)))


@dataclass(frozen=True)
class Row:
    """All that was laid aside in this Multiscale, and what its last stage returns, as one row."""

    whole: Multiscale

    def forward(self, stack: list[Tensor]) -> None:
        """One tensor a scale -> the code."""
        first = len(stack) - len(self.whole)
        stack[first:] = [self.whole.flatten(stack[first:])]

    def inverse(self, stack: list[Tensor]) -> None:
        """The code -> one tensor a scale, that of the last on top."""
        stack.extend(laid_out(part) for part in self.whole.unflatten(stack.pop()))


Step: TypeAlias = Transform | Halves | Row


def path(transform: Transform) -> Iterator[Step]:
    """The steps of chains and Multiscales, however they are nested, from data to code."""
    if type(transform) is Chain:
        for t in transform:
            yield from path(t)
    elif type(transform) is Multiscale:
        for k, stage in enumerate(transform):
            if k:
                yield Halves()
            yield from path(stage)
        yield Row(transform)
    else:
        yield transform


def carried(steps: Sequence[float | Halves | Row]) -> list[float]:
    """What an error behind each step becomes in x at most, for the Lip(F^-1) of each, from data to code.

    The product of those before it; at a `Row` the largest that any of its pieces has.
    """
    factor, aside, found = 1.0, list[float](), list[float]()
    for step in steps:
        if isinstance(step, Halves):
            aside.append(factor)
        elif isinstance(step, Row):
            factor = max([factor, *(aside.pop() for _ in range(len(step.whole) - 1))])
        else:
            found.append(factor)
            factor *= step
    return found


def refusal(transform: Transform) -> str:
    """Why this transform takes the ordinary way, or nothing."""
    for t in transform.modules():
        if isinstance(t, Transform) and (reason := doubt(t)):
            return f"not accelerated: {reason}"
    for position, t in enumerate(t for t in path(transform) if isinstance(t, Transform)):
        where = f"not accelerated: transform {position}, {type(t).__name__},"
        if type(t) in CLOSED:
            continue
        if type(t) is not ResidualBlock:
            return f"{where} is neither a residual block nor a closed form that is known here."
        steps = read(t.g)
        if steps is None:
            return f"{where} has a g that cannot be read as linear layers, convolutions and activations in a row."
        if unknown(steps):
            return f"{where} has an activation without a slope, {unknown(steps)}."
    return ""
