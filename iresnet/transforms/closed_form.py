"""Transforms by a formula each way: nothing is estimated, iterated or given a context.

How to write one: derive from `ClosedForm` and implement `value`, `logdet`, `undo` and `stretch`; or from
`Rearrangement`, where `value` and `undo` only move elements.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from ..fixed_point import Solver
from ..float64 import Rounding
from ..logdet import Estimator
from ..transform import ISOMETRY, Shape, Stretch, Transform, check_batch


class ClosedForm(Transform):
    """A transform whose code, log-determinant and inverse are formulas."""

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """The code z of x."""

    @abstractmethod
    def logdet(self, x: Tensor) -> Tensor:
        """ln |det dz/dx|, shape (batch,), of an x that `value` has met."""

    @abstractmethod
    def undo(self, z: Tensor) -> Tensor:
        """The x whose code is z."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.value(x)

    def forward_and_logdet(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        estimator: Estimator | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self(x), self.logdet(x)

    def inverse(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Tensor:
        return self.undo(z)


class Rearrangement(ClosedForm):
    """The elements of a sample in another order or shape: an isometry that changes no volume."""

    def logdet(self, x: Tensor) -> Tensor:
        return torch.zeros(len(x), dtype=x.dtype, device=x.device)

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        return ISOMETRY

    def rounding(self, input_shape: Shape) -> Rounding:
        """Nothing is computed."""
        return Rounding(relative=0.0, absolute=0.0, code=0.0, scale=1.0)


def check_channels(x: Tensor, name: str, kind: str, channels: int) -> None:
    """Refuse a batch with another number of channels than a transform of this kind was made for."""
    check_batch(x, name)
    if x.shape[1] != channels:
        raise ValueError(
            f"{name} must have shape (batch, {channels}, ...) for {kind}({channels}); got {tuple(x.shape)}. "
            f"Give {kind} the size of dimension 1."
        )
