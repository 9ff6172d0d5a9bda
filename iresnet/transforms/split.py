"""Splits: which part of x a coupling keeps, and which it moves.

Halves          the first half of the channels stays, the second is moved      Glow, Real NVP, i-RevNet
Alternate       channels 0, 2, 4, ... stay, the others are moved               NICE
Checkerboard    pixels with i + j even stay, the others are moved: a mask      Real NVP

`swapped` turns each of them around, so that couplings in turn move everything.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..transform import Shape


@dataclass(frozen=True)
class Split(ABC):
    """A way to take x, of shape (batch, channels, ...), apart and to put it together again."""

    swapped: bool = False

    @abstractmethod
    def take(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(what stays, what is moved)."""

    @abstractmethod
    def join(self, kept: Tensor, moved: Tensor) -> Tensor:
        """What `take` took apart."""

    @abstractmethod
    def sizes(self, channels: int) -> tuple[int, int]:
        """(channels that stay, channels that are moved): what a conditioner gets, and what it speaks about."""

    @abstractmethod
    def moves(self, shape: Shape) -> int:
        """How many numbers of a sample of this shape are moved."""

    def only(self, y: Tensor) -> Tensor:
        """What a conditioner says, zero where nothing is moved."""
        return y

    def check(self, shape: Shape) -> None:
        """Refuse a sample of which nothing would stay, or nothing be moved."""
        if shape[0] < 2:
            raise ValueError(
                f"a coupling by {type(self).__name__} needs two channels, one that stays and one that is moved; got a "
                f"sample of shape {shape}. Squeeze an image first, or use Checkerboard()."
            )


@dataclass(frozen=True)
class Halves(Split):
    """The first half of the channels stays, the larger where their number is odd.

    >>> [part.tolist() for part in Halves().take(torch.tensor([[1, 2, 3]]))]
    [[[1, 2]], [[3]]]
    """

    def take(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x.tensor_split([(x.shape[1] + 1) // 2], dim=1)
        return (second, first) if self.swapped else (first, second)

    def join(self, kept: Tensor, moved: Tensor) -> Tensor:
        return torch.cat([moved, kept] if self.swapped else [kept, moved], dim=1)

    def sizes(self, channels: int) -> tuple[int, int]:
        first, second = (channels + 1) // 2, channels // 2
        return (second, first) if self.swapped else (first, second)

    def moves(self, shape: Shape) -> int:
        return self.sizes(shape[0])[1] * math.prod(shape[1:])


@dataclass(frozen=True)
class Alternate(Halves):
    """Every other channel stays, the first among them.

    >>> [part.tolist() for part in Alternate().take(torch.tensor([[1, 2, 3]]))]
    [[[1, 3]], [[2]]]
    """

    def take(self, x: Tensor) -> tuple[Tensor, Tensor]:
        even, odd = x[:, ::2], x[:, 1::2]
        return (odd, even) if self.swapped else (even, odd)

    def join(self, kept: Tensor, moved: Tensor) -> Tensor:
        even, odd = (moved, kept) if self.swapped else (kept, moved)
        place = torch.arange(even.shape[1] + odd.shape[1], device=even.device)
        return torch.cat([even, odd], dim=1).index_select(1, place // 2 + place % 2 * even.shape[1])


@dataclass(frozen=True)
class Checkerboard(Split):
    """Pixels (i, j) of an image with i + j even stay. Both parts have the full size, zeros in the other's places.

    >>> Checkerboard().take(torch.ones(1, 1, 2, 2))[0].tolist()
    [[[[1.0, 0.0], [0.0, 1.0]]]]
    """

    def take(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = self._moved(x)
        return x.masked_fill(mask, 0.0), x.masked_fill(~mask, 0.0)

    def join(self, kept: Tensor, moved: Tensor) -> Tensor:
        return kept + moved

    def sizes(self, channels: int) -> tuple[int, int]:
        return channels, channels

    def moves(self, shape: Shape) -> int:
        even = (shape[1] * shape[2] + 1) // 2
        return shape[0] * (even if self.swapped else shape[1] * shape[2] - even)

    def only(self, y: Tensor) -> Tensor:
        return y.masked_fill(~self._moved(y), 0.0)

    def check(self, shape: Shape) -> None:
        if len(shape) != 3 or shape[1] * shape[2] < 2:
            raise ValueError(
                f"a checkerboard is laid on images (channels, height, width) of two pixels at least; got {shape}. "
                "Use Halves() for channels."
            )

    def _moved(self, x: Tensor) -> Tensor:
        row, column = (torch.arange(n, device=x.device) for n in x.shape[2:])
        return (row[:, None] + column) % 2 == int(not self.swapped)
