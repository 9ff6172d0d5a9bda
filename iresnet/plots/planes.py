"""Densities in the plane, a column for each: the data, and below them what every model has learned (Figure 2)."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from .canvas import blank, draw, text_at
from .toy import DIM, GROUND, INK, Window, show_density, show_points, window_at

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
    if not planes:
        raise ValueError("planes must hold at least one density; got none.")
    names = list(dict.fromkeys(name for plane in planes for name in plane.models))
    return draw(path, dpi, lambda: _compose(planes, names, caption))


def _compose(planes: Sequence[Plane], names: Sequence[str], caption: str) -> Figure:
    rows = len(names) + 1
    width = MARGIN + LABEL + len(planes) * (SIDE + GAP) - GAP + MARGIN
    lines = textwrap.wrap(caption, max(20, int(LETTERS * (width - 2 * MARGIN))))
    height = HEAD + rows * (SIDE + FOOT) + MARGIN / 2 + LINE * len(lines)
    figure = blank(width, height, GROUND)

    def panel(row: int, column: int, text: str, colour: str = DIM) -> Axes:
        """Axes with a line of text under them."""
        x, y = MARGIN + LABEL + column * (SIDE + GAP), height - HEAD - (row + 1) * (SIDE + FOOT) + FOOT
        text_at(figure, x + SIDE / 2, y - 0.16, text, 8, colour, "center")
        return window_at(figure, x, y, SIDE, planes[column].window)

    for i, line in enumerate(lines):
        text_at(figure, MARGIN, MARGIN / 2 + LINE * (len(lines) - 1 - i) + 0.03, line, 8, DIM)
    for row, name in enumerate(("Data", *names)):
        text_at(figure, MARGIN, height - HEAD - row * (SIDE + FOOT) - SIDE / 2 - 0.05, name, 11, INK)
    for j, plane in enumerate(planes):
        middle = MARGIN + LABEL + j * (SIDE + GAP) + SIDE / 2
        text_at(figure, middle, height - HEAD + 0.13, plane.name, 10.5, INK, "center")
        show_points(panel(0, j, f"entropy {plane.floor:.3f} nats"), plane.data, 1.4)
        for row, name in enumerate(names, start=1):
            if name in plane.models:
                density, nats = plane.models[name]
                axes = panel(row, j, f"{nats:.3f} nats", BEST if name == plane.nearest else DIM)
                show_density(axes, density, plane.window, aspect="auto")
    return figure
