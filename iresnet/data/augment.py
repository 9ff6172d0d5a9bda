"""Augmentation: small changes to images that keep their class.

An image moved by (a, b) takes its pixel (i, j) from (i - a, j - b). Positions outside the image are mirrored at its
border, so that no border of a colour of its own is invented, which a density would learn; or they are blank (0), which
is right for drawings on a blank ground. A flip mirrors the columns. Cutout (DeVries and Taylor, 2017) hides a square
behind the mean of the image, channel by channel. Pixels stay integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

import torch
from torch import Tensor

from ..allowed import Rule, check_settings, in_interval

#: Which part of the images is shifted.
Shifted: TypeAlias = Annotated[float, in_interval("[0, 1]", "is the part of the images that is shifted,")]


@dataclass(frozen=True)
class Augment:
    """Shifts by up to `shift` pixels along each axis, uniformly, and flips left to right with probability 1/2.

    Only the part `shifted` of the images is shifted, each drawn on its own. `border` says what moves in. `cutout` is
    the side of a hidden square, whose middle lies anywhere in the image: part of it may lie outside.

    >>> x = torch.arange(3, dtype=torch.uint8).view(1, 1, 1, 3)
    >>> Augment(flip=True)(x, torch.Generator().manual_seed(3)).flatten().tolist()
    [2, 1, 0]
    """

    shift: Annotated[int, Rule(lambda shift: shift >= 0, "must be at least 0 pixels")] = 0
    flip: bool = False
    shifted: Shifted = 1.0
    border: Annotated[str, Rule(lambda border: border in ("mirror", "blank"), "must be mirror or blank")] = "mirror"
    cutout: Annotated[int, Rule(lambda side: side >= 0, "is the side of a square in pixels, at least 0")] = 0

    def __post_init__(self) -> None:
        check_settings(self)

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse rows that cannot be augmented like this."""
        if (self.shift or self.flip or self.cutout) and len(shape) != 3:
            raise ValueError(
                f"shift, flip and cutout are for images; got rows of shape {shape}. "
                "Set shift = 0, flip = false, cutout = 0."
            )
        if self.shift and self.shift >= min(shape[1:]):
            raise ValueError(f"shift must be smaller than the image; got {self.shift} for {shape[1]} x {shape[2]}.")

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """A new batch (B, C, H, W); every image draws its own noise, on the generator's device."""
        self.check(tuple(x.shape[1:]))
        if not (self.shift or self.flip or self.cutout):
            return x
        (b, _, h, w), device = x.shape, generator.device
        # Both are drawn whatever is asked for, so that the shifts do not depend on the flips.
        moves = torch.randint(-self.shift, self.shift + 1, (2, b, 1), generator=generator, device=device)
        flips = moved(torch.randint(2, (b, 1), generator=generator, device=device).bool(), x.device)
        if self.shifted < 1:
            moves = moves * (torch.rand(b, 1, generator=generator, device=device) < self.shifted)
        if self.shift or self.flip:
            x = self._placed(x, moved(moves, x.device), flips)
        if self.cutout:
            middle = torch.stack([torch.randint(n, (b, 1), generator=generator, device=device) for n in (h, w)])
            x = self._cut(x, moved(middle, x.device))
        return x

    def _placed(self, x: Tensor, moves: Tensor, flips: Tensor) -> Tensor:
        b, _, h, w = x.shape
        rows, columns = (torch.arange(n, device=x.device) - m for n, m in zip((h, w), moves, strict=True))
        if self.flip:
            columns = torch.where(flips, columns.flip(1), columns)
        inside = ((rows >= 0) & (rows < h))[:, :, None] & ((columns >= 0) & (columns < w))[:, None, :]
        rows, columns = _mirror(rows, h), _mirror(columns, w)
        images = torch.arange(b, device=x.device)[:, None, None]
        # Indices on both sides of the slice put the channels last.
        made = x[images, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        return (made if self.border == "mirror" else made * inside[:, None]).contiguous()

    def _cut(self, x: Tensor, middle: Tensor) -> Tensor:
        """The square of side n around (i, j): rows i - n // 2 .. i - n // 2 + n - 1, columns likewise."""
        first = middle - self.cutout // 2
        rows, columns = (
            (torch.arange(n, device=x.device) >= f) & (torch.arange(n, device=x.device) < f + self.cutout)
            for n, f in zip(x.shape[2:], first, strict=True)
        )
        hidden = (rows[:, :, None] & columns[:, None, :])[:, None]
        return torch.where(hidden, x.float().mean(dim=(2, 3), keepdim=True).round().to(x.dtype), x)


def moved(t: Tensor, device: torch.device) -> Tensor:
    """The same numbers on a device. To a GPU they go from pinned memory, so that the host need not wait for it."""
    if t.device.type == "cpu" and device.type == "cuda":
        return t.pin_memory().to(device, non_blocking=True)
    return t.to(device)


def _mirror(position: Tensor, length: int) -> Tensor:
    """Positions -n .. 2n mirrored into 0 .. n at both ends, n = length - 1; the border itself is not repeated."""
    n = length - 1
    return n - (n - position.abs()).abs()
