"""Hybrid models: classification error against bits per dimension, for every weight of the cross-entropy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from .canvas import ACCENT, DASHED, DIM, INK, LABEL, RULE, WARM, Panels, add_legend, check_not_empty, new_plot


@dataclass(frozen=True)
class HybridPoint:
    """One hybrid: its error in percent with the ends of its interval, its bits/dim with their standard error."""

    name: str
    error: float
    low: float
    high: float
    bits: float
    deviation: float


def plot_tradeoff(
    points: Sequence[HybridPoint],
    path: str | Path,
    *,
    images: int,
    classifier: tuple[str, float] | None = None,
    flow: tuple[str, float] | None = None,
    dpi: int = 200,
) -> Path:
    """Plot error against bits/dim. A pure classifier's error and a pure flow's bits are lines: they lack the other."""
    check_not_empty("hybrid", points=points)
    about = f"{images:,} test images; bars: 95 % interval of the error, standard error of the bits over images"
    with new_plot(path, Panels((3.0,), 1, 5.3), dpi=dpi) as canvas:
        canvas.title("Hybrid model: error and likelihood", about)
        axes = canvas.chart(xlabel="error %", integer=False)
        axes.grid(color=RULE, linewidth=0.5, alpha=0.6)
        axes.set_ylabel("bits per dimension", size=LABEL, color=DIM)
        _draw_points(axes, points)
        if classifier is not None:
            axes.axvline(classifier[1], color=WARM, linewidth=1.0, linestyle=DASHED, label=classifier[0])
        if flow is not None:
            axes.axhline(flow[1], color=INK, linewidth=1.0, linestyle=DASHED, label=flow[0])
        if classifier is not None or flow is not None:
            add_legend(axes, above=True)
        axes.margins(0.12)
    return canvas.path


def _draw_points(axes: Axes, points: Sequence[HybridPoint]) -> None:
    x, y = [p.error for p in points], [p.bits for p in points]
    wide = [[p.error - p.low for p in points], [p.high - p.error for p in points]]
    bars: dict[str, Any] = {"xerr": wide, "yerr": [p.deviation for p in points], "elinewidth": 0.8, "capsize": 2}
    axes.plot(x, y, color=ACCENT, linewidth=0.8, alpha=0.5)
    axes.errorbar(x, y, fmt=".", color=ACCENT, markersize=8, **bars)
    style: dict[str, Any] = {"textcoords": "offset points", "size": LABEL, "color": INK, "parse_math": False}
    for p in points:
        axes.annotate(p.name, (p.error, p.bits), xytext=(6, 6), **style)
