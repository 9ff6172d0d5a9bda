"""Augmentation: small changes to images that keep their class.

An image shifted by (a, b) takes its pixel (i, j) from (i - a, j - b). Positions outside the image are mirrored at the
border, since a border of one colour would be learnt by a density; or they are blank (0), which suits drawings on a
blank background. A flip mirrors the columns. Cutout (DeVries and Taylor, 2017) replaces a square by the mean of the
image, per channel. Pixels stay integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeAlias

import torch
from torch import Tensor

from ..allowed import Rule, check_settings, in_interval
from ..shard import draw_rows

#: The fraction of the images that is shifted.
Shifted: TypeAlias = Annotated[float, in_interval("[0, 1]", "is the fraction of the images that is shifted,")]


@dataclass(frozen=True)
class Augment:
    """Shift by up to `shift` pixels along each axis, uniformly, and flip left to right with probability 1/2.

    Only the fraction `shifted` of the images is shifted, drawn per image. `border` is what fills the uncovered border:
    "mirror" or "blank". `cutout` is the side of the square that is replaced by the mean; its centre lies anywhere in
    the image, so part of the square may lie outside.

    >>> x = torch.arange(3, dtype=torch.uint8).view(1, 1, 1, 3)
    >>> Augment(flip=True)(x, torch.Generator().manual_seed(3)).flatten().tolist()
    [2, 1, 0]
    """

    shift: Annotated[int, Rule(lambda shift: shift >= 0, "must be at least 0 pixels")] = 0
    flip: bool = False
    shifted: Shifted = 1.0
    border: Annotated[str, Rule(lambda border: border in ("mirror", "blank"), "must be mirror or blank")] = "mirror"
    cutout: Annotated[int, Rule(lambda side: side >= 0, "is the side of a square in pixels and must be at least 0")] = 0

    def __post_init__(self) -> None:
        check_settings(self)

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse samples of a shape that cannot be augmented with these settings."""
        if (self.shift or self.flip or self.cutout) and len(shape) != 3:
            raise ValueError(
                f"shift, flip and cutout are for images; got samples of shape {shape}. "
                "Set shift = 0, flip = false, cutout = 0."
            )
        if self.shift and self.shift >= min(shape[1:]):
            raise ValueError(f"shift must be smaller than the image; got {self.shift} for {shape[1]} x {shape[2]}.")

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Augment a batch (B, C, H, W); every image draws its own random numbers, on the generator's device."""
        self.check(tuple(x.shape[1:]))
        if not (self.shift or self.flip or self.cutout):
            return x
        (b, _, h, w), source = x.shape, {"generator": generator, "device": generator.device}
        # Both are always drawn, so that the shifts are the same with and without flips.
        shifts = draw_rows(partial(torch.randint, -self.shift, self.shift + 1, **source), (2, b, 1), axis=1)
        flips = to_device(draw_rows(partial(torch.randint, 2, **source), (b, 1)).bool(), x.device)
        if self.shifted < 1:
            shifts = shifts * (draw_rows(partial(torch.rand, **source), (b, 1)) < self.shifted)
        if self.shift or self.flip:
            x = self._shift_and_flip(x, to_device(shifts, x.device), flips)
        if self.cutout:
            centre = torch.stack([draw_rows(partial(torch.randint, n, **source), (b, 1)) for n in (h, w)])
            x = self._cut_out(x, to_device(centre, x.device))
        return x

    def _shift_and_flip(self, x: Tensor, shifts: Tensor, flips: Tensor) -> Tensor:
        b, _, h, w = x.shape
        rows, columns = (torch.arange(n, device=x.device) - m for n, m in zip((h, w), shifts, strict=True))
        if self.flip:
            columns = torch.where(flips, columns.flip(1), columns)
        inside = ((rows >= 0) & (rows < h))[:, :, None] & ((columns >= 0) & (columns < w))[:, None, :]
        rows, columns = _mirror(rows, h), _mirror(columns, w)
        images = torch.arange(b, device=x.device)[:, None, None]
        # Indices on both sides of the slice put the channels last.
        moved = x[images, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        return (moved if self.border == "mirror" else moved * inside[:, None]).contiguous()

    def _cut_out(self, x: Tensor, centre: Tensor) -> Tensor:
        """Hide the square of side n around (i, j): rows i - n // 2 .. i - n // 2 + n - 1, columns likewise."""
        first = centre - self.cutout // 2
        rows, columns = (
            (torch.arange(n, device=x.device) >= f) & (torch.arange(n, device=x.device) < f + self.cutout)
            for n, f in zip(x.shape[2:], first, strict=True)
        )
        hidden = (rows[:, :, None] & columns[:, None, :])[:, None]
        return torch.where(hidden, x.float().mean(dim=(2, 3), keepdim=True).round().to(x.dtype), x)


def to_device(t: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; to a GPU from pinned memory, so that the host does not wait."""
    if t.device.type == "cpu" and device.type == "cuda":
        return t.pin_memory().to(device, non_blocking=True)
    return t.to(device)


def _mirror(position: Tensor, length: int) -> Tensor:
    """Mirror positions -n .. 2n into 0 .. n, n = length - 1, without repeating the border itself."""
    n = length - 1
    return n - (n - position.abs()).abs()
