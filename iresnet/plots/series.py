"""Curves of the power series: its bias and standard deviation against the number of terms (Figures 4 and 9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .canvas import ACCENT, DIM, INK, PAPER, WARM, blank, draw, logarithmic, plot_axes, text_at

WIDTH, HEIGHT = 5.6, 3.9  # inches, of one panel
FLOOR = 1e-12  # bits per dimension: below it there is only rounding


@dataclass(frozen=True)
class SeriesLine:
    """One flow: bias, deviation of one image's estimate and proven bound for every number of terms, in bits/dim."""

    name: str
    terms: Sequence[int]
    bias: Sequence[float]
    deviation: Sequence[float]
    bound: Sequence[float]


Panel: TypeAlias = Callable[[Axes, SeriesLine], None]


def bias_picture(lines: Sequence[SeriesLine], path: str | Path, *, images: int, dpi: int = 200) -> Path:
    """Write bias with a band of one standard deviation as one PNG, a panel for every flow."""
    return _panels(lines, path, _band, "Error of the log-determinant", images, dpi)


def convergence_picture(lines: Sequence[SeriesLine], path: str | Path, *, images: int, dpi: int = 200) -> Path:
    """Write the sizes of bias, deviation and proven bound on a logarithmic scale as one PNG, a panel for every flow."""
    return _panels(lines, path, _sizes, "Convergence of the log-determinant", images, dpi)


def _panels(lines: Sequence[SeriesLine], path: str | Path, panel: Panel, title: str, images: int, dpi: int) -> Path:
    if not lines:
        raise ValueError("lines must hold at least one flow; got none.")

    def compose() -> Figure:
        figure = blank(WIDTH * len(lines), HEIGHT)
        text_at(figure, 0.2, HEIGHT - 0.26, title, 10.5)
        text_at(figure, 0.2, HEIGHT - 0.45, f"bits/dim, {images:,} test images, against exact determinants", 7, DIM)
        for i, line in enumerate(lines):
            box = (0.85 + WIDTH * i, 0.55, WIDTH - 1.1, HEIGHT - 1.4)
            axes = plot_axes(figure, box, ticks=10, label="terms of the power series")
            panel(axes, line)
            axes.set_xlim(line.terms[0] - 0.5, line.terms[-1] + 0.5)
            text_at(figure, 0.85 + WIDTH * i, HEIGHT - 0.72, line.name, 9, DIM)
        return figure

    return draw(path, dpi, compose)


def _band(axes: Axes, line: SeriesLine) -> None:
    """The bias, and how far one image's estimate with one probe is spread around it."""
    low, high = ([b + s * d for b, d in zip(line.bias, line.deviation, strict=True)] for s in (-1, 1))
    axes.fill_between(line.terms, low, high, color=ACCENT, alpha=0.18, linewidth=0, label="± one deviation, one probe")
    axes.axhline(0, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.plot(line.terms, line.bias, color=ACCENT, linewidth=1.3, marker=".", markersize=6, label="bias")
    _legend(axes)


def _sizes(axes: Axes, line: SeriesLine) -> None:
    """All on one logarithmic scale; what is below the floor is drawn at it."""
    shown = (
        ("bound of Theorem 3", line.bound, INK, (0, (4, 3))),
        ("deviation, one image, one probe", line.deviation, WARM, "-"),
        ("bias, mean over images", [abs(b) for b in line.bias], ACCENT, "-"),
    )
    logarithmic(axes, 9)
    for name, values, colour, style in shown:
        sizes = [max(v, FLOOR) for v in values]
        axes.plot(line.terms, sizes, color=colour, linestyle=style, linewidth=1.2, marker=".", markersize=5, label=name)
    _legend(axes)


def _legend(axes: Axes) -> None:
    box = {"facecolor": PAPER, "edgecolor": "none", "framealpha": 0.9}  # so that names are read over lines
    axes.legend(**box, fontsize=8, labelcolor=INK, loc="best", handlelength=1.8)
