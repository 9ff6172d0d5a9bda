"""Augmentation: small changes to images that keep their class.

An image moved by (a, b) takes its pixel (i, j) from (i - a, j - b). Positions outside the image are mirrored at its
border, so that no border of a colour of its own is invented, which a density would learn; or they are blank (0), which
is right for drawings on a blank ground. A flip mirrors the columns. Pixels stay the integers that came in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BORDERS = ("mirror", "blank")


@dataclass(frozen=True)
class Augment:
    """Shifts by up to `shift` pixels along each axis, uniformly, and flips left to right with probability 1/2.

    Only the part `shifted` of the images is shifted, each drawn on its own. `border` says what moves in.

    >>> x = torch.arange(3, dtype=torch.uint8).view(1, 1, 1, 3)
    >>> Augment(flip=True)(x, torch.Generator().manual_seed(3)).flatten().tolist()
    [2, 1, 0]
    """

    shift: int = 0
    flip: bool = False
    shifted: float = 1.0
    border: str = "mirror"

    def __post_init__(self) -> None:
        if self.shift < 0:
            raise ValueError(f"shift must be at least 0 pixels; got {self.shift}.")
        if not 0 <= self.shifted <= 1:
            raise ValueError(f"shifted is the part of the images that is shifted, in [0, 1]; got {self.shifted}.")
        if self.border not in BORDERS:
            raise ValueError(f"border must be {' or '.join(BORDERS)}; got {self.border!r}.")

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse rows that cannot be augmented like this."""
        if (self.shift or self.flip) and len(shape) != 3:
            raise ValueError(f"shift and flip are for images; got rows of shape {shape}. Set shift = 0, flip = false.")
        if self.shift and self.shift >= min(shape[1:]):
            raise ValueError(f"shift must be smaller than the image; got {self.shift} for {shape[1]} x {shape[2]}.")

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """A new batch (B, C, H, W); every image draws its own noise, on the generator's device."""
        self.check(tuple(x.shape[1:]))
        if not (self.shift or self.flip):
            return x
        (b, _, h, w), device = x.shape, generator.device
        # Both are drawn whatever is asked for, so that the shifts do not depend on the flips.
        moves = torch.randint(-self.shift, self.shift + 1, (2, b, 1), generator=generator, device=device).to(x.device)
        flips = torch.randint(2, (b, 1), generator=generator, device=device).bool().to(x.device)
        if self.shifted < 1:
            moves = moves * (torch.rand(b, 1, generator=generator, device=device) < self.shifted).to(x.device)
        rows, columns = (torch.arange(n, device=x.device) - m for n, m in zip((h, w), moves, strict=True))
        if self.flip:
            columns = torch.where(flips, columns.flip(1), columns)
        inside = ((rows >= 0) & (rows < h))[:, :, None] & ((columns >= 0) & (columns < w))[:, None, :]
        rows, columns = _mirror(rows, h), _mirror(columns, w)
        images = torch.arange(b, device=x.device)[:, None, None]
        # Indices on both sides of the slice put the channels last.
        made = x[images, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        return (made if self.border == "mirror" else made * inside[:, None]).contiguous()


def _mirror(position: Tensor, length: int) -> Tensor:
    """Positions -n .. 2n mirrored into 0 .. n at both ends, n = length - 1; the border itself is not repeated."""
    n = length - 1
    return n - (n - position.abs()).abs()
