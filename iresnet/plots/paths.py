"""The dynamics of networks on the line: a path for every start, and the places where two of them cross (Figure 1).

Depth runs to the right, the state upwards, and a path is coloured by where it starts. Crossings that lie close together
are circled once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from .canvas import axes_at, blank, draw, text_at
from .toy import COLOURS, DIM, GROUND, INK

#: Inches: a panel, what is magnified of it, the gap between two, and what is around them.
WIDTH, HEIGHT, ZOOM, GAP, LEFT, FOOT, BETWEEN, HEAD = 5.6, 3.7, 1.9, 0.6, 0.62, 0.36, 0.72, 0.62
#: Crossings within one block are circled together if they are nearer than this part of the height; the least radius.
NEAR, LEAST = 0.025, 0.018
#: So many circles are drawn at the most, those with most crossings.
CIRCLES = 40
#: What a magnified part shows at the least: blocks, and a part of the height.
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
    """One network: its paths, (blocks + 1, paths), ordered by where they start, and their crossings by depth."""

    title: str
    paths: NDArray[np.float64]
    crossings: Sequence[Crossing]


def paths_picture(dynamics: Sequence[Dynamics], path: str | Path, *, dpi: int = 140) -> Path:
    """Write the paths of networks as one PNG, side by side on one scale, and below each what is to be seen closely:
    where most of its paths cross or, if none do, where two neighbours come nearest."""
    if not dynamics:
        raise ValueError("dynamics must hold at least one network; got none.")
    width = LEFT + len(dynamics) * (WIDTH + GAP) - GAP + 0.25
    height = FOOT + ZOOM + BETWEEN + HEIGHT + HEAD
    high = 1.06 * max(float(np.abs(d.paths).max()) for d in dynamics)

    def compose() -> Figure:
        figure = blank(width, height, GROUND)

        def panel(left: float, bottom: float, tall: float) -> Axes:
            axes = axes_at(figure, left, bottom, WIDTH, tall, ground=GROUND)
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0, labelsize=8, labelcolor=DIM)
            return axes

        for k, d in enumerate(dynamics):
            left, bottom = LEFT + k * (WIDTH + GAP), FOOT + ZOOM + BETWEEN
            view = _view(d, 2 * high)
            main = panel(left, bottom, HEIGHT)
            _panel(main, d, high)
            frame = Rectangle((view.left, view.bottom), view.width, view.height, fill=False, edgecolor=DIM, zorder=4)
            frame.set_linewidth(EDGE)
            main.add_patch(frame)
            _close(panel(left, FOOT, ZOOM), d, view)
            text_at(figure, left, bottom + HEIGHT + 0.3, d.title, 11, INK)
            text_at(figure, left, FOOT + ZOOM + 0.09, view.text, 8, DIM)
        return figure

    return draw(path, dpi, compose)


@dataclass(frozen=True)
class _View:
    """A part of the picture that is magnified, and two of its paths that are drawn in white."""

    left: float
    bottom: float
    width: float
    height: float
    pair: tuple[int, int]
    text: str


def _view(d: Dynamics, span: float) -> _View:
    """Around the largest group of crossings, or around the narrowest place between neighbours."""
    if d.crossings:
        group = max(grouped(d.crossings, span * NEAR), key=len)
        pair, depth, value = group[0].pair, [c.depth for c in group], [c.value for c in group]
        text = f"magnified: {len(group)} crossings in block {int(group[0].depth) + 1}, each marked"
    else:
        gaps = np.diff(d.paths, axis=1)
        t, k = (int(i) for i in np.unravel_index(int(gaps.argmin()), gaps.shape))
        pair, depth, value = (k, k + 1), [float(t)], [float(d.paths[t, k : k + 2].mean())]
        text = f"magnified: where two neighbours come nearest, {gaps[t, k]:.2g} apart"
    wide, tall = max(1.25 * np.ptp(depth), BLOCKS), max(1.25 * np.ptp(value), PART * span)
    middle = min((max(depth) + min(depth)) / 2, len(d.paths) - 1 - wide / 2)
    return _View(float(middle - wide / 2), (max(value) + min(value) - tall) / 2, float(wide), float(tall), pair, text)


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def _panel(axes: Axes, d: Dynamics, high: float) -> None:
    blocks = len(d.paths) - 1
    axes.set(xlim=(0, blocks), ylim=(-high, high))
    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel("depth, blocks", size=8.5, color=DIM)
    for depth, text in ((blocks / 2, "noisy x³"), (blocks, "noisy x")):
        axes.axvline(depth, color=DIM, linewidth=0.6, linestyle=(0, (2, 3)), zorder=0)
        align = "center" if depth < blocks else "right"
        axes.text(depth, high * 1.015, text, size=8, color=DIM, ha=align, va="bottom")
    axes.text(0, high * 1.015, "x in [−2, 2]", size=8, color=DIM, ha="left", va="bottom")
    axes.add_collection(_lines(d, 0.75))
    _circles(axes, d.crossings, blocks, high)
    if d.crossings:
        _first(axes, d, high)


def _first(axes: Axes, d: Dynamics, high: float) -> None:
    """Name the two paths that cross first, with a line to the place."""
    c = d.crossings[0]
    a, b = (_signed(v) for v in d.paths[0, list(c.pair)])
    axes.annotate(
        f"first crossing, {c.depth:.2f} blocks deep:\nthe paths from {a} and {b}",
        (c.depth, c.value), (0.02 * (len(d.paths) - 1), -0.93 * high), size=8, color=INK,
        arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 0.7, "shrinkB": 9},
    )  # fmt: skip


def _close(axes: Axes, d: Dynamics, view: _View) -> None:
    """A part of the paths, magnified, every crossing marked, two paths in white."""
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
    colours = COLOURS(0.3 + 0.65 * np.arange(n) / max(1, n - 1))
    lines = [np.column_stack([depth, d.paths[:, k]]) for k in range(n)]
    return LineCollection(lines, colors=colours, linewidths=width, alpha=0.9, capstyle="round")


def _circles(axes: Axes, crossings: Sequence[Crossing], blocks: int, high: float) -> None:
    groups = sorted(grouped(crossings, 2 * high * NEAR), key=len, reverse=True)[:CIRCLES]
    for group in groups:
        depth, value = np.array([c.depth for c in group]), np.array([c.value for c in group])
        wide, tall = (max(float(np.ptp(v)) / 2, 0.0) for v in (depth, value))
        size = (2 * (wide * 1.1 + LEAST * blocks), 2 * (tall * 1.1 + LEAST * 2 * high))
        middle = (float(depth.max() + depth.min()) / 2, float(value.max() + value.min()) / 2)
        axes.add_patch(Ellipse(middle, *size, fill=False, edgecolor=INK, linewidth=0.9, alpha=0.95, zorder=3))


def grouped(crossings: Sequence[Crossing], near: float) -> list[list[Crossing]]:
    """Crossings within one block whose values lie near to each other, together."""
    groups, last = list[list[Crossing]](), (-1, 0.0)
    for c in sorted(crossings, key=lambda c: (int(c.depth), c.value)):
        if not groups or int(c.depth) != last[0] or c.value - last[1] > near:
            groups.append([])
        groups[-1].append(c)
        last = (int(c.depth), c.value)
    return groups
