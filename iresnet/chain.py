"""Compositions of transforms: F = F_T o ... o F_1, with ln det added up, inverted from the last to the first.

To write a composition other than `Chain`, derive from `Composition` and implement `members`, `parts` and `stretch`;
also `steps`, if something happens between the members.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import cast, overload

import torch
from torch import Tensor, nn

from . import inverse
from .batch import Shape
from .fixed_point import ChainSolution, Solver
from .fused import read_run, run_forward_and_logdet, suits
from .logdet import Estimator
from .outermost import outermost_call
from .spelling import at_least
from .transform import (
    ISOMETRY,
    Step,
    Stretch,
    Transform,
    check_context,
    check_transform,
    context_for,
    run_forward,
    stretch_of,
)


class Composition(Transform):
    """Base class of transforms that apply others in order. `steps` defines the order; all else is implemented here."""

    @property
    @abstractmethod
    def members(self) -> nn.ModuleList:
        """The composed transforms, in order."""

    def steps(self) -> list[Step]:
        """List the members in order, and the operations between them."""
        # Not list(self): torch.export of torch 2.7 cannot trace it.
        return list(cast("list[Step]", self.members))

    def run_forward(self, x: Tensor, act: Callable[[Transform, Tensor], Tensor]) -> Tensor:
        """Take x through all steps; `act` applies one member to a tensor."""
        return run_forward(self.steps(), x, act)

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Transform]:
        return iter(cast("list[Transform]", self.members))

    def __getitem__(self, index: int) -> Transform:
        return cast(Transform, self.members[index])

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        check_context(self, context)
        return self.run_forward(x, lambda t, y: t(y, context_for(t, context)))

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

        def act(t: Transform, y: Tensor) -> Tensor:
            nonlocal total
            y, logdet = t.forward_and_logdet(y, context_for(t, context), estimator=estimator, generator=generator)
            total = total + logdet
            return y

        return self.run_forward(x, act), total

    def inverse(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Tensor:
        return inverse.invert(self, z, context, tolerance=tolerance, solver=solver, by_parts=True)

    def reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.run_forward(x.double(), lambda t, y: t.reference(y, context_for(t, context)))

    def solve(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> ChainSolution:
        """Invert and report block bounds, code residual and composed bound; no gradient.

        If a sample overflows in one of the transforms, which can happen only without a proof, its x is NaN; the
        remaining transforms solve for 0 in its place.
        """
        return inverse.solve(self, z, context, tolerance=tolerance, solver=solver, by_parts=True)


class Chain(Composition):
    """Applies transforms one after another: F = F_T o ... o F_1, log-determinants added.

    >>> from iresnet import ActNorm, Chain
    >>> len(Chain(ActNorm(2), ActNorm(2)))
    2
    """

    def __init__(self, *transforms: Transform) -> None:
        super().__init__()
        for t in transforms:
            check_transform(t, "every argument of Chain")
        self.transforms = nn.ModuleList(transforms)

    @property
    def members(self) -> nn.ModuleList:
        return self.transforms

    @overload
    def __getitem__(self, index: int) -> Transform: ...

    @overload
    def __getitem__(self, index: slice) -> Chain: ...

    def __getitem__(self, index: int | slice) -> Transform:
        """Return one of the transforms, or for a slice the chain of these, which shares their weights."""
        if not isinstance(index, slice):
            return super().__getitem__(index)
        part = Chain(*cast("list[Transform]", self.transforms[index]))
        part.training = self.training
        return part

    def forward_and_logdet(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        estimator: Estimator | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return z and ln det; runs of ActNorms and residual blocks on vectors are one function each (`fused`)."""
        if context is not None or not suits(x, estimator) or not self._may_fuse():
            return super().forward_and_logdet(x, context, estimator=estimator, generator=generator)
        total = torch.zeros(len(x), dtype=x.dtype, device=x.device)
        rest = list(cast("list[Transform]", self.transforms))
        with outermost_call(self, x):
            while rest:
                parts = read_run(rest, x, estimator)
                found = run_forward_and_logdet(parts, x, estimator, generator) if parts else None
                run, rest = rest[: len(parts) or 1], rest[len(parts) or 1 :]
                if found is not None:
                    x, total = found[0], total + found[1]
                    continue
                for t in run:
                    x, logdet = t.forward_and_logdet(x, estimator=estimator, generator=generator)
                    total = total + logdet
        return x, total

    def _may_fuse(self) -> bool:
        """Whether all parts are in the mode of the chain, training or eval, and none awaits its first batch."""
        parts = cast("list[Transform]", self.transforms)
        return all(t.training == self.training and not getattr(t, "awaits_data", False) for t in parts)

    def trajectory(self, x: Tensor, steps: int = 8, context: Tensor | None = None) -> list[Tensor]:
        """Return the states x + tau g(x), tau in (0, 1], of every block in turn (Sec. 4.2), the input first.

        Every residual block gives `steps` states, each a bijective image of the input; any other transform gives one.
        The shape of the states changes where a transform changes it.
        """
        at_least(1, steps=steps)
        check_context(self, context)
        states = [x]
        with outermost_call(self, x):
            for t in self:
                trajectory, own_context = getattr(t, "trajectory", None), context_for(t, context)
                if trajectory is None:
                    states.append(t(states[-1], own_context))
                else:
                    states.extend(trajectory(states[-1], steps=steps, context=own_context)[1:])
        return states

    def parts(self, input_shape: Shape | None = None) -> list[tuple[str, Transform, Shape | None]]:
        listed: list[tuple[str, Transform, Shape | None]] = []
        for position, t in enumerate(cast("list[Transform]", self.transforms)):  # see steps
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
