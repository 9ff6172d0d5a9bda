"""Points and columns: samples beside the data they are to look like.

Two columns are drawn as points in the plane. More are drawn as a square of small pictures, one for each pair of
columns: the data below the diagonal, samples above it, and both, as histograms, on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from .canvas import ACCENT, DIM, INK, RULE, axes_at, blank, draw, text_at

Array: TypeAlias = NDArray[np.float64]

#: Columns drawn at the most; points drawn at the most; bars of a histogram.
COLUMNS, POINTS, BINS = 6, 2000, 24


def points_picture(data: Tensor, samples: Tensor, path: str | Path, *, dpi: int = 200) -> Path:
    """Write points of the plane, data on the left and samples on the right in the same window, as one PNG."""
    x, y = matching(data, samples)
    if x.shape[1] != 2:
        raise ValueError(f"data must have 2 columns; got {x.shape[1]}. Draw more of them with columns_picture.")
    (left, right), (bottom, top) = square_window(x)

    def compose() -> Figure:
        figure, side = blank(8.3, 4.4), 3.6
        for i, (name, points, colour) in enumerate((("Data", x, INK), ("Samples", y, ACCENT))):
            axes = axes_at(figure, 0.45 + 4.0 * i, 0.35, side, side)
            for direction in (axes.xaxis, axes.yaxis):
                direction.set_major_locator(MaxNLocator(4))
            axes.tick_params(length=2, labelsize=7, color=RULE, labelcolor=DIM)
            axes.set(xlim=(left, right), ylim=(bottom, top))
            axes.scatter(points[:POINTS, 0], points[:POINTS, 1], s=2, color=colour, alpha=0.6, linewidths=0)
            text_at(figure, 0.45 + 4.0 * i, 4.06, name, 11)
        return figure

    return draw(path, dpi, compose)


def columns_picture(data: Tensor, samples: Tensor, columns: Sequence[str], path: str | Path, *, dpi: int = 200) -> Path:
    """Write every pair of the first six columns as one PNG: data below the diagonal, samples above it."""
    x, y = matching(data, samples)
    if len(columns) != x.shape[1]:
        raise ValueError(f"columns must name every column of data, {x.shape[1]}; got {len(columns)} names.")
    return draw(path, dpi, lambda: _square_of_pairs(x, y, list(columns)))


def matching(data: Tensor, samples: Tensor) -> tuple[Array, Array]:
    """Two tables as float64 arrays, if both are tables with rows, the same columns, and finite numbers."""
    if data.dim() != 2 or samples.dim() != 2 or data.shape[1] != samples.shape[1] or 0 in (*data.shape, len(samples)):
        raise ValueError(
            f"data and samples must have shapes (N, D) and (M, D), N and M at least 1; got {tuple(data.shape)} and "
            f"{tuple(samples.shape)}. Pass rows with the same columns."
        )
    for name, rows in (("data", data), ("samples", samples)):
        if not bool(rows.isfinite().all()):
            raise ValueError(f"{name} must be finite; got NaN or infinity. Leave such rows out.")
    x, y = (np.asarray(t.detach().cpu().double().numpy()) for t in (data, samples))
    return x, y


def window(column: Array) -> tuple[float, float]:
    """All but the outermost values of a column, one in a thousand on each side, with some air."""
    low, high = (float(v) for v in np.quantile(column, (0.001, 0.999)))
    air = 0.06 * (high - low) or max(abs(low), 1.0) / 2
    return low - air, high + air


def square_window(points: Array) -> tuple[tuple[float, float], tuple[float, float]]:
    """One scale for both axes: a square around all but the outermost points."""
    (left, right), (bottom, top) = window(points[:, 0]), window(points[:, 1])
    half, x, y = max(right - left, top - bottom) / 2, (left + right) / 2, (bottom + top) / 2
    return (x - half, x + half), (y - half, y + half)


def histogram(column: Array, low: float, high: float) -> Array:
    """The share of the rows in each of `BINS` bars between low and high; rows outside count in no bar."""
    return np.asarray(np.histogram(column, BINS, (low, high))[0] / len(column), dtype=np.float64)


def _square_of_pairs(x: Array, y: Array, names: list[str]) -> Figure:
    d = min(x.shape[1], COLUMNS)
    side, gap, margin, head = 1.3, 0.06, 0.2, 0.5
    full = 2 * margin + d * (side + gap)
    figure = blank(full, full + head)
    windows = [window(x[:, j]) for j in range(d)]
    for i in range(d):
        for j in range(d):
            axes = axes_at(figure, margin + j * (side + gap), full - margin - (i + 1) * (side + gap), side, side)
            axes.set_xlim(windows[j])
            if i == j:
                edges = np.linspace(*windows[j], BINS + 1)
                for rows, colour in ((x, INK), (y, ACCENT)):
                    axes.stairs(histogram(rows[:, j], *windows[j]), edges, color=colour, linewidth=1)
                axes.set_ylim(0, 1.35 * axes.get_ylim()[1])
                axes.text(0.05, 0.87, _short(names[j]), size=7, transform=axes.transAxes, parse_math=False)
            else:
                rows, colour = (x, INK) if i > j else (y, ACCENT)
                axes.scatter(rows[: POINTS // 2, j], rows[: POINTS // 2, i], s=1, color=colour, alpha=0.5, linewidths=0)
                axes.set_ylim(windows[i])
    text_at(figure, margin, full + 0.14, "Data below the diagonal", 9)
    text_at(figure, margin + 2.1, full + 0.14, "samples above it", 9, ACCENT)
    if len(names) > d:
        text_at(figure, full - margin, full + 0.14, f"first {d} of {len(names)} columns", 8, DIM, "right")
    return figure


def _short(name: str) -> str:
    return name if len(name) <= 16 else name[:15] + "…"
