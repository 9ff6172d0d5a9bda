"""Images below each other: originals, and what several networks made of their codes (Figures 3 and 7 of the paper)."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from .canvas import DIM, axes_at, blank, draw, text_at
from .raster import Bytes, drawn_as_ink, pixels

SIDE, GAP, LABEL, MARGIN, LINE = 0.68, 0.05, 1.72, 0.14, 0.15  # inches
LETTERS = 150  # in a line of the note
GREY = 170  # what is drawn where there is no number


@dataclass(frozen=True)
class ImageRow:
    """One row: its name, a remark of a few lines below it, and images (N, C, H, W), which need not be finite."""

    name: str
    remark: str
    images: Tensor


def rows_picture(rows: Sequence[ImageRow], path: str | Path, *, levels: int, note: str = "", dpi: int = 200) -> Path:
    """Write rows of images as one PNG, the note below. What lies outside of the pixels' range is clipped, and said."""
    if not rows or len({r.images.shape for r in rows}) > 1:
        raise ValueError(
            f"rows must hold images of one shape; got {[tuple(r.images.shape) for r in rows]}. Pass the same images."
        )
    ink = drawn_as_ink(rows[0].images, levels)
    tiles = [_tiles(r.images, levels, ink) for r in rows]
    lines = textwrap.wrap(" ".join([note, *_outside(rows, levels)]), LETTERS)
    return draw(path, dpi, lambda: _compose(rows, tiles, lines))


def _tiles(images: Tensor, levels: int, ink: bool) -> Bytes:
    known = images.isfinite() if images.is_floating_point() else torch.ones_like(images, dtype=torch.bool)
    made = pixels(torch.where(known, images, 0), levels, ink=ink)
    made[~known.permute(0, 2, 3, 1).cpu().numpy()] = GREY
    return made


def _outside(rows: Sequence[ImageRow], levels: int) -> list[str]:
    """Sentences about what the picture cannot show."""
    values = [r.images for r in rows if r.images.is_floating_point()]
    # A millionth of a level beyond the end is rounding, not a picture that was clipped.
    beyond = any(bool(((v < -1e-6) | (v > levels + 1e-6)).any()) for v in values)
    lost = any(bool(v.isnan().any()) for v in values)
    sentences = {"Values outside of the range of pixels are clipped.": beyond, "Grey: numbers overflowed.": lost}
    return [sentence for sentence, said in sentences.items() if said]


def _compose(rows: Sequence[ImageRow], tiles: Sequence[Bytes], lines: Sequence[str]) -> Figure:
    width = LABEL + len(tiles[0]) * (SIDE + GAP) - GAP + MARGIN
    foot = MARGIN + LINE * len(lines)
    height = foot + len(rows) * (SIDE + GAP) + MARGIN
    figure = blank(width, height)
    for i, (row, images) in enumerate(zip(rows, tiles, strict=True)):
        bottom = height - MARGIN - (i + 1) * SIDE - i * GAP
        remarks = row.remark.splitlines()
        top = bottom + SIDE / 2 + 0.075 * len(remarks) - 0.04
        text_at(figure, MARGIN, top, row.name, 9)
        for k, line in enumerate(remarks):
            text_at(figure, MARGIN, top - LINE * (k + 1), line, 7.5, DIM)
        for j, tile in enumerate(images):
            axes = axes_at(figure, LABEL + j * (SIDE + GAP), bottom, SIDE, SIDE)
            axes.imshow(tile, cmap="gray", vmin=0, vmax=255, interpolation="nearest", aspect="auto")
    for k, line in enumerate(lines):
        text_at(figure, MARGIN, foot - LINE * (k + 1), line, 7.5, DIM)
    return figure
