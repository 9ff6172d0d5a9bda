"""Images side by side: samples in a grid, interpolations, and rows of reconstructions (Figures 3 and 7 of the paper).

Pixels are integers in 0 .. levels - 1 or real numbers in [0, levels]; values outside are clipped. Grey images that are
mostly empty, like handwriting, are drawn dark on white unless `ink` says otherwise.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..atomic import write
from ..spelling import at_least
from .canvas import HEADING, LINE, Panels, new_plot, png_path
from .raster import Bytes, differences, looks_handwritten, pixels, png, shades, tile

WIDTH = 960  # pixels, about, of a grid
MOST = 12  # reconstructions in one plot
SIDE, GAP, NAMES, EDGE = 0.7, 0.05, 1.72, 0.14  # inches: an image, between images, the row names, around all
LETTERS = 18  # of a note, per inch
GREY = 170  # the brightness of pixels that are not finite


@dataclass(frozen=True)
class ImageRow:
    """One row: its name, a remark of a few lines below it, and images (N, C, H, W), which need not be finite."""

    name: str
    remark: str
    images: Tensor


def plot_image_grid(
    images: Tensor, path: str | Path, *, columns: int | None = None, levels: int = 256, ink: bool | None = None
) -> Path:
    """Write images (N, C, H, W) as one PNG grid, each enlarged by the same integer factor.

    Without `columns` the grid is about as high as it is wide.
    """
    path, tiles = png_path(path), pixels(images, levels, ink=_use_ink(images, levels, ink))
    columns = math.ceil(math.sqrt(len(tiles))) if columns is None else columns
    at_least(1, columns=columns)
    columns = min(columns, len(tiles))
    factor = max(1, WIDTH // (columns * tiles.shape[2]))
    gap = max(1, factor * tiles.shape[2] // 20)
    return write(path, png(tile(tiles, columns, factor, gap)))


def plot_interpolations(images: Tensor, path: str | Path, *, levels: int = 256, ink: bool | None = None) -> Path:
    """Write decoded lines between codes, (pairs, steps, C, H, W), as one PNG with a row for each pair."""
    if images.dim() != 5:
        raise ValueError(
            f"images must have shape (pairs, steps, C, H, W); got {tuple(images.shape)}. Stack the steps of each pair."
        )
    return plot_image_grid(images.flatten(0, 1), path, columns=images.shape[1], levels=levels, ink=ink)


def plot_reconstructions(
    originals: Tensor,
    rebuilt: Tensor,
    errors: Tensor,
    path: str | Path,
    *,
    levels: int = 256,
    ink: bool | None = None,
    dpi: int = 200,
) -> Path:
    """Plot originals, their reconstructions, and the magnified differences as three rows of images.

    `errors` holds the l2 distance of each pair, which is written below it. The first twelve pairs are drawn.
    """
    if errors.shape != originals.shape[:1]:
        raise ValueError(f"errors must hold one number per image, {len(originals)}; got shape {tuple(errors.shape)}.")
    originals, rebuilt, errors = originals[:MOST], rebuilt[:MOST], errors[:MOST]
    difference, largest = differences(originals, rebuilt)
    ink = _use_ink(originals, levels, ink)
    rows = (
        ("original", "", pixels(originals, levels, ink=ink, name="originals")),
        ("reconstruction", "", pixels(rebuilt, levels, ink=ink, name="rebuilt")),
        ("difference", f"0 to {largest:.1e}" if largest > 0 else "none", shades(difference, ink=ink)),
    )
    return _plot_rows(rows, path, dpi, below=("l2 error", [f"{error:.1e}" for error in errors.tolist()]))


def plot_image_rows(rows: Sequence[ImageRow], path: str | Path, *, levels: int, note: str = "", dpi: int = 200) -> Path:
    """Plot rows of images with a note below, which also says where values were clipped or not finite."""
    if not rows or len({r.images.shape for r in rows}) > 1:
        raise ValueError(
            f"rows must hold images of one shape; got {[tuple(r.images.shape) for r in rows]}. Pass the same images."
        )
    ink = looks_handwritten(rows[0].images, levels)
    tiles = [(r.name, r.remark, _tiles(r.images, levels, ink)) for r in rows]
    return _plot_rows(tiles, path, dpi, note=" ".join([note, *_describe_outside(rows, levels)]))


def _use_ink(images: Tensor, levels: int, ink: bool | None) -> bool:
    return looks_handwritten(images, levels) if ink is None else ink


def _tiles(images: Tensor, levels: int, ink: bool) -> Bytes:
    """Images as bytes, grey where they are not finite."""
    known = images.isfinite() if images.is_floating_point() else torch.ones_like(images, dtype=torch.bool)
    tiles = pixels(torch.where(known, images, 0), levels, ink=ink)
    tiles[~known.permute(0, 2, 3, 1).cpu().numpy()] = GREY
    return tiles


def _describe_outside(rows: Sequence[ImageRow], levels: int) -> list[str]:
    """Say what the plot cannot show."""
    values = [r.images for r in rows if r.images.is_floating_point()]
    # A millionth of a level beyond the end is rounding, not a value that was clipped.
    beyond = any(bool(((v < -1e-6) | (v > levels + 1e-6)).any()) for v in values)
    lost = any(bool(v.isnan().any()) for v in values)
    sentences = {"Values outside of the range of pixels are clipped.": beyond, "Grey: numbers overflowed.": lost}
    return [sentence for sentence, said in sentences.items() if said]


def _plot_rows(
    rows: Sequence[tuple[str, str, Bytes]],
    path: str | Path,
    dpi: int,
    *,
    below: tuple[str, Sequence[str]] = ("", ()),
    note: str = "",
) -> Path:
    """Plot rows of images (name, remark, tiles); `below` has a name and a text for every column, under the last row."""
    columns = len(rows[0][2])
    lines = textwrap.wrap(note, int(LETTERS * (NAMES + columns * (SIDE + GAP))))
    foot = EDGE + LINE * (len(lines) + bool(below[0])) + GAP
    panels = Panels((SIDE,) * len(rows), columns, SIDE, (GAP, GAP), (NAMES, EDGE, EDGE, foot))
    with new_plot(path, panels, dpi=dpi) as canvas:
        for i, (name, remark, tiles) in enumerate(rows):
            remarks = remark.splitlines()
            y = panels.box(i)[1] + SIDE / 2 + LINE / 2 * len(remarks) - 0.04
            canvas.text(EDGE, y, name, HEADING)
            for k, line in enumerate(remarks, start=1):
                canvas.note(EDGE, y - LINE * k, line)
            for j, image in enumerate(tiles):
                canvas.image(panels.box(i, j), image)
        canvas.note(EDGE, foot - GAP - LINE, below[0])
        for j, text in enumerate(below[1]):
            canvas.note(panels.box(0, j)[0] + SIDE / 2, foot - GAP - LINE, text, align="center")
        for k, line in enumerate(lines, start=1):
            canvas.note(EDGE, foot - GAP - LINE * k, line)
    return canvas.path
