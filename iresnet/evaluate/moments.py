"""Mean and variance of many values that come in chunks, as exact as from all of them at once.

Two chunks with counts m and n, means a and b, and sums of squared deviations S and T have together the mean
a + (b - a) n / (m + n) and the sum S + T + (b - a)^2 m n / (m + n) (Chan, Golub and LeVeque, 1979).
"""

from __future__ import annotations

import math

from torch import Tensor


class Moments:
    """The number of values so far, their mean, and the sum of their squared deviations from it.

    >>> import torch
    >>> moments = Moments()
    >>> for chunk in (torch.tensor([1.0, 2.0]), torch.tensor([6.0])):
    ...     moments.add(chunk)
    >>> moments.count, moments.mean, moments.deviations
    (3, 3.0, 14.0)
    >>> moments.merge(Moments(torch.tensor([3.0])))
    >>> moments.count, moments.mean, moments.deviations
    (4, 3.0, 14.0)
    """

    def __init__(self, values: Tensor | None = None) -> None:
        self.count, self.mean, self.deviations = 0, 0.0, 0.0
        if values is not None:
            self.add(values)

    def add(self, values: Tensor) -> None:
        """Add more values."""
        values = values.double()
        mean = float(values.mean())
        self._add(len(values), mean, float((values - mean).square().sum()))

    def merge(self, other: Moments) -> None:
        """Add the values of other moments."""
        if other.count:
            self._add(other.count, other.mean, other.deviations)

    def _add(self, n: int, mean: float, deviations: float) -> None:
        step, total = mean - self.mean, self.count + n
        self.deviations += deviations + step * step * self.count * n / total
        self.mean += step * n / total
        self.count = total

    @property
    def standard_error(self) -> float:
        """The standard error of the mean; NaN for one value."""
        return math.sqrt(self.deviations / (self.count - 1) / self.count) if self.count > 1 else math.nan
