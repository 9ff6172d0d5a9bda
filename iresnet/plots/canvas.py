"""The style and layout of all plots: colours, text sizes, panels placed in inches, and files written whole.

A plot is drawn on a `Canvas`, which `new_plot` opens and saves. `Panels` says where its panels are: a table of rows and
columns with margins around it, so that a plot computes no positions of its own. Everything is measured in inches from
the lower left corner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from ..atomic import replacing
from .raster import Bytes

#: Left, bottom, width and height, in inches.
Box: TypeAlias = tuple[float, float, float, float]


@dataclass(frozen=True)
class Theme:
    """The colours of the background, of text, of secondary text, and of frames and grid lines."""

    ground: str
    ink: str
    dim: str
    rule: str


#: A perceptually uniform colour map on a dark background: density zero has the colour of the background.
NIGHT = LinearSegmentedColormap.from_list("night", matplotlib.colormaps["magma"](np.linspace(0.045, 0.985, 256)))
DARK = Theme(to_hex(NIGHT(0.0)), "#f3eee8", "#9d97ab", "#9d97ab80")
#: The colours of the report's pages; the two highlight colours are for light plots.
LIGHT = Theme("#ffffff", "#1f1d1a", "#6b665d", "#d9d4ca")
INK, DIM, RULE, ACCENT, WARM = LIGHT.ink, LIGHT.dim, LIGHT.rule, "#0a6c86", "#b4561f"
DASHED = (0, (4, 3))

#: Font sizes in points, from the title of a plot to its notes.
TITLE, HEADING, LABEL, NOTE = 10.5, 9.0, 8.0, 7.0
#: Inches: from the edge of the canvas to its texts, and between two lines of a note.
MARGIN, LINE = 0.2, 0.16


@dataclass(frozen=True)
class Panels:
    """A table of panels: the height of every row, the number of columns and their width.

    `gap` is the space between columns and between rows, `margins` that on the left, right, top and bottom.
    """

    heights: Sequence[float]
    columns: int
    width: float
    gap: tuple[float, float] = (0.0, 0.0)
    margins: tuple[float, float, float, float] = (0.85, 0.25, 0.85, 0.55)  # those of charts with a title

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of the canvas."""
        left, right, top, bottom = self.margins
        across, down = self.gap
        width = left + self.columns * (self.width + across) - across + right
        return width, top + sum(self.heights) + down * (len(self.heights) - 1) + bottom

    def box(self, row: int = 0, column: int = 0) -> Box:
        """The place of one panel; rows are counted from the top."""
        above = sum(self.heights[: row + 1]) + row * self.gap[1]
        left = self.margins[0] + column * (self.width + self.gap[0])
        return left, self.size[1] - self.margins[2] - above, self.width, self.heights[row]


class Canvas:
    """A blank figure on which texts and axes are placed in inches."""

    def __init__(self, panels: Panels, theme: Theme, path: Path) -> None:
        self.panels, self.theme, self.path = panels, theme, path
        self.width, self.height = panels.size
        self.figure = Figure(figsize=panels.size, facecolor=theme.ground)

    def text(
        self, x: float, y: float, text: str, size: float = LABEL, colour: str | None = None, align: str = "left",
        *, up: str = "baseline",
    ) -> None:  # fmt: skip
        """Write text as it is, dollars included; `up` is its vertical alignment."""
        colour = self.theme.ink if colour is None else colour
        place = x / self.width, y / self.height
        self.figure.text(*place, text, size=size, color=colour, ha=align, va=up, parse_math=False)

    def note(
        self, x: float, y: float, text: str, size: float = NOTE, align: str = "left", *, up: str = "baseline"
    ) -> None:
        """Write secondary text."""
        self.text(x, y, text, size, self.theme.dim, align, up=up)

    def title(self, title: str, about: str) -> None:
        """Write the title of the plot, and what it shows in smaller letters below."""
        self.text(MARGIN, self.height - 0.26, title, TITLE)
        self.note(MARGIN, self.height - 0.45, about)

    def axes(self, box: Box) -> Axes:
        """Add axes with a frame and without ticks."""
        left, bottom, width, height = box
        place = (left / self.width, bottom / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(place, facecolor=self.theme.ground)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(color=self.theme.rule, linewidth=0.6)
        return axes

    def panel(self, row: int = 0, column: int = 0) -> Axes:
        """Add the axes of one panel."""
        return self.axes(self.panels.box(row, column))

    def chart(self, column: int = 0, *, xlabel: str, title: str = "", ticks: int = 6, integer: bool = True) -> Axes:
        """Add the axes of a chart: open above and on the right, a grid line at every tick of y, a title above."""
        axes, (left, bottom, _, height) = self.panel(0, column), self.panels.box(0, column)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=integer))
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.tick_params(length=2.5, labelsize=LABEL, color=self.theme.rule, labelcolor=self.theme.dim, which="both")
        axes.grid(axis="y", color=self.theme.rule, linewidth=0.5, alpha=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel(xlabel, size=LABEL, color=self.theme.dim)
        self.note(left, bottom + height + 0.1, title, HEADING)
        return axes

    def image(self, box: Box, tile: Bytes) -> None:
        """Add one image (height, width, 1 or 3), as bytes."""
        self.axes(box).imshow(tile, cmap="gray", vmin=0, vmax=255)


@contextmanager
def new_plot(path: str | Path, panels: Panels, *, dpi: int, theme: Theme = LIGHT) -> Iterator[Canvas]:
    """Open an empty canvas and write it as a PNG file at the end; nothing is written where drawing fails.

    matplotlib's settings are its defaults meanwhile, so that a user's style sheet does not change the plot.
    """
    canvas = Canvas(panels, theme, png_path(path))
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["font.family"] = "DejaVu Sans"
        yield canvas
        save(canvas.figure, canvas.path, dpi)


def png_path(path: str | Path) -> Path:
    """Check that a path ends in .png, and return it."""
    if Path(path).suffix != ".png":
        raise ValueError(f"path must end in .png; got {str(path)!r}. No other format is written.")
    return Path(path)


def save(figure: Figure, path: Path, dpi: int) -> None:
    """Write a figure as PNG; a reader sees the old file or the new one, never a part."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=dpi)


def check_not_empty(what: str, **values: Sized) -> None:
    """Raise `ValueError` for an empty argument, which must hold at least one of `what`."""
    for name, value in values.items():
        if not len(value):
            raise ValueError(f"{name} must hold at least one {what}; got none.")


def use_log_scale(axes: Axes, ticks: int) -> None:
    """Make the y axis logarithmic, with labels at powers of ten alone."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=ticks))
    axes.yaxis.set_minor_formatter(NullFormatter())


def add_legend(axes: Axes, *, above: bool = False) -> None:
    """Name the curves: in one line above the axes, or where they leave room."""
    style: dict[str, Any] = {"fontsize": LABEL, "labelcolor": INK, "handlelength": 1.6}
    if above:
        count = len(axes.get_legend_handles_labels()[0])
        place: dict[str, Any] = {
            "loc": "lower right",
            "bbox_to_anchor": (1.0, 1.0),
            "borderaxespad": 0.0,
            "frameon": False,
        }
        axes.legend(**style, **place, ncols=count, columnspacing=1.4)
    else:  # on the background's colour, so that names can be read over curves
        axes.legend(**style, loc="best", facecolor=LIGHT.ground, edgecolor="none", framealpha=0.9)
