"""Multiscale: stages that hand half of their channels to the code and the rest on (App. C.3 of the paper).

z = (half of F_1(x), half of F_2(rest), ..., F_S(rest)),     ln det = the sum over the stages

Its code is one row of numbers. Between the stages the state is cut in two, of which the second half goes on (`Halves`),
and in the end all that was laid aside becomes that row (`Row`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from .chain import Composition
from .transform import Move, Shape, Step, Stretch, Transform, check_batch, stretch_of


class Halves(Move):
    """Half of the channels are laid aside, the rest goes on."""

    aside = 1

    def forward(self, stack: list[Tensor]) -> None:
        """x -> its first half, its second half on top."""
        stack.extend(stack.pop().chunk(2, dim=1))

    def inverse(self, stack: list[Tensor]) -> None:
        """The two on top side by side again."""
        second, first = stack.pop(), stack.pop()
        stack.append(torch.cat([first, second], dim=1))


@dataclass(frozen=True)
class Row(Move):
    """All that was laid aside in this Multiscale, and what its last stage returns, as one row."""

    whole: Multiscale

    @property
    def aside(self) -> int:
        return 1 - len(self.whole)

    def forward(self, stack: list[Tensor]) -> None:
        """One tensor a scale -> the code."""
        first = len(stack) - len(self.whole)
        stack[first:] = [self.whole.flatten(stack[first:])]

    def inverse(self, stack: list[Tensor]) -> None:
        """The code -> one tensor a scale, that of the last on top."""
        stack.extend(self.whole.unflatten(stack.pop()))


class Multiscale(Composition):
    """Stages applied in turn; after each but the last, half of the channels go straight to the code (App. C.3).

    The code is one flat tensor (batch, D): the first half of the channels after stage one, the first half after stage
    two, and so on, then all that the last stage makes. `unflatten` takes it apart into one tensor per scale and
    `flatten` puts it together. `stage_shapes` and `code_shapes` hold what enters each stage and what it leaves in the
    code, without the batch.

    >>> from iresnet import Squeeze
    >>> model = Multiscale([Squeeze(), Squeeze()], input_shape=(3, 8, 8))
    >>> [tuple(part.shape) for part in model.unflatten(model(torch.zeros(5, 3, 8, 8)))]
    [(5, 6, 4, 4), (5, 24, 2, 2)]
    """

    member = "stage"

    def __init__(self, stages: Sequence[Transform], input_shape: Shape) -> None:
        super().__init__()
        if not stages:
            raise ValueError("Multiscale takes at least one stage; got none. Give a list of Transforms, one per scale.")
        for stage in stages:
            if not isinstance(stage, Transform):
                raise ValueError(
                    f"The stages of Multiscale must be Transforms; got {type(stage).__name__}. "
                    "Wrap several blocks as Chain(...), a network g as ResidualBlock(g)."
                )
        self.stages = nn.ModuleList(stages)
        self.input_shape: Shape = tuple(input_shape)
        self.stage_shapes, self.code_shapes = self._plan()

    @property
    def members(self) -> nn.ModuleList:
        return self.stages

    def steps(self) -> list[Step]:
        first, *others = cast("list[Transform]", self.stages)  # as in Composition.steps
        return [first, *(step for stage in others for step in (Halves(), stage)), Row(self)]

    def through(self, x: Tensor, step: Callable[[Transform, Tensor], Tensor]) -> Tensor:
        check_batch(x, shape=self.input_shape)
        return super().through(x, step)

    def parts(self, input_shape: Shape | None = None) -> list[tuple[str, Transform, Shape | None]]:
        stages = cast("list[Transform]", self.stages)  # as in Composition.steps
        return [(str(k), stage, shape) for k, (stage, shape) in enumerate(zip(stages, self.stage_shapes, strict=True))]

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        """Every stage is followed by the identity on one half and the remaining stages on the other."""
        if input_shape is not None:
            self.output_shape(input_shape)
        *earlier, total = [stretch_of(stage, shape) for stage, shape in zip(self, self.stage_shapes, strict=True)]
        for own in reversed(earlier):
            rest = Stretch(max(1.0, total.forward), max(1.0, total.inverse), total.logdet, total.proven)
            total = own.then(rest)
        return total

    def output_shape(self, input_shape: Shape) -> Shape:
        if tuple(input_shape) != self.input_shape:
            raise ValueError(
                f"This Multiscale takes inputs of shape {self.input_shape}; got {tuple(input_shape)}. "
                "Build another one with that input_shape."
            )
        return (sum(math.prod(shape) for shape in self.code_shapes),)

    def unflatten(self, z: Tensor) -> list[Tensor]:
        """The code taken apart: one tensor (batch, channels, ...) per scale, the finest first."""
        check_batch(z, "z", self.output_shape(self.input_shape))
        pieces = torch.split(z, [math.prod(shape) for shape in self.code_shapes], dim=1)
        return [piece.reshape(-1, *shape) for piece, shape in zip(pieces, self.code_shapes, strict=True)]

    def flatten(self, parts: Sequence[Tensor]) -> Tensor:
        """The flat code (batch, D) of one tensor per scale: the inverse of `unflatten`."""
        got = [tuple(part.shape[1:]) for part in parts]
        if got != list(self.code_shapes):
            raise ValueError(
                f"parts must have the shapes (batch, ...) of {list(self.code_shapes)}; got {got}. "
                "Pass one tensor per scale, in the order that unflatten gives."
            )
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    def _plan(self) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
        shape, stage_shapes, code_shapes = self.input_shape, [], []
        for k, stage in enumerate(self):
            stage_shapes.append(shape)
            shape = stage.output_shape(shape)
            if k < len(self) - 1:
                if shape[0] % 2:
                    raise ValueError(
                        "Every stage but the last must end with an even number of channels, to be split in half; "
                        f"stage {k} of {len(self)} ends with shape {shape}. Put a Squeeze into it."
                    )
                shape = (shape[0] // 2, *shape[1:])
            code_shapes.append(shape)
        return tuple(stage_shapes), tuple(code_shapes)
