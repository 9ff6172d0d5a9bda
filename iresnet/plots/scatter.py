"""Samples of tabular data beside the data themselves.

Two columns are drawn as points in the plane. More are drawn as a matrix of panels, one for each pair of columns: the
data below the diagonal, samples above it, and histograms of both on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TypeAlias

import numpy as np
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from .canvas import ACCENT, DIM, HEADING, INK, LABEL, MARGIN, NOTE, RULE, TITLE, Panels, new_plot

Array: TypeAlias = NDArray[np.float64]

#: The most columns and points that are drawn, and the bars of a histogram.
COLUMNS, POINTS, BINS = 6, 2000, 24


def plot_points(data: Tensor, samples: Tensor, path: str | Path, *, dpi: int = 200) -> Path:
    """Plot points in the plane: data on the left and samples on the right, in the same window."""
    x, y = as_arrays(data, samples)
    if x.shape[1] != 2:
        raise ValueError(f"data must have 2 columns; got {x.shape[1]}. Draw more of them with plot_columns.")
    xlim, ylim = square_window(x)
    panels = Panels((3.6,), 2, 3.6, (0.4, 0.0), (0.45, 0.25, 0.45, 0.35))
    with new_plot(path, panels, dpi=dpi) as canvas:
        for i, (name, points, colour) in enumerate((("Data", x, INK), ("Samples", y, ACCENT))):
            axes = canvas.panel(0, i)
            for direction in (axes.xaxis, axes.yaxis):
                direction.set_major_locator(MaxNLocator(4))
            axes.tick_params(length=2, labelsize=NOTE, color=RULE, labelcolor=DIM)
            axes.set(xlim=xlim, ylim=ylim)
            axes.scatter(points[:POINTS, 0], points[:POINTS, 1], s=2, color=colour, alpha=0.6, linewidths=0)
            canvas.text(panels.box(0, i)[0], canvas.height - 0.34, name, TITLE)
    return canvas.path


def plot_columns(data: Tensor, samples: Tensor, columns: Sequence[str], path: str | Path, *, dpi: int = 200) -> Path:
    """Plot every pair of the first six columns: data below the diagonal, samples above it."""
    x, y = as_arrays(data, samples)
    if len(columns) != x.shape[1]:
        raise ValueError(f"columns must name every column of data, {x.shape[1]}; got {len(columns)} names.")
    d = min(x.shape[1], COLUMNS)
    windows = [window(x[:, j]) for j in range(d)]
    panels = Panels((1.3,) * d, d, 1.3, (0.06, 0.06), (MARGIN, MARGIN, MARGIN + 0.5, MARGIN))
    with new_plot(path, panels, dpi=dpi) as canvas:
        for i, j in product(range(d), repeat=2):
            axes = canvas.panel(i, j)
            axes.set_xlim(windows[j])
            if i == j:
                edges = np.linspace(*windows[j], BINS + 1)
                for rows, colour in ((x, INK), (y, ACCENT)):
                    axes.stairs(histogram(rows[:, j], *windows[j]), edges, color=colour, linewidth=1)
                axes.set_ylim(0, 1.35 * axes.get_ylim()[1])
                axes.text(0.05, 0.87, _shorten(columns[j]), size=NOTE, transform=axes.transAxes, parse_math=False)
            else:
                rows, colour = (x, INK) if i > j else (y, ACCENT)
                axes.scatter(rows[: POINTS // 2, j], rows[: POINTS // 2, i], s=1, color=colour, alpha=0.5, linewidths=0)
                axes.set_ylim(windows[i])
        top = canvas.height - 0.36
        canvas.text(MARGIN, top, "Data below the diagonal", HEADING)
        canvas.text(MARGIN + 2.1, top, "samples above it", HEADING, ACCENT)
        if len(columns) > d:
            canvas.note(canvas.width - MARGIN, top, f"first {d} of {len(columns)} columns", LABEL, "right")
    return canvas.path


def as_arrays(data: Tensor, samples: Tensor) -> tuple[Array, Array]:
    """Convert two tables to float64 arrays; both must have rows, the same columns, and finite values."""
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
    """Return a range that holds all but one in a thousand values on each side of a column, with a margin."""
    low, high = (float(v) for v in np.quantile(column, (0.001, 0.999)))
    margin = 0.06 * (high - low) or max(abs(low), 1.0) / 2
    return low - margin, high + margin


def square_window(points: Array) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return equally long ranges of both axes around all but the outermost points."""
    (left, right), (bottom, top) = window(points[:, 0]), window(points[:, 1])
    half, x, y = max(right - left, top - bottom) / 2, (left + right) / 2, (bottom + top) / 2
    return (x - half, x + half), (y - half, y + half)


def histogram(column: Array, low: float, high: float) -> Array:
    """Return the share of the rows in each of `BINS` bars from low to high; rows outside count in no bar."""
    return np.asarray(np.histogram(column, BINS, (low, high))[0] / len(column), dtype=np.float64)


def _shorten(name: str) -> str:
    return name if len(name) <= 16 else name[:15] + "…"
