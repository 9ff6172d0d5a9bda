"""One network for two jobs: its error against its bits per dimension, for every weight of the one beside the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .canvas import ACCENT, DIM, INK, RULE, WARM, blank, draw, plot_axes, text_at

WIDTH, HEIGHT = 6.4, 4.2  # inches


@dataclass(frozen=True)
class Compromise:
    """A hybrid: its error in percent with the ends of its interval, its bits per dimension with their error."""

    name: str
    error: float
    low: float
    high: float
    bits: float
    deviation: float


def tradeoff_picture(
    points: Sequence[Compromise],
    path: str | Path,
    *,
    images: int,
    classifier: tuple[str, float] | None = None,
    flow: tuple[str, float] | None = None,
    dpi: int = 200,
) -> Path:
    """Write error against bits as one PNG; a classifier's error and a flow's bits, which have no other, are lines."""
    if not points:
        raise ValueError("points must hold at least one hybrid; got none.")

    def compose() -> Figure:
        figure = blank(WIDTH, HEIGHT)
        text_at(figure, 0.2, HEIGHT - 0.26, "One network: error and likelihood", 10.5)
        about = f"{images:,} test images; bars: 95 % interval of the error, standard error of the bits over images"
        text_at(figure, 0.2, HEIGHT - 0.45, about, 7, DIM)
        axes = _axes(figure)
        _points(axes, points)
        if classifier is not None:
            axes.axvline(classifier[1], color=WARM, linewidth=1.0, linestyle=(0, (4, 3)), label=classifier[0])
        if flow is not None:
            axes.axhline(flow[1], color=INK, linewidth=1.0, linestyle=(0, (4, 3)), label=flow[0])
        if classifier is not None or flow is not None:
            axes.legend(
                loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize=8, labelcolor=INK,
                borderaxespad=0.0,
            )  # fmt: skip
        axes.margins(0.12)
        return figure

    return draw(path, dpi, compose)


def _axes(figure: Figure) -> Axes:
    axes = plot_axes(figure, (0.85, 0.55, WIDTH - 1.1, HEIGHT - 1.2), ticks=6, whole=False, label="error %")
    axes.grid(color=RULE, linewidth=0.5, alpha=0.6)
    axes.set_ylabel("bits per dimension", size=8.5, color=DIM)
    return axes


def _points(axes: Axes, points: Sequence[Compromise]) -> None:
    x, y = [p.error for p in points], [p.bits for p in points]
    wide = [[p.error - p.low for p in points], [p.high - p.error for p in points]]
    axes.plot(x, y, color=ACCENT, linewidth=0.8, alpha=0.5)
    axes.errorbar(
        x, y, xerr=wide, yerr=[p.deviation for p in points],
        fmt=".", color=ACCENT, markersize=8, elinewidth=0.8, capsize=2,
    )  # fmt: skip
    for p in points:
        axes.annotate(
            p.name, (p.error, p.bits), xytext=(6, 6), textcoords="offset points", size=8, color=INK, parse_math=False
        )
