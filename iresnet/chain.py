"""Transforms made of others: F = F_T o ... o F_1, log-determinants added, inverted from the last to the first.

How to write another one than `Chain`: derive from `Composition` and implement `members`, `parts`, `stretch` and, where
something happens between them, `steps`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from . import inverse
from .fixed_point import Solver
from .logdet import Estimator
from .transform import (
    ISOMETRY,
    ChainSolution,
    Shape,
    Step,
    Stretch,
    Transform,
    check_context,
    given_to,
    stretch_of,
    through,
)


class Composition(Transform):
    """Transforms that follow each other. `steps` says how; everything else is written here, once."""

    @property
    @abstractmethod
    def members(self) -> nn.ModuleList:
        """The transforms, in order."""

    def steps(self) -> list[Step]:
        """The members in order, and what happens between them."""
        # Not `in self`, which torch.export of torch 2.7 cannot follow.
        return list(cast("list[Step]", self.members))

    def through(self, x: Tensor, step: Callable[[Transform, Tensor], Tensor]) -> Tensor:
        """The code of x, where `step` takes a tensor through one of them."""
        return through(self.steps(), x, step)

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Transform]:
        return iter(cast("list[Transform]", self.members))

    def __getitem__(self, index: int) -> Transform:
        return cast(Transform, self.members[index])

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        check_context(self, context)
        return self.through(x, lambda t, y: t(y, given_to(t, context)))

    def forward_and_logdet(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        estimator: Estimator | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        check_context(self, context)
        total = torch.zeros(len(x), dtype=x.dtype, device=x.device)

        def step(t: Transform, y: Tensor) -> Tensor:
            nonlocal total
            y, logdet = t.forward_and_logdet(y, given_to(t, context), estimator=estimator, generator=generator)
            total = total + logdet
            return y

        return self.through(x, step), total

    def inverse(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Tensor:
        return inverse.invert(self, z, context, tolerance=tolerance, solver=solver, own=True)

    def reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.through(x.double(), lambda t, y: t.reference(y, given_to(t, context)))

    def solve(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> ChainSolution:
        """The inverse with a report (no gradient): block bounds, code residual and composed bound.

        A sample that leaves all numbers in one of the transforms, which only one without a proof can let happen, is NaN
        in the end; the transforms before it solve 0 in its place.
        """
        return inverse.solve(self, z, context, tolerance=tolerance, solver=solver, own=True)


class Chain(Composition):
    """Transforms applied one after another: F = F_T o ... o F_1, log-determinants added.

    >>> from iresnet import ActNorm, Chain
    >>> len(Chain(ActNorm(2), ActNorm(2)))
    2
    """

    def __init__(self, *transforms: Transform) -> None:
        super().__init__()
        for t in transforms:
            if not isinstance(t, Transform):
                raise ValueError(
                    f"Chain takes Transforms; got {type(t).__name__}. Wrap a network g as ResidualBlock(g)."
                )
        self.transforms = nn.ModuleList(transforms)

    @property
    def members(self) -> nn.ModuleList:
        return self.transforms

    def trajectory(self, x: Tensor, steps: int = 8, context: Tensor | None = None) -> list[Tensor]:
        """The states x + tau g(x), tau in (0, 1], of every block in turn (Sec. 4.2), the input first.

        Every residual block gives `steps` states, each itself a bijective image of the input; another transform gives
        one. States may differ in shape where a transform changes it.
        """
        if steps < 1:
            raise ValueError(f"steps must be at least 1; got {steps}.")
        check_context(self, context)
        states = [x]
        for t in self:
            path, c = getattr(t, "trajectory", None), given_to(t, context)
            if path is None:
                states.append(t(states[-1], c))
            else:
                states.extend(path(states[-1], steps=steps, context=c)[1:])
        return states

    def parts(self, input_shape: Shape | None = None) -> list[tuple[str, Transform, Shape | None]]:
        listed: list[tuple[str, Transform, Shape | None]] = []
        for position, t in enumerate(cast("list[Transform]", self.transforms)):  # as in steps
            listed.append((str(position), t, input_shape))
            input_shape = None if input_shape is None else t.output_shape(input_shape)
        return listed

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        total = ISOMETRY
        for _, t, shape in self.parts(input_shape):
            total = total.then(stretch_of(t, shape))
        return total

    def output_shape(self, input_shape: Shape) -> Shape:
        for t in self:
            input_shape = t.output_shape(input_shape)
        return input_shape
