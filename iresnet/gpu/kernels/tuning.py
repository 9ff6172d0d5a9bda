"""Tile sizes: how the work of a unit is divided into programs, by number of channels; measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """Pixels per tile, warps, stages of the inner loop (0: unrolled), and tiles per program, processed in sequence."""

    pixels: int
    warps: int = 4
    stages: int = 3
    tiles: int = 1

    def programs(self, pixels: int) -> int:
        return divide(pixels, self.pixels * self.tiles)


@dataclass(frozen=True)
class Blocks:
    """How a weight's gradient is divided: rows, columns, pixels at a time; `programs`: approximate total number."""

    rows: int
    columns: int
    pixels: int
    warps: int = 4
    stages: int = 3
    programs: int = 264


@dataclass(frozen=True)
class Tuning:
    """The tile sizes for one number of channels.

    `method`: "narrow": the transposed convolutions also compute the gradients of the weights; "own": these have a
    separate kernel; "library": 3 x 3 convolutions are torch's. `columns` and `depth` belong to the product of
    "library". `aside`: the gradients of the weights are computed concurrently, on a second stream.
    """

    method: str
    enter: Tile
    mix: Tile
    plain: Tile
    mix_back: Tile
    leave: Tile
    gradients: Blocks
    columns: int = 256
    depth: int = 32
    columns_back: int = 256
    depth_back: int = 64
    aside: bool = False


@cache
def tuning(channels: int) -> Tuning:
    """Return the tile sizes for this number of channels."""
    if channels <= 16:
        tile, long = Tile(128, 4, 3), Tile(64, 4, 2, 8)
        return Tuning("narrow", Tile(256), tile, tile, long, long, Blocks(16, 64, 128))
    if channels <= 64:
        tile, wide = Tile(128, 8, 3), Tile(128, 4, 3)
        return Tuning("own", Tile(64), tile, tile, wide, wide, Blocks(channels, 64, 128, 4, 3, 264), aside=True)
    enter, leave = Tile(max(1, 4096 // channels)), Tile(max(1, 2048 // channels), 4, 3, 4)
    tile, blocks = Tile(64, 4, 3), Blocks(64, 64, 64, 4, 4, 264)
    return Tuning("library", enter, Tile(64, 8, 3), tile, tile, leave, blocks, aside=True)


@dataclass(frozen=True)
class Shape:
    """The image size and the tile sizes for it."""

    pixels: int
    height: int
    width: int
    channels: int
    tuning: Tuning

    @classmethod
    def of(cls, x: Tensor) -> Shape:
        n, c, h, w = x.shape
        return cls(n * h * w, h, w, c, tuning(c))

    @property
    def plane(self) -> dict[str, int]:
        return {"H": self.height, "W": self.width, "C": self.channels}

    def sums(self, tile: Tile, like: Tensor) -> Tensor:
        """Allocate space for two sums per channel of every program."""
        return like.new_empty(tile.programs(self.pixels), 2 * self.channels, dtype=torch.float32)

    def split(self) -> tuple[int, int, int]:
        """For the gradients of the weights: how many programs share the pixels, their steps, and the blocks in all."""
        b, c = self.tuning.gradients, self.channels
        convolutions = 2 * divide(9 * c, b.columns) if self.tuning.method == "own" else 0
        jobs = c // min(b.rows, c) * (convolutions + divide(c, b.columns))
        splits = max(1, min(b.programs // jobs, divide(self.pixels, b.pixels)))
        steps = divide(divide(self.pixels, splits), b.pixels)
        return divide(self.pixels, steps * b.pixels), steps, jobs


def divide(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)
