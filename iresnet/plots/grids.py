"""Images in rows: samples in a grid, reconstructions beside their originals, codes interpolated.

Pixels are integers in 0 .. levels - 1 or real numbers in [0, levels]; samples may lie outside and are clipped. Images
that are mostly empty, like handwriting, are drawn as ink on paper unless `ink` says otherwise.
"""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.figure import Figure
from torch import Tensor

from ..atomic import write
from ..spelling import at_least
from .canvas import DIM, axes_at, blank, draw, png_path, text_at
from .raster import Bytes, differences, drawn_as_ink, pixels, png, shades, tiled

WIDTH = 960  # pixels, about, of a grid
MOST = 12  # reconstructions in one picture
SIDE, GAP, LABEL, HEAD, FOOT = 0.8, 0.06, 1.1, 0.12, 0.3  # inches, of the picture of reconstructions


def image_grid(
    images: Tensor, path: str | Path, *, columns: int | None = None, levels: int = 256, ink: bool | None = None
) -> Path:
    """Write images (N, C, H, W) as one PNG: a tidy grid, each enlarged by the same integer factor.

    Without `columns` the grid is about as high as it is wide.
    """
    path, tiles = png_path(path), pixels(images, levels, ink=_ink(images, levels, ink))
    columns = math.ceil(math.sqrt(len(tiles))) if columns is None else columns
    at_least(1, columns=columns)
    columns = min(columns, len(tiles))
    factor = max(1, WIDTH // (columns * tiles.shape[2]))
    gap = max(1, factor * tiles.shape[2] // 20)
    return write(path, png(tiled(tiles, columns, factor, gap)))


def interpolation_picture(images: Tensor, path: str | Path, *, levels: int = 256, ink: bool | None = None) -> Path:
    """Write decoded lines between codes, (pairs, steps, C, H, W), as one PNG: a row for each pair."""
    if images.dim() != 5:
        raise ValueError(
            f"images must have shape (pairs, steps, C, H, W); got {tuple(images.shape)}. Stack the steps of each pair."
        )
    return image_grid(images.flatten(0, 1), path, columns=images.shape[1], levels=levels, ink=ink)


def reconstruction_picture(
    originals: Tensor,
    rebuilt: Tensor,
    errors: Tensor,
    path: str | Path,
    *,
    levels: int = 256,
    ink: bool | None = None,
    dpi: int = 200,
) -> Path:
    """Write originals, what was rebuilt from their codes, and the differences, magnified, as three rows of one PNG.

    `errors` holds the l2 distance of each pair, which is written under it. The first twelve are drawn.
    """
    if errors.shape != originals.shape[:1]:
        raise ValueError(f"errors must hold one number an image, {len(originals)}; got shape {tuple(errors.shape)}.")
    originals, rebuilt, errors = originals[:MOST], rebuilt[:MOST], errors[:MOST]
    difference, largest = differences(originals, rebuilt)
    ink = _ink(originals, levels, ink)
    rows = {
        "original": pixels(originals, levels, ink=ink, name="originals"),
        "rebuilt": pixels(rebuilt, levels, ink=ink, name="rebuilt"),
        _scale(largest): shades(difference, ink=ink),
    }
    return draw(path, dpi, lambda: _compose(rows, errors.tolist()))


def _ink(images: Tensor, levels: int, wish: bool | None) -> bool:
    return drawn_as_ink(images, levels) if wish is None else wish


def _scale(largest: float) -> str:
    return f"difference,\n0 to {largest:.1e}" if largest > 0 else "difference:\nnone"


def _compose(rows: dict[str, Bytes], errors: list[float]) -> Figure:
    width = LABEL + len(errors) * (SIDE + GAP) + HEAD
    height = FOOT + 3 * (SIDE + GAP) + HEAD
    figure = blank(width, height)
    for i, (label, tiles) in enumerate(rows.items()):
        bottom = height - HEAD - (i + 1) * SIDE - i * GAP
        text_at(figure, HEAD, bottom + SIDE / 2, label, 8)
        for j, tile in enumerate(tiles):
            axes = axes_at(figure, LABEL + j * (SIDE + GAP), bottom, SIDE, SIDE)
            axes.imshow(tile, cmap="gray", vmin=0, vmax=255, interpolation="nearest", aspect="auto")
    text_at(figure, HEAD, 0.12, "error, l2", 8, DIM)
    for j, error in enumerate(errors):
        text_at(figure, LABEL + j * (SIDE + GAP) + SIDE / 2, 0.12, f"{error:.1e}", 7, DIM, "center")
    return figure
