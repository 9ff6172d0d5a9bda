"""How likely several kinds of images are: a ridge for each, the data's behind all, and how well each is found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray
from torch import Tensor

from ..evaluate import below_chance
from ..evaluate.typicality import BATCH
from .canvas import ACCENT, DIM, INK, RULE, WARM, axes_at, blank, draw, text_at
from .raster import drawn_as_ink, pixels

ROW, TILE, GAP, HEAD, FOOT = 0.36, 0.3, 0.04, 1.0, 0.55  # inches
NAME, RIDGE, COLUMN, MARGIN = 1.12, 3.6, 0.68, 0.2
BINS = 100
FLOOR = 1e-3  # bits per dimension: less is drawn here
HEADINGS = ("bits/dim", "likelihood", "typicality", "that of ten")


@dataclass(frozen=True)
class Ridge:
    """One kind of images: evenly spaced quantiles and the mean of their bits per dimension, which may be missing; areas
    under the ROC curve by likelihood, typicality and that of ten at once, none for the data themselves; a few images.
    """

    name: str
    quantiles: Sequence[float | None]
    mean: float | None
    areas: tuple[float, float, float] | None
    images: Tensor


def ridges_picture(
    data: Ridge, others: Sequence[Ridge], path: str | Path, *, levels: int, images: int, dpi: int = 200
) -> Path:
    """Write the data's ridge and one for each of the others, in their order, as one PNG."""
    if not others:
        raise ValueError("others must hold at least one kind of images; got none.")
    return draw(path, dpi, lambda: _compose(data, others, levels, images))


def _compose(data: Ridge, others: Sequence[Ridge], levels: int, images: int) -> Figure:
    rows, shown = [data, *others], max(len(r.images) for r in (data, *others))
    left = MARGIN + shown * (TILE + GAP) + 0.08 + NAME
    right = left + RIDGE + 0.1
    width, height = right + len(HEADINGS) * COLUMN + 0.1, HEAD + len(rows) * ROW + FOOT
    figure = blank(width, height)
    text_at(figure, MARGIN, height - 0.28, "Images that do not belong: how likely, and how well found", 10.5)
    about = (
        f"{images:,} images of each kind; shaded: the middle 90 % of the data. Areas under the ROC curve: 1 all found, "
        "0.5 chance, coloured: more ordinary than the data"
    )
    text_at(figure, MARGIN, height - 0.47, about, 7, DIM)
    for i, heading in enumerate(HEADINGS):
        text_at(figure, right + (i + 1) * COLUMN, height - HEAD + 0.06, heading, 7, DIM, "right")
    text_at(figure, right + 2.75 * COLUMN, height - HEAD + 0.21, "found by", 7, DIM, "center")
    axes = _axes(figure, left, len(rows))
    edges = _edges(rows)
    axes.set_xlim(edges[0], edges[-1])
    narrow = edges[-1] < 15 * edges[0]
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 7, 8) if narrow else (1, 2, 5), numticks=20))
    _band(axes, data)
    ink = drawn_as_ink(data.images, levels)
    for i, row in enumerate(rows):
        base = len(rows) - 1 - i
        _ridge(axes, row, edges, base, _colour(row, images))
        bottom = FOOT + base * ROW
        _tiles(figure, row.images, levels, ink, bottom)
        text_at(figure, left - NAME, bottom + 0.12, row.name, 8.5, ACCENT if row is data else INK)
        _numbers(figure, row, images, right, bottom + 0.12)
    return figure


def _axes(figure: Figure, left: float, rows: int) -> Axes:
    axes = axes_at(figure, left, FOOT, RIDGE, rows * ROW)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.set_xscale("log")
    axes.set_ylim(0, rows)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(length=2.5, labelsize=8, color=RULE, labelcolor=DIM)
    axes.tick_params(which="minor", length=0)
    axes.set_xlabel("bits per dimension; to the left: more likely", size=8.5, color=DIM)
    return axes


def _finite(row: Ridge) -> list[float]:
    return [max(q, FLOOR) for q in row.quantiles if q is not None and math.isfinite(q)]


def _edges(rows: Sequence[Ridge]) -> NDArray[np.float64]:
    known = [q for row in rows for q in _finite(row)] or [1.0]
    return np.geomspace(min(known) / 1.15, max(known) * 1.15, BINS + 1)


def _band(axes: Axes, data: Ridge) -> None:
    if known := _finite(data):
        axes.axvspan(*np.quantile(known, (0.05, 0.95)), color=ACCENT, alpha=0.1, linewidth=0)


def _ridge(axes: Axes, row: Ridge, edges: NDArray[np.float64], base: int, colour: str) -> None:
    axes.axhline(base, color=RULE, linewidth=0.5)
    if not (known := _finite(row)):
        return
    share = np.diff(np.interp(np.log(edges), np.log(known), np.linspace(0, 1, len(known)), left=0, right=1))
    axes.stairs(base + 0.86 * share / share.max(), edges, baseline=base, fill=True, color=colour, alpha=0.75, zorder=2)


def _colour(row: Ridge, images: int) -> str:
    """Warm for kinds that are more likely than the data, whose colour is their own."""
    return ACCENT if row.areas is None else WARM if below_chance(row.areas[0], images) else DIM


def _tiles(figure: Figure, images: Tensor, levels: int, ink: bool, bottom: float) -> None:
    for i, tile in enumerate(pixels(images, levels, ink=ink)):
        axes = axes_at(figure, MARGIN + i * (TILE + GAP), bottom + (ROW - TILE) / 2, TILE, TILE)
        grey = tile.shape[-1] == 1
        axes.imshow(tile[..., 0] if grey else tile, cmap="gray" if grey else None, vmin=0, vmax=255)


def _numbers(figure: Figure, row: Ridge, images: int, right: float, bottom: float) -> None:
    mean = "-" if row.mean is None else f"{row.mean:.2f}"
    text_at(figure, right + COLUMN, bottom, mean, 8.5, DIM, "right")
    for i, (area, rows) in enumerate(zip(row.areas or (), (images, images, images // BATCH), strict=False)):
        colour = WARM if below_chance(area, rows) else INK
        text_at(figure, right + (i + 2) * COLUMN, bottom, f"{area:.2f}", 8.5, colour, "right")
