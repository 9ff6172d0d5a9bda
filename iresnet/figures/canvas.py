"""What every picture shares: a matplotlib without anyone's settings, one palette, and files written whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..atomic import replacing

# The colours of a light picture; those of the report's pages.
PAPER, INK, DIM, RULE, ACCENT = "#ffffff", "#1f1d1a", "#6b665d", "#d9d4ca", "#0a6c86"


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


def axes_at(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Bare axes, placed in inches from the lower left corner."""
    full_width, full_height = figure.get_size_inches()
    box = (left / full_width, bottom / full_height, width / full_width, height / full_height)
    axes = figure.add_axes(box, facecolor=PAPER)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=RULE, linewidth=0.6)
    return axes


def text_at(figure: Figure, x: float, y: float, text: str, size: float, colour: str = INK, align: str = "left") -> None:
    """A line of text, placed in inches from the lower left corner; shown as it is, dollars included."""
    width, height = figure.get_size_inches()
    figure.text(x / width, y / height, text, size=size, color=colour, ha=align, parse_math=False)
