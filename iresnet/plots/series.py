"""Curves of the power series: its bias and standard deviation against the number of terms (Figures 4 and 9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from matplotlib.axes import Axes

from .canvas import ACCENT, DASHED, INK, WARM, Panels, add_legend, check_not_empty, new_plot, use_log_scale

FLOOR = 1e-12  # bits per dimension; smaller values are rounding errors


@dataclass(frozen=True)
class SeriesLine:
    """One flow: bias, standard deviation of one image's estimate and proven bound by number of terms, in bits/dim."""

    name: str
    terms: Sequence[int]
    bias: Sequence[float]
    deviation: Sequence[float]
    bound: Sequence[float]


Drawing: TypeAlias = Callable[[Axes, SeriesLine], None]


def plot_bias(lines: Sequence[SeriesLine], path: str | Path, *, images: int, dpi: int = 200) -> Path:
    """Plot the bias with a band of one standard deviation, one panel per flow."""
    return _plot(lines, path, _draw_band, "Error of the log-determinant", images, dpi)


def plot_convergence(lines: Sequence[SeriesLine], path: str | Path, *, images: int, dpi: int = 200) -> Path:
    """Plot bias, deviation and proven bound on a logarithmic scale, one panel per flow."""
    return _plot(lines, path, _draw_sizes, "Convergence of the log-determinant", images, dpi)


def _plot(lines: Sequence[SeriesLine], path: str | Path, draw: Drawing, title: str, images: int, dpi: int) -> Path:
    check_not_empty("flow", lines=lines)
    with new_plot(path, Panels((2.5,), len(lines), 4.5, (1.1, 0.0)), dpi=dpi) as canvas:
        canvas.title(title, f"bits/dim, {images:,} test images, against exact determinants")
        for i, line in enumerate(lines):
            axes = canvas.chart(i, xlabel="terms of the power series", title=line.name, ticks=10)
            draw(axes, line)
            axes.set_xlim(line.terms[0] - 0.5, line.terms[-1] + 0.5)
            add_legend(axes)
    return canvas.path


def _draw_band(axes: Axes, line: SeriesLine) -> None:
    """Draw the bias, and one standard deviation of one image's estimate with one probe around it."""
    low, high = ([b + s * d for b, d in zip(line.bias, line.deviation, strict=True)] for s in (-1, 1))
    axes.fill_between(line.terms, low, high, color=ACCENT, alpha=0.18, linewidth=0, label="± one deviation, one probe")
    axes.axhline(0, color=INK, linewidth=0.8, linestyle=DASHED)
    axes.plot(line.terms, line.bias, color=ACCENT, linewidth=1.3, marker=".", markersize=6, label="bias")


def _draw_sizes(axes: Axes, line: SeriesLine) -> None:
    """Draw all three on one logarithmic scale; values below the floor are drawn at the floor."""
    shown = (
        ("bound of Theorem 3", line.bound, INK, DASHED),
        ("deviation, one image, one probe", line.deviation, WARM, "-"),
        ("bias, mean over images", [abs(b) for b in line.bias], ACCENT, "-"),
    )
    use_log_scale(axes, 9)
    for name, values, colour, style in shown:
        sizes = [max(v, FLOOR) for v in values]
        axes.plot(line.terms, sizes, color=colour, linestyle=style, linewidth=1.2, marker=".", markersize=5, label=name)
