"""Likelihoods of several kinds of images as a ridgeline plot, with how well each kind is detected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray
from torch import Tensor

from ..evaluate import below_chance
from ..evaluate.typicality import BATCH
from .canvas import ACCENT, DIM, INK, LABEL, MARGIN, RULE, WARM, Canvas, Panels, check_not_empty, new_plot
from .raster import looks_handwritten, pixels

#: Inches: a row, an image in it, between images, above and below all rows; the names, the ridges, a column of numbers.
ROW, TILE, GAP, HEAD, FOOT = 0.36, 0.3, 0.04, 1.0, 0.55
NAMES, WIDTH, COLUMN = 1.2, 3.6, 0.76
BINS = 100
FLOOR = 1e-3  # bits per dimension; smaller values are drawn here
HEADINGS = ("bits/dim", "likelihood", "typicality", f"batches of {BATCH}")


@dataclass(frozen=True)
class Ridge:
    """One kind of images: evenly spaced quantiles and the mean of their bits per dimension, None where not finite.

    `areas` are the areas under the ROC curve by likelihood, by typicality and by typicality of batches; None for the
    data themselves. A few `images` are drawn.
    """

    name: str
    quantiles: Sequence[float | None]
    mean: float | None
    areas: tuple[float, float, float] | None
    images: Tensor


def plot_ridges(
    data: Ridge, others: Sequence[Ridge], path: str | Path, *, levels: int, images: int, dpi: int = 200
) -> Path:
    """Plot the ridge of the data and below it one for each of the others, in their order."""
    check_not_empty("kind of images", others=others)
    rows, shown = [data, *others], max(len(r.images) for r in (data, *others))
    left = MARGIN + shown * (TILE + GAP) + NAMES
    panels = Panels((len(rows) * ROW,), 1, WIDTH, margins=(left, len(HEADINGS) * COLUMN + 0.2, HEAD, FOOT))
    about = (
        f"{images:,} images of each kind; shaded: the middle 90 % of the data. Area under the ROC curve (AUROC): "
        "1 perfect, 0.5 chance; coloured: more likely or more typical than the data"
    )
    with new_plot(path, panels, dpi=dpi) as canvas:
        canvas.title("Out-of-distribution images: likelihood and detection", about)
        _draw_headings(canvas, left + WIDTH + 0.1)
        edges = _edges(rows)
        axes = _ridge_axes(canvas, len(rows), edges)
        if known := _finite(data):
            axes.axvspan(*np.quantile(known, (0.05, 0.95)), color=ACCENT, alpha=0.1, linewidth=0)
        ink = looks_handwritten(data.images, levels)
        for i, row in enumerate(rows):
            base = len(rows) - 1 - i
            bottom = FOOT + base * ROW
            _draw_ridge(axes, row, edges, base, _colour(row, images))
            for j, tile in enumerate(pixels(row.images, levels, ink=ink)):
                canvas.image((MARGIN + j * (TILE + GAP), bottom + (ROW - TILE) / 2, TILE, TILE), tile)
            canvas.text(left - NAMES + 0.08, bottom + 0.12, row.name, LABEL, ACCENT if row is data else INK)
            _draw_numbers(canvas, row, images, left + WIDTH + 0.1, bottom + 0.12)
    return canvas.path


def _draw_headings(canvas: Canvas, right: float) -> None:
    y = canvas.height - HEAD + 0.06
    for i, heading in enumerate(HEADINGS):
        canvas.note(right + (i + 1) * COLUMN, y, heading, align="right")
    canvas.note(right + 2.75 * COLUMN, y + 0.15, "AUROC by", align="center")


def _ridge_axes(canvas: Canvas, rows: int, edges: NDArray[np.float64]) -> Axes:
    axes = canvas.panel()
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.set_xscale("log")
    axes.set(xlim=(edges[0], edges[-1]), ylim=(0, rows))
    narrow = edges[-1] < 15 * edges[0]
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 7, 8) if narrow else (1, 2, 5), numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(length=2.5, labelsize=LABEL, color=RULE, labelcolor=DIM)
    axes.tick_params(which="minor", length=0)
    axes.set_xlabel("bits per dimension; further left: more likely", size=LABEL, color=DIM)
    return axes


def _finite(row: Ridge) -> list[float]:
    return [max(q, FLOOR) for q in row.quantiles if q is not None and math.isfinite(q)]


def _edges(rows: Sequence[Ridge]) -> NDArray[np.float64]:
    known = [q for row in rows for q in _finite(row)] or [1.0]
    return np.geomspace(min(known) / 1.15, max(known) * 1.15, BINS + 1)


def _draw_ridge(axes: Axes, row: Ridge, edges: NDArray[np.float64], base: int, colour: str) -> None:
    axes.axhline(base, color=RULE, linewidth=0.5)
    if not (known := _finite(row)):
        return
    share = np.diff(np.interp(np.log(edges), np.log(known), np.linspace(0, 1, len(known)), left=0, right=1))
    axes.stairs(base + 0.86 * share / share.max(), edges, baseline=base, fill=True, color=colour, alpha=0.75, zorder=2)


def _colour(row: Ridge, images: int) -> str:
    """Choose the colour of a ridge: the data have their own, kinds more likely than the data another."""
    return ACCENT if row.areas is None else WARM if below_chance(row.areas[0], images) else DIM


def _draw_numbers(canvas: Canvas, row: Ridge, images: int, right: float, y: float) -> None:
    mean = "-" if row.mean is None else f"{row.mean:.2f}"
    canvas.note(right + COLUMN, y, mean, LABEL, "right")
    for i, (area, count) in enumerate(zip(row.areas or (), (images, images, images // BATCH), strict=False)):
        colour = WARM if below_chance(area, count) else INK
        canvas.text(right + (i + 2) * COLUMN, y, f"{area:.2f}", LABEL, colour, "right")
