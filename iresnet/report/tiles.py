"""Images of a page, each a small PNG inside it, and how many the page can carry.

Handwriting and the like, mostly empty, is drawn as ink on paper; a page in dark colours turns it round.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plots import raster
from .markup import Markup, joined, tag
from .material import Material

SIDE = 48  # pixels: larger images are reduced
BUDGET = 150_000  # bytes of pixels in one grid: 48 colour images of 32 x 32


@dataclass(frozen=True)
class Look:
    """How the images of one page are drawn, all of them alike."""

    levels: int
    ink: bool

    def tiles(self, images: Tensor, alts: Sequence[str]) -> list[Markup]:
        """Images (N, C, H, W) as elements; an empty text for what its frame describes."""
        return self._pictures(raster.pixels(_visible(images), self.levels, ink=self.ink), alts)

    def shades(self, light: Tensor, alts: Sequence[str]) -> list[Markup]:
        """Brightness in [0, 1] as elements, in the same look."""
        return self._pictures(raster.shades(light, ink=self.ink), alts)

    def _pictures(self, drawn: raster.Bytes, alts: Sequence[str]) -> list[Markup]:
        return [picture(raster.png(p), alt, self.ink) for p, alt in zip(drawn, alts, strict=True)]

    def note(self) -> str:
        """What a caption says about the drawing."""
        return f"0 is drawn as paper, {self.levels - 1} as ink." if self.ink else ""


def look(material: Material) -> Look:
    """The look that suits the data."""
    r = material.reconstruction
    known = (material.data, None if r is None else r.originals, material.samples)
    images = next((x for x in known if x is not None and len(x)), None)
    return Look(material.levels, images is not None and raster.looks_handwritten(_visible(images), material.levels))


def picture(content: bytes, alt: str, ink: bool = False, size: tuple[int, int] | None = None) -> Markup:
    """A PNG inside the page."""
    uri = "data:image/png;base64," + base64.b64encode(content).decode("ascii")
    width, height = size or (None, None)
    return tag("img", src=uri, alt=alt, width=width, height=height, class_="ink" if ink else None)


def grid(images: Tensor, how: Look, description: str, columns: int) -> Markup:
    """Images in rows of so many, read aloud as one."""
    tiles = joined(how.tiles(images, [""] * len(images)))
    return tag("div", tiles, class_="grid", role="img", aria_label=description, style=f"--columns:{columns}")


def fitting(images: Tensor, most: int, budget: int = BUDGET) -> Tensor:
    """The first images, as many as the budget allows (at least four), at most `most`, reduced if they are large."""
    chosen = reduced(images[:most])
    return chosen[: max(4, budget // max(1, chosen[0].numel()))] if len(chosen) else chosen


def reduced(images: Tensor) -> Tensor:
    """Images at most SIDE pixels wide and high: means over squares of pixels."""
    factor = -(-max(images.shape[-2:]) // SIDE)
    if factor == 1:
        return images
    return torch.nn.functional.avg_pool2d(raster.centred(images), factor)


def reduction(material: Material) -> str:
    """What a caption says where images are shown smaller than they are."""
    factor = -(-max(material.schema.shape[-2:]) // SIDE)
    return f"Shown at 1/{factor} of their size." if factor > 1 else ""


def _visible(images: Tensor) -> Tensor:
    """One channel or three of those there are."""
    channels = images.shape[1]
    return images if channels in (1, 3) else images[:, : 3 if channels > 3 else 1]
