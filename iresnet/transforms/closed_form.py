"""Base classes of transforms that need no estimator for their log-determinant and no solver for their inverse.

To write a transform that is a formula in both directions and takes no context, derive from `ClosedForm` and implement
`value`, `logdet`, `undo` and `stretch`; or, if it only reorders elements, from `Rearrangement` with `value` and `undo`.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from ..batch import Shape, check_batch
from ..fixed_point import Solver
from ..float64 import Rounding
from ..logdet import Estimator
from ..transform import ISOMETRY, Stretch, Transform


class Explicit(Transform):
    """A transform that computes its log-determinant and its inverse directly: it ignores estimator and solver."""

    @abstractmethod
    def _compute_forward_and_logdet(
        self, x: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Return the code z of x and ln |det dz/dx|, shape (batch,)."""

    @abstractmethod
    def _compute_inverse(self, z: Tensor, context: Tensor | None) -> Tensor:
        """Return the x with code z."""

    def forward_and_logdet(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        estimator: Estimator | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self._compute_forward_and_logdet(x, context, generator)

    def inverse(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Tensor:
        return self._compute_inverse(z, context)


class ClosedForm(Explicit):
    """A transform whose code, log-determinant and inverse are formulas of one tensor, without a context."""

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """Return the code z of x."""

    @abstractmethod
    def logdet(self, x: Tensor) -> Tensor:
        """Return ln |det dz/dx|, shape (batch,). `value` has checked this x before."""

    @abstractmethod
    def undo(self, z: Tensor) -> Tensor:
        """Return the x with code z."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.value(x)

    def _compute_forward_and_logdet(
        self, x: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        return self(x), self.logdet(x)

    def _compute_inverse(self, z: Tensor, context: Tensor | None) -> Tensor:
        return self.undo(z)


class Rearrangement(ClosedForm):
    """A transform that only reorders or reshapes the elements of a sample: an isometry with ln det = 0."""

    def logdet(self, x: Tensor) -> Tensor:
        return torch.zeros(len(x), dtype=x.dtype, device=x.device)

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        return ISOMETRY

    def rounding(self, input_shape: Shape) -> Rounding:
        """Return zero: no arithmetic is done."""
        return Rounding(relative=0.0, absolute=0.0, code=0.0, scale=1.0)


def check_channels(x: Tensor, name: str, kind: str, channels: int) -> None:
    """Refuse a batch whose number of channels differs from the one that a transform of this kind was built for."""
    check_batch(x, name)
    if x.shape[1] != channels:
        raise ValueError(
            f"{name} must have shape (batch, {channels}, ...) for {kind}({channels}); got {tuple(x.shape)}. "
            f"Build {kind} with the size of dimension 1."
        )


def is_positive(values: Tensor) -> bool:
    """Whether all values are positive and finite."""
    return bool(((values > 0) & values.isfinite()).all())


def increases(values: Tensor) -> bool:
    """Whether every row of finite values increases."""
    return bool(values.isfinite().all() and (values.diff(dim=1) > 0).all())
