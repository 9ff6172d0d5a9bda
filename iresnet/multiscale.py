"""The multiscale architecture: half of the channels go to the code after each stage (App. C.3 of the paper).

z = (half of F_1(x), half of F_2(rest), ..., F_S(rest)),     ln det = the sum over the stages

The code is one flat vector. Between two stages the channels are split in half, and the second half goes on
(`SplitHalves`). At the end all parts of the code are joined (`JoinScales`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from .batch import Shape, check_batch
from .chain import Composition
from .transform import StackOperation, Step, Stretch, Transform, check_transform, stretch_of


class SplitHalves(StackOperation):
    """Set half of the channels aside for the code; the rest goes on."""

    pushed = 1

    def forward(self, stack: list[Tensor]) -> None:
        """Replace x by its first half and, on top, its second half."""
        stack.extend(stack.pop().chunk(2, dim=1))

    def inverse(self, stack: list[Tensor]) -> None:
        """Join the two tensors on top."""
        second, first = stack.pop(), stack.pop()
        stack.append(torch.cat([first, second], dim=1))


@dataclass(frozen=True)
class JoinScales(StackOperation):
    """Join what was set aside after each stage and the output of the last stage into the flat code."""

    multiscale: Multiscale

    @property
    def pushed(self) -> int:
        return 1 - len(self.multiscale)

    def forward(self, stack: list[Tensor]) -> None:
        """Replace the tensors of all scales by the code."""
        first = len(stack) - len(self.multiscale)
        stack[first:] = [self.multiscale.flatten(stack[first:])]

    def inverse(self, stack: list[Tensor]) -> None:
        """Replace the code by one tensor per scale, the last scale on top."""
        stack.extend(self.multiscale.unflatten(stack.pop()))


class Multiscale(Composition):
    """Applies stages in order; after each but the last, half of the channels go straight to the code (App. C.3).

    The code is one flat tensor (batch, D): the first half of the channels after stage one, the first half after stage
    two, and so on, then the whole output of the last stage. `unflatten` splits it into one tensor per scale and
    `flatten` joins them. `stage_shapes` and `code_shapes` are the shapes, without the batch, of the input of each stage
    and of its part of the code.

    >>> from iresnet import Squeeze
    >>> model = Multiscale([Squeeze(), Squeeze()], input_shape=(3, 8, 8))
    >>> [tuple(part.shape) for part in model.unflatten(model(torch.zeros(5, 3, 8, 8)))]
    [(5, 6, 4, 4), (5, 24, 2, 2)]
    """

    part_kind = "stage"

    def __init__(self, stages: Sequence[Transform], input_shape: Shape) -> None:
        super().__init__()
        if not stages:
            raise ValueError("stages must have at least one entry; got none. Give a list of Transforms, one per scale.")
        for stage in stages:
            check_transform(stage, "every stage")
        self.stages = nn.ModuleList(stages)
        self.input_shape: Shape = tuple(input_shape)
        self.stage_shapes, self.code_shapes = self._shapes()

    @property
    def members(self) -> nn.ModuleList:
        return self.stages

    def steps(self) -> list[Step]:
        first, *others = cast("list[Transform]", self.stages)  # see Composition.steps
        return [first, *(step for stage in others for step in (SplitHalves(), stage)), JoinScales(self)]

    def run_forward(self, x: Tensor, act: Callable[[Transform, Tensor], Tensor]) -> Tensor:
        check_batch(x, shape=self.input_shape)
        return super().run_forward(x, act)

    def parts(self, input_shape: Shape | None = None) -> list[tuple[str, Transform, Shape | None]]:
        stages = cast("list[Transform]", self.stages)  # see Composition.steps
        return [(str(k), stage, shape) for k, (stage, shape) in enumerate(zip(stages, self.stage_shapes, strict=True))]

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        """Bound each stage followed by the identity on one half and the remaining stages on the other."""
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
                f"input_shape must be {self.input_shape} for this Multiscale; got {tuple(input_shape)}. "
                "Build another one with that input_shape."
            )
        return (sum(math.prod(shape) for shape in self.code_shapes),)

    def data_shape(self, code_shape: Shape) -> Shape:
        return self.input_shape

    def unflatten(self, z: Tensor) -> list[Tensor]:
        """Split the code into one tensor (batch, channels, ...) per scale, the finest first."""
        check_batch(z, "z", self.output_shape(self.input_shape))
        pieces = torch.split(z, [math.prod(shape) for shape in self.code_shapes], dim=1)
        return [piece.reshape(-1, *shape) for piece, shape in zip(pieces, self.code_shapes, strict=True)]

    def flatten(self, parts: Sequence[Tensor]) -> Tensor:
        """Join one tensor per scale into the flat code (batch, D): the inverse of `unflatten`."""
        got = [tuple(part.shape[1:]) for part in parts]
        if got != list(self.code_shapes):
            raise ValueError(
                f"parts must have the shapes (batch, ...) of {list(self.code_shapes)}; got {got}. "
                "Pass one tensor per scale, in the order that unflatten gives."
            )
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    def _shapes(self) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
        """The input shapes of the stages and the shapes of their parts of the code."""
        shape, stage_shapes, code_shapes = self.input_shape, [], []
        for k, stage in enumerate(self):
            stage_shapes.append(shape)
            shape = stage.output_shape(shape)
            if k < len(self) - 1:
                if shape[0] % 2:
                    raise ValueError(
                        "every stage but the last must end with an even number of channels, to be split in half; "
                        f"stage {k} of {len(self)} ends with shape {shape}. Add a Squeeze to it."
                    )
                shape = (shape[0] // 2, *shape[1:])
            code_shapes.append(shape)
        return tuple(stage_shapes), tuple(code_shapes)
