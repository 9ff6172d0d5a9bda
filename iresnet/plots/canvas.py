"""What every picture shares: a matplotlib without anyone's settings, one palette, and files written whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from ..atomic import replacing

# The colours of a light picture, all but the last those of the report's pages.
PAPER, INK, DIM, RULE, ACCENT, WARM = "#ffffff", "#1f1d1a", "#6b665d", "#d9d4ca", "#0a6c86", "#b4561f"


@contextmanager
def canvas() -> Iterator[None]:
    """Defaults of matplotlib for a while: a user's style sheet must not change the picture."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["font.family"] = "DejaVu Sans"
        yield


def png_path(path: str | Path) -> Path:
    """The path, if it is a PNG's."""
    if Path(path).suffix != ".png":
        raise ValueError(f"path must end in .png; got {str(path)!r}. No other format is written.")
    return Path(path)


def save(figure: Figure, path: Path, dpi: int) -> None:
    """Write a figure as PNG: a reader sees the old picture or the new one, never a part."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=dpi)


def draw(path: str | Path, dpi: int, make: Callable[[], Figure]) -> Path:
    """Write the figure that `make` composes, without anyone's settings, as the PNG file `path`, which is returned."""
    path = png_path(path)
    with canvas():
        save(make(), path, dpi)
    return path


def blank(width: float, height: float, ground: str = PAPER) -> Figure:
    """A figure with nothing on it, its size in inches."""
    return Figure(figsize=(width, height), facecolor=ground)


def axes_at(
    figure: Figure, left: float, bottom: float, width: float, height: float, *, ground: str = PAPER, rule: str = RULE
) -> Axes:
    """Bare axes, placed in inches from the lower left corner."""
    full_width, full_height = figure.get_size_inches()
    box = (left / full_width, bottom / full_height, width / full_width, height / full_height)
    axes = figure.add_axes(box, facecolor=ground)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=rule, linewidth=0.6)
    return axes


def plot_axes(
    figure: Figure, box: tuple[float, float, float, float], *, ticks: int, whole: bool = True, label: str | None = None
) -> Axes:
    """Axes of a plot in a box (left, bottom, width, height), open above and to the right, lines at the ticks of y."""
    axes = axes_at(figure, *box)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=whole))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.tick_params(length=2.5, labelsize=8, color=RULE, labelcolor=DIM, which="both")
    axes.grid(axis="y", color=RULE, linewidth=0.5, alpha=0.6)
    axes.set_axisbelow(True)
    if label is not None:
        axes.set_xlabel(label, size=8.5, color=DIM)
    return axes


def logarithmic(axes: Axes, ticks: int) -> None:
    """A logarithmic scale upwards, with names at powers of ten alone."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=ticks))
    axes.yaxis.set_minor_formatter(NullFormatter())


def text_at(
    figure: Figure, x: float, y: float, text: str, size: float, colour: str = INK, align: str = "left",
    *, up: str = "baseline",
) -> None:  # fmt: skip
    """A line of text, placed in inches from the lower left corner; shown as it is, dollars included."""
    width, height = figure.get_size_inches()
    figure.text(x / width, y / height, text, size=size, color=colour, ha=align, va=up, parse_math=False)
