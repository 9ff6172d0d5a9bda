"""Splits: which part of x a coupling keeps, and which it transforms.

Halves          keeps the first half of the channels, transforms the second         Glow, Real NVP, i-RevNet
Alternate       keeps channels 0, 2, 4, ..., transforms the others                  NICE
Checkerboard    keeps pixels with i + j even, transforms the others: a mask         Real NVP

`swapped` exchanges the two parts, so that successive couplings transform everything.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import Shape


@dataclass(frozen=True)
class Split(ABC):
    """Splits x, of shape (batch, channels, ...), into two parts and joins them again."""

    swapped: bool = False

    @abstractmethod
    def separate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the kept part, the transformed part) of x."""

    @abstractmethod
    def join(self, kept: Tensor, transformed: Tensor) -> Tensor:
        """Join the two parts: the inverse of `separate`."""

    @abstractmethod
    def sizes(self, channels: int) -> tuple[int, int]:
        """Return the numbers of (kept, transformed) channels: the inputs and outputs of a conditioner."""

    @abstractmethod
    def count_transformed(self, shape: Shape) -> int:
        """Return how many numbers of a sample of this shape are transformed."""

    def mask(self, y: Tensor) -> Tensor:
        """Set the output of a conditioner to zero where nothing is transformed."""
        return y

    def check(self, shape: Shape) -> None:
        """Refuse a shape for which one of the two parts would be empty."""
        if shape[0] < 2:
            raise ValueError(
                f"a coupling with {type(self).__name__} needs at least two channels, one to keep and one to transform; "
                f"got samples of shape {shape}. Squeeze an image first, or use Checkerboard()."
            )


@dataclass(frozen=True)
class Halves(Split):
    """Keeps the first half of the channels, the larger one if their number is odd.

    >>> [part.tolist() for part in Halves().separate(torch.tensor([[1, 2, 3]]))]
    [[[1, 2]], [[3]]]
    """

    def separate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x.tensor_split([(x.shape[1] + 1) // 2], dim=1)
        return (second, first) if self.swapped else (first, second)

    def join(self, kept: Tensor, transformed: Tensor) -> Tensor:
        return torch.cat([transformed, kept] if self.swapped else [kept, transformed], dim=1)

    def sizes(self, channels: int) -> tuple[int, int]:
        first, second = (channels + 1) // 2, channels // 2
        return (second, first) if self.swapped else (first, second)

    def count_transformed(self, shape: Shape) -> int:
        return self.sizes(shape[0])[1] * math.prod(shape[1:])


@dataclass(frozen=True)
class Alternate(Halves):
    """Keeps every other channel, beginning with the first.

    >>> [part.tolist() for part in Alternate().separate(torch.tensor([[1, 2, 3]]))]
    [[[1, 3]], [[2]]]
    """

    def separate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        even, odd = x[:, ::2], x[:, 1::2]
        return (odd, even) if self.swapped else (even, odd)

    def join(self, kept: Tensor, transformed: Tensor) -> Tensor:
        even, odd = (transformed, kept) if self.swapped else (kept, transformed)
        position = torch.arange(even.shape[1] + odd.shape[1], device=even.device)
        return torch.cat([even, odd], dim=1).index_select(1, position // 2 + position % 2 * even.shape[1])


@dataclass(frozen=True)
class Checkerboard(Split):
    """Keeps the pixels (i, j) of an image with i + j even. Both parts have the full size, with zeros elsewhere.

    >>> Checkerboard().separate(torch.ones(1, 1, 2, 2))[0].tolist()
    [[[[1.0, 0.0], [0.0, 1.0]]]]
    """

    def separate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = self._mask(x)
        return x.masked_fill(mask, 0.0), x.masked_fill(~mask, 0.0)

    def join(self, kept: Tensor, transformed: Tensor) -> Tensor:
        return kept + transformed

    def sizes(self, channels: int) -> tuple[int, int]:
        return channels, channels

    def count_transformed(self, shape: Shape) -> int:
        even = (shape[1] * shape[2] + 1) // 2
        return shape[0] * (even if self.swapped else shape[1] * shape[2] - even)

    def mask(self, y: Tensor) -> Tensor:
        return y.masked_fill(~self._mask(y), 0.0)

    def check(self, shape: Shape) -> None:
        if len(shape) != 3 or shape[1] * shape[2] < 2:
            raise ValueError(
                f"Checkerboard takes images (channels, height, width) of at least two pixels; got {shape}. "
                "Use Halves() for channels."
            )

    def _mask(self, x: Tensor) -> Tensor:
        row, column = (torch.arange(n, device=x.device) for n in x.shape[2:])
        return (row[:, None] + column) % 2 == int(not self.swapped)


def is_known(split: object) -> bool:
    """Whether an object is a split of this library, with its methods as they are: its two parts make up the whole."""
    return type(split) in (Halves, Alternate, Checkerboard) and vars(split).keys() == {"swapped"}
