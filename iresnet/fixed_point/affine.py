"""An affine approximation of g, with which the inverse of a block takes fewer evaluations.

    g(x) ~ A x + b      by least squares at fixed points, about where the inputs of a normalised network lie
    start               x = P (z - b),  P = (I + A)^-1: the inverse, if g were affine
    step                x <- x + P (z - x - g(x)), instead of the Banach step x <- x + (z - x - g(x))

The error of such a step is that of the approximation, not of g itself. In few dimensions the Jacobians J of the
samples cost little more than g. Where the approximation is poor, as that of most trained networks, they take the place
of A after the start: `Newton`.

Both are guesses, of which nothing is proven: the solvers watch the residuals, and the bound at the end does not depend
on how x was found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

#: x -> g(x) and (I + J(x))^-1, (batch, d, d).
Linearise: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]

#: The largest dimension for which an approximation pays off.
MAX_DIMENSION = 128

#: The largest dimension for which Jacobians do.
FEW_DIMENSIONS = 8

#: The error of an approximation that suffices without Jacobians.
SMALL_ERROR = 0.02

#: Points per dimension and in addition; their scales in turn: a normalised network before and after training.
_POINTS, _MORE, _SCALES = 2, 128, (1.0, 2.0)

#: How far, in standard deviations of the points, a code may be from zero to start at P (z - b); others start at z.
_FAR = 3.0


@dataclass(frozen=True)
class Affine:
    """g(x) ~ A x + b, kept as the matrix P' and b; `linearise` gives the Jacobians, where they cost little.

    `error` is the distance from g relative to the size of x: the root mean square over the points of the fit.
    """

    transposed: Tensor
    shift: Tensor
    linearise: Linearise | None = None
    error: float = math.inf

    @classmethod
    def fit(
        cls, g: Callable[[Tensor], Tensor], d: int, lipschitz: float, linearise: Linearise | None = None
    ) -> Affine | None:
        """Fit the approximation to a g in float64 with this Lipschitz constant, below 1; None if numbers overflow."""
        points, projection = _points(d)
        values = g(points)
        found = projection @ values
        if not bool(found.isfinite().all()):
            return None
        a, b = found[:d].t(), found[d]
        error = float(torch.linalg.vector_norm(values - points @ a.t() - b) / torch.linalg.vector_norm(points))
        norm = float(torch.linalg.matrix_norm(a, 2))
        a = a * min(1.0, lipschitz / norm) if norm > 0 else a  # so that I + A is invertible
        p = torch.linalg.inv(torch.eye(d, dtype=a.dtype, device=a.device) + a)
        return cls(p.t().contiguous(), b, linearise, error)

    @property
    def needs_jacobians(self) -> bool:
        """Whether steps with Jacobians take less time than those with this approximation."""
        return self.linearise is not None and self.error > SMALL_ERROR

    def to(self, dtype: torch.dtype) -> Affine:
        if self.shift.dtype == dtype:
            return self
        return replace(self, transposed=self.transposed.to(dtype), shift=self.shift.to(dtype))

    def start(self, z: Tensor, sizes: Tensor) -> Tensor:
        """Return the x to start from, for codes (batch, d) of these norms."""
        near, start = sizes <= _FAR * max(_SCALES) * math.sqrt(z.shape[1]), (z - self.shift) @ self.transposed
        return start if bool(near.all()) else torch.where(near[:, None], start, z)

    def step(self, x: Tensor, r: Tensor) -> Tensor:
        """Return x + P r."""
        return torch.addmm(x, r, self.transposed)

    def correct(self, r: Tensor) -> Tensor:
        """Return P r."""
        return r @ self.transposed


@cache
def _points(d: int) -> tuple[Tensor, Tensor]:
    """Return fixed points, (n, d), and the matrix (d + 1, n) that fits A' and b to the values of g at them."""
    n = _POINTS * d + _MORE
    with torch.device("cpu"):  # whatever the default device of the moment is
        points = torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        points *= torch.tensor(_SCALES, dtype=points.dtype).repeat(math.ceil(n / len(_SCALES)))[:n, None]
        return points, torch.linalg.pinv(torch.cat([points, torch.ones(n, 1, dtype=points.dtype)], 1))
