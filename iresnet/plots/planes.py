"""Densities in the plane, a column for each: the data, and below them what every model has learned (Figure 2)."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from .canvas import DARK, LABEL, LINE, MARGIN, TITLE, Panels, check_not_empty, new_plot
from .toy import Window, draw_density, draw_points, plane_axes

#: Inches: the side of a panel, between columns, below a row, the row names, and the head.
SIDE, GAP, BELOW, NAMES, HEAD = 2.1, 0.12, 0.3, 1.35, 0.44
LETTERS = 14  # of the caption, per inch
BEST = "#f7c873"


@dataclass(frozen=True)
class Plane:
    """One density: points (n, 2), the window they are seen in, its entropy, and two values for every model.

    These are the model's density on pixels, from the bottom row up, and the nats of held-out points. `nearest` is the
    model nearest to the entropy, whose nats are highlighted; None for a tie.
    """

    name: str
    data: NDArray[Any]
    window: Window
    floor: float
    models: Mapping[str, tuple[NDArray[Any], float]]
    nearest: str | None = None


def plot_planes(planes: Sequence[Plane], path: str | Path, *, caption: str = "", dpi: int = 200) -> Path:
    """Plot densities: a column for each with its data on top, a row for every model, and nats below each panel."""
    check_not_empty("density", planes=planes)
    names = list(dict.fromkeys(name for plane in planes for name in plane.models))
    width = NAMES + len(planes) * (SIDE + GAP)
    lines = textwrap.wrap(caption, max(20, int(LETTERS * (width - MARGIN))))
    margins = (NAMES, MARGIN, HEAD, BELOW + MARGIN + LINE * len(lines))
    panels = Panels((SIDE,) * (len(names) + 1), len(planes), SIDE, (GAP, BELOW), margins)
    with new_plot(path, panels, dpi=dpi, theme=DARK) as canvas:
        for i, line in enumerate(lines, start=1):
            canvas.note(MARGIN, margins[-1] - BELOW - LINE * i, line, LABEL)
        for row, name in enumerate(("Data", *names)):
            canvas.text(MARGIN, panels.box(row)[1] + SIDE / 2 - 0.05, name, TITLE)
        for j, plane in enumerate(planes):
            middle = panels.box(0, j)[0] + SIDE / 2
            canvas.text(middle, canvas.height - HEAD + 0.13, plane.name, TITLE, align="center")
            canvas.note(middle, panels.box(0)[1] - 0.16, f"entropy {plane.floor:.3f} nats", LABEL, "center")
            draw_points(plane_axes(canvas, 0, j, plane.window), plane.data, 1.4)
            for row, name in enumerate(names, start=1):
                if name in plane.models:
                    density, nats = plane.models[name]
                    colour = BEST if name == plane.nearest else DARK.dim
                    canvas.text(middle, panels.box(row)[1] - 0.16, f"{nats:.3f} nats", LABEL, colour, "center")
                    draw_density(plane_axes(canvas, row, j, plane.window), density, plane.window)
    return canvas.path
