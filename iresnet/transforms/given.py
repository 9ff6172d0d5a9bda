"""Conditional maps of whole rows: some columns are mapped, the others are their context.

z = F(t; c) for a row with the target columns t and the other columns c. As a density, Flow(Given(...), base) is
ln p(t | c) = ln p_base(z) + ln |det dz/dt|, so everything that takes rows works on a conditional density.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..batch import Shape, as_plain, check_batch
from ..fixed_point import ChainSolution, Solution, Solver
from ..logdet import Estimator
from ..transform import UNKNOWN, Stretch, Transform, stretch_of, why_unproven
from .preprocess import Standardise


class Given(Transform):
    """Maps the columns `targets` of a row by a transform whose context are the other columns, standardised by `scale`.

    `categories` has one number per given column: n for one that holds categories 0 .. n - 1, of which each becomes an
    indicator, 0 or 1, behind the numbers in the context; 0 for a column of numbers. The default: all are numbers.
    An inverse needs these columns as its context, and returns whole rows. Its bounds hold for every context, as a map
    of the targets.

    >>> from iresnet import ResidualBlock, contractive_mlp
    >>> given = Given(ResidualBlock(contractive_mlp(1, context=2)), Standardise([0.0, 0.0], [1.0, 1.0]), targets=[2])
    >>> given(torch.zeros(5, 3)).shape, given.inverse(torch.zeros(5, 1), torch.zeros(5, 2)).shape
    (torch.Size([5, 1]), torch.Size([5, 3]))
    """

    def __init__(
        self, transform: Transform, scale: Standardise, targets: Sequence[int], categories: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.categories = tuple(categories) or (0,) * len(scale.mean)
        if len(self.categories) != len(scale.mean) or min(self.categories) < 0:
            raise ValueError(
                f"categories must have a count for each of the {len(scale.mean)} given columns; got {list(categories)}."
            )
        self.transform, self.scale, self.targets = transform, scale, tuple(targets)
        self.columns = len(scale.mean) + len(self.targets)
        if len(set(self.targets)) != len(self.targets) or not set(self.targets) < set(range(self.columns)):
            raise ValueError(
                f"targets must be different columns of 0 .. {self.columns - 1}, and not all; got {list(self.targets)}."
            )
        if not transform.takes_context:
            raise ValueError(
                f"the transform must take a context; got a {type(transform).__name__} without. Build it from "
                "conditional parts, such as contractive_mlp(1, context=2)."
            )

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        z: Tensor = self.transform(*self._split(x, context))
        return z

    def forward_and_logdet(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        estimator: Estimator | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self.transform.forward_and_logdet(*self._split(x, context), estimator=estimator, generator=generator)

    def inverse(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Tensor:
        c = self._checked_context(context)
        return self._join(self.transform.inverse(z, self.encode(c), tolerance=tolerance, solver=solver), c)

    def solve(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Solution | ChainSolution:
        c = self._checked_context(context)
        solution = self.transform.solve(z, self.encode(c), tolerance=tolerance, solver=solver)
        reason = why_unproven(self) or solution.reason
        return replace(solution, x=self._join(solution.x, c), proven=solution.proven and not reason, reason=reason)

    def reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.transform.reference(*self._split(x.double(), context))

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        return UNKNOWN if self.why_unknown() else stretch_of(self.transform, (len(self.targets),))

    def why_unknown(self) -> str:
        """Return why the context is unknown: that of the transform are the given columns as `scale` maps them."""
        return why_unproven(self.scale)

    def output_shape(self, input_shape: Shape) -> Shape:
        return self.transform.output_shape((len(self.targets),))

    def data_shape(self, code_shape: Shape) -> Shape:
        return (self.columns,)

    def parts(self, input_shape: Shape | None = None) -> list[tuple[str, Transform, Shape | None]]:
        return [("transform", self.transform, (len(self.targets),))]

    @property
    def others(self) -> tuple[int, ...]:
        """The columns that are given."""
        return tuple(i for i in range(self.columns) if i not in self.targets)

    def encode(self, c: Tensor) -> Tensor:
        """Return given columns as a context: numbers standardised, categories as indicators."""
        scaled: Tensor = self.scale(c)
        if not any(self.categories):
            return scaled
        numbers = [i for i, n in enumerate(self.categories) if not n]
        indicators = [c[:, i, None] == torch.arange(n, device=c.device) for i, n in enumerate(self.categories) if n]
        return torch.cat([scaled[:, numbers], *(found.to(scaled.dtype) for found in indicators)], dim=1)

    def spread(self, values: Tensor) -> Tensor:
        """Return one number per column of a row: these for the targets, 0 for the others."""
        whole = values.new_zeros(self.columns)
        whole[list(self.targets)] = values
        return whole

    def _split(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the targets of rows and their context."""
        if context is not None:
            raise ValueError("the context is part of the rows; leave it out. An inverse needs it.")
        check_batch(x, "x", (self.columns,))
        return x[:, list(self.targets)], self.encode(x[:, list(self.others)])

    def _join(self, t: Tensor, c: Tensor) -> Tensor:
        order = torch.tensor((*self.targets, *self.others), device=t.device).argsort()
        return torch.cat([t, c.to(t.dtype)], dim=1)[:, order]

    def _checked_context(self, context: Tensor | None) -> Tensor:
        if context is None:
            raise ValueError(
                f"the inverse of a conditional density needs the {len(self.others)} given columns of every row. Pass "
                "them as context; in Python, ConditionalFlowDensity.from_run opens a run folder."
            )
        check_batch(context, "context", (len(self.others),))
        return as_plain(context)

    def extra_repr(self) -> str:
        return f"targets={list(self.targets)}"
