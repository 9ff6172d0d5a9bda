"""Densities in the plane, a column for each: the data, and below them what every model has learned (Figure 2)."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from .canvas import canvas, png_path, save
from .toy import COLOURS, DIM, GROUND, INK, POINTS

Window: TypeAlias = tuple[float, ...]  # left, right, bottom, top

#: Inches: the side of a panel, the gap between columns, the row labels, the head, the line under a panel, the margin.
SIDE, GAP, LABEL, HEAD, FOOT, MARGIN = 2.1, 0.12, 0.95, 0.44, 0.3, 0.2
#: The height of a line of the caption, in inches, and the letters of it in one inch.
LINE, LETTERS = 0.18, 14
BEST = "#f7c873"


@dataclass(frozen=True)
class Plane:
    """One density: points (n, 2), the window they are seen in, its entropy, and for every model its density on pixels,
    from the bottom row up, and the nats of held-out points. `nearest` is the model that comes nearest to the entropy,
    whose nats are highlighted; None where there is no telling."""

    name: str
    data: NDArray[Any]
    window: Window
    floor: float
    models: Mapping[str, tuple[NDArray[Any], float]]
    nearest: str | None = None


def planes_picture(planes: Sequence[Plane], path: str | Path, *, caption: str = "", dpi: int = 200) -> Path:
    """Write the densities as one PNG: a column for each, data at the top, a row for every model, nats under each."""
    path = png_path(path)
    if not planes:
        raise ValueError("planes must hold at least one density; got none.")
    names = list(dict.fromkeys(name for plane in planes for name in plane.models))
    with canvas():
        save(_compose(planes, names, caption), path, dpi)
    return path


def square(data: Tensor) -> Window:
    """A square around all but the outermost points, with some air."""
    low, high = data.double().quantile(0.001, dim=0), data.double().quantile(0.999, dim=0)
    half = 0.58 * float((high - low).max()) or 1.0
    x, y = ((low + high) / 2).tolist()
    return x - half, x + half, y - half, y + half


def plane_points(window: Window, n: int) -> Tensor:
    """The middles of n x n pixels, (n * n, 2), row by row from the bottom."""
    left, right, bottom, top = window
    u = (torch.arange(n) + 0.5) / n
    y, x = torch.meshgrid(bottom + (top - bottom) * u, left + (right - left) * u, indexing="ij")
    return torch.stack([x, y], dim=-1).reshape(-1, 2)


def _compose(planes: Sequence[Plane], names: Sequence[str], caption: str) -> Figure:
    rows = len(names) + 1
    width = MARGIN + LABEL + len(planes) * (SIDE + GAP) - GAP + MARGIN
    lines = textwrap.wrap(caption, max(20, int(LETTERS * (width - 2 * MARGIN))))
    height = HEAD + rows * (SIDE + FOOT) + MARGIN / 2 + LINE * len(lines)
    figure = Figure(figsize=(width, height), facecolor=GROUND)

    def write(x: float, y: float, text: str, size: float, colour: str, align: str = "left") -> None:
        figure.text(x / width, y / height, text, size=size, color=colour, ha=align, va="baseline", parse_math=False)

    def panel(row: int, column: int) -> Axes:
        x, y = MARGIN + LABEL + column * (SIDE + GAP), height - HEAD - (row + 1) * (SIDE + FOOT) + FOOT
        axes = figure.add_axes((x / width, y / height, SIDE / width, SIDE / height), facecolor=GROUND)
        axes.set(xticks=[], yticks=[], xlim=planes[column].window[:2], ylim=planes[column].window[2:])
        axes.spines[:].set(color=DIM, linewidth=0.4, alpha=0.5)
        return axes

    def under(row: int, column: int, text: str, colour: str = DIM) -> None:
        x, y = MARGIN + LABEL + column * (SIDE + GAP), height - HEAD - (row + 1) * (SIDE + FOOT) + FOOT
        write(x + SIDE / 2, y - 0.16, text, 8, colour, "center")

    for i, line in enumerate(lines):
        write(MARGIN, MARGIN / 2 + LINE * (len(lines) - 1 - i) + 0.03, line, 8, DIM)
    for row, name in enumerate(("Data", *names)):
        write(MARGIN, height - HEAD - row * (SIDE + FOOT) - SIDE / 2 - 0.05, name, 11, INK)
    for j, plane in enumerate(planes):
        write(MARGIN + LABEL + j * (SIDE + GAP) + SIDE / 2, height - HEAD + 0.13, plane.name, 10.5, INK, "center")
        _points(panel(0, j), plane.data)
        under(0, j, f"entropy {plane.floor:.3f} nats")
        for row, name in enumerate(names, start=1):
            if name in plane.models:
                density, nats = plane.models[name]
                _density(panel(row, j), density, plane)
                under(row, j, f"{nats:.3f} nats", BEST if name == plane.nearest else DIM)
    return figure


def _points(axes: Axes, x: NDArray[Any]) -> None:
    axes.scatter(x[:, 0], x[:, 1], s=1.4, color=POINTS, alpha=0.6, linewidths=0)


def _density(axes: Axes, density: NDArray[Any], plane: Plane) -> None:
    # A sharp peak must not darken the rest: the brightest pixels, one in two hundred, share one colour.
    top = max(float(np.quantile(density, 0.995)), 1e-30)
    left, right, bottom, top_edge = plane.window
    axes.imshow(
        density, COLOURS, vmin=0, vmax=top, extent=(left, right, bottom, top_edge), origin="lower",
        interpolation="bilinear", aspect="auto",
    )  # fmt: skip
