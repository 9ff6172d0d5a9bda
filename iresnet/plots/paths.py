"""The dynamics of networks on the line: a path for every start, and where two of them cross (Figure 1).

Depth runs to the right and the state upwards; a path is coloured by its start. Crossings that are close together share
one circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patches import Ellipse, Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from .canvas import DARK, LABEL, NIGHT, TITLE, Canvas, Panels, check_not_empty, new_plot

INK, DIM = DARK.ink, DARK.dim
#: Inches: a panel and its magnified part, between columns and rows, and what is around all.
WIDTH, HEIGHT, ZOOM, GAP, MARGINS = 5.6, 3.7, 1.9, (0.6, 0.72), (0.62, 0.25, 0.62, 0.36)
#: Crossings within one block share a circle if they are nearer than this part of the height; the smallest radius.
NEAR, LEAST = 0.025, 0.018
#: The most circles that are drawn; those with most crossings come first.
CIRCLES = 40
#: The least that a magnified part shows: blocks, and a part of the height.
BLOCKS, PART = 0.3, 0.02
EDGE = 0.7  # points, of the frame around a magnified part


@dataclass(frozen=True)
class Crossing:
    """Where two paths cross: the depth in blocks, the value there, and the indices of the paths."""

    depth: float
    value: float
    pair: tuple[int, int]


@dataclass(frozen=True)
class Dynamics:
    """One network: its paths, (blocks + 1, paths), ordered by their starts, and their crossings, ordered by depth."""

    title: str
    paths: NDArray[np.float64]
    crossings: Sequence[Crossing]


def plot_paths(dynamics: Sequence[Dynamics], path: str | Path, *, dpi: int = 140) -> Path:
    """Plot the paths of networks side by side on one scale, with a magnified part of each below.

    That is where most paths cross or, if none do, where two neighbours are nearest.
    """
    check_not_empty("network", dynamics=dynamics)
    high = 1.06 * max(float(np.abs(d.paths).max()) for d in dynamics)
    panels = Panels((HEIGHT, ZOOM), len(dynamics), WIDTH, GAP, MARGINS)
    with new_plot(path, panels, dpi=dpi, theme=DARK) as canvas:
        for k, d in enumerate(dynamics):
            view, main = _find_view(d, 2 * high), _panel(canvas, 0, k)
            _draw_paths(main, d, high)
            corner = (view.left, view.bottom)
            frame = Rectangle(corner, view.width, view.height, fill=False, edgecolor=DIM, linewidth=EDGE, zorder=4)
            main.add_patch(frame)
            _draw_magnified(_panel(canvas, 1, k), d, view)
            left, bottom, _, height = panels.box(0, k)
            canvas.text(left, bottom + height + 0.3, d.title, TITLE)
            canvas.note(left, panels.box(1)[1] + ZOOM + 0.09, view.text, LABEL)
    return canvas.path


def _panel(canvas: Canvas, row: int, column: int) -> Axes:
    axes = canvas.panel(row, column)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=LABEL, labelcolor=DIM)
    return axes


@dataclass(frozen=True)
class _View:
    """The magnified part of a plot, and two of its paths, which are drawn in white."""

    left: float
    bottom: float
    width: float
    height: float
    pair: tuple[int, int]
    text: str


def _find_view(d: Dynamics, span: float) -> _View:
    """Choose the largest group of crossings, or the smallest gap between neighbours."""
    if d.crossings:
        group = max(group_crossings(d.crossings, span * NEAR), key=len)
        pair, depth, value = group[0].pair, [c.depth for c in group], [c.value for c in group]
        text = f"magnified: {len(group)} crossings in block {int(group[0].depth) + 1}, each marked"
    else:
        gaps = np.diff(d.paths, axis=1)
        t, k = (int(i) for i in np.unravel_index(int(gaps.argmin()), gaps.shape))
        pair, depth, value = (k, k + 1), [float(t)], [float(d.paths[t, k : k + 2].mean())]
        text = f"magnified: the two nearest neighbours, {gaps[t, k]:.2g} apart"
    wide, tall = max(1.25 * np.ptp(depth), BLOCKS), max(1.25 * np.ptp(value), PART * span)
    middle = min((max(depth) + min(depth)) / 2, len(d.paths) - 1 - wide / 2)
    return _View(float(middle - wide / 2), (max(value) + min(value) - tall) / 2, float(wide), float(tall), pair, text)


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def _draw_paths(axes: Axes, d: Dynamics, high: float) -> None:
    blocks = len(d.paths) - 1
    axes.set(xlim=(0, blocks), ylim=(-high, high))
    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel("depth, blocks", size=LABEL, color=DIM)
    for depth, text in ((blocks / 2, "noisy x³"), (blocks, "noisy x")):
        axes.axvline(depth, color=DIM, linewidth=0.6, linestyle=(0, (2, 3)), zorder=0)
        align = "center" if depth < blocks else "right"
        axes.text(depth, high * 1.015, text, size=LABEL, color=DIM, ha=align, va="bottom")
    axes.text(0, high * 1.015, "x in [−2, 2]", size=LABEL, color=DIM, ha="left", va="bottom")
    axes.add_collection(_lines(d, 0.75))
    _draw_circles(axes, d.crossings, blocks, high)
    if d.crossings:
        _name_first_crossing(axes, d, high)


def _name_first_crossing(axes: Axes, d: Dynamics, high: float) -> None:
    """Name the two paths that cross first, with a line to their crossing."""
    c = d.crossings[0]
    a, b = (_signed(v) for v in d.paths[0, list(c.pair)])
    axes.annotate(
        f"first crossing, {c.depth:.2f} blocks deep:\nthe paths from {a} and {b}",
        (c.depth, c.value), (0.02 * (len(d.paths) - 1), -0.93 * high), size=LABEL, color=INK,
        arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 0.7, "shrinkB": 9},
    )  # fmt: skip


def _draw_magnified(axes: Axes, d: Dynamics, view: _View) -> None:
    """Draw the magnified part: every crossing marked, two paths in white."""
    axes.spines[:].set(visible=True, edgecolor=DIM, linewidth=EDGE)
    axes.set(xlim=(view.left, view.left + view.width), ylim=(view.bottom, view.bottom + view.height))
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.add_collection(_lines(d, 1.1))
    depth = np.arange(len(d.paths))
    for k in view.pair:
        axes.plot(depth, d.paths[:, k], color=INK, linewidth=1.3, zorder=3)
    marks = np.array([(c.depth, c.value) for c in d.crossings]).reshape(-1, 2)
    axes.scatter(marks[:, 0], marks[:, 1], s=26, facecolors="none", edgecolors=INK, linewidths=0.6, zorder=4)


def _lines(d: Dynamics, width: float) -> LineCollection:
    depth = np.arange(len(d.paths), dtype=np.float64)
    n = d.paths.shape[1]
    colours = NIGHT(0.3 + 0.65 * np.arange(n) / max(1, n - 1))
    lines = [np.column_stack([depth, d.paths[:, k]]) for k in range(n)]
    return LineCollection(lines, colors=colours, linewidths=width, alpha=0.9, capstyle="round")


def _draw_circles(axes: Axes, crossings: Sequence[Crossing], blocks: int, high: float) -> None:
    groups = sorted(group_crossings(crossings, 2 * high * NEAR), key=len, reverse=True)[:CIRCLES]
    for group in groups:
        depth, value = np.array([c.depth for c in group]), np.array([c.value for c in group])
        wide, tall = (max(float(np.ptp(v)) / 2, 0.0) for v in (depth, value))
        size = (2 * (wide * 1.1 + LEAST * blocks), 2 * (tall * 1.1 + LEAST * 2 * high))
        middle = (float(depth.max() + depth.min()) / 2, float(value.max() + value.min()) / 2)
        axes.add_patch(Ellipse(middle, *size, fill=False, edgecolor=INK, linewidth=0.9, alpha=0.95, zorder=3))


def group_crossings(crossings: Sequence[Crossing], near: float) -> list[list[Crossing]]:
    """Group crossings within one block whose values differ by at most `near`."""
    groups, last = list[list[Crossing]](), (-1, 0.0)
    for c in sorted(crossings, key=lambda c: (int(c.depth), c.value)):
        if not groups or int(c.depth) != last[0] or c.value - last[1] > near:
            groups.append([])
        groups[-1].append(c)
        last = (int(c.depth), c.value)
    return groups
