"""Speed beside other methods: ratios of times with their quartiles, and times against the size of the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from .canvas import ACCENT, DASHED, DIM, INK, LABEL, WARM, Panels, add_legend, check_not_empty, new_plot

#: A median and its quartiles.
Spread: TypeAlias = tuple[float, float, float]

#: Colours and markers, in the order of the methods.
STYLES = ((WARM, "o"), (ACCENT, "s"), (ACCENT, "^"), (ACCENT, "v"), (DIM, "D"), (INK, "|"))

ROW = 0.21  # inches per row of ratios


@dataclass(frozen=True)
class RatioRow:
    """A task at one size, and the time of every other method as a multiple of ours."""

    name: str
    ratios: Mapping[str, Spread]


@dataclass(frozen=True)
class GrowthLine:
    """Milliseconds of a task against one size of the network, and the fitted slope with its standard error."""

    name: str
    varied: str
    sizes: Sequence[float]
    ms: Sequence[float]
    slope: float
    standard_error: float | None


def plot_ratios(rows: Sequence[RatioRow], path: str | Path, *, about: str, dpi: int = 200) -> Path:
    """Plot the ratios on a logarithmic scale, one line of dots per task: to the right of 1, ours is faster."""
    check_not_empty("task", rows=rows)
    methods = list(dict.fromkeys(name for row in rows for name in row.ratios))
    with new_plot(path, Panels((ROW * len(rows),), 1, 5.6, margins=(1.9, 0.25, 0.95, 0.55)), dpi=dpi) as canvas:
        canvas.title("Time of other methods, as a multiple of ours", about)
        axes = canvas.chart(xlabel="time / time of iresnet (above 1: iresnet is faster)")
        axes.set_xscale("log")
        axes.axvline(1, color=INK, linewidth=0.8, linestyle=DASHED)
        for method, (colour, marker) in zip(methods, STYLES, strict=False):
            _draw_ratios(axes, rows, method, colour, marker)
        axes.yaxis.set_major_locator(FixedLocator(range(len(rows))))
        axes.set_yticklabels([row.name for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        add_legend(axes, above=True)
    return canvas.path


def _draw_ratios(axes: Axes, rows: Sequence[RatioRow], method: str, colour: str, marker: str) -> None:
    known = [(i, *row.ratios[method]) for i, row in enumerate(rows) if method in row.ratios]
    y, value, low, high = zip(*known, strict=True)
    axes.hlines(y, low, high, color=colour, linewidth=1.0, alpha=0.6)
    axes.plot(value, y, marker, color=colour, markersize=6 if marker == "|" else 3.8, label=method)


def plot_growth(lines: Sequence[GrowthLine], path: str | Path, *, about: str, dpi: int = 200) -> Path:
    """Plot times against sizes on logarithmic scales, one panel for each size that is varied, with the slopes."""
    check_not_empty("line", lines=lines)
    varied = list(dict.fromkeys(line.varied for line in lines))
    names = list(dict.fromkeys(line.name for line in lines))
    ms = [t for line in lines for t in line.ms]
    colours = dict(zip(names, (ACCENT, WARM, INK, DIM), strict=False))
    with new_plot(path, Panels((2.1,), len(varied), 1.75, (0.45, 0.0), (0.6, 0.2, 0.95, 0.95)), dpi=dpi) as canvas:
        canvas.title("Growth of the time with the size of the network", about)
        for column, size in enumerate(varied):
            axes = canvas.chart(column, xlabel=size, title="milliseconds" if column == 0 else "")
            _draw_growth(axes, [line for line in lines if line.varied == size], colours)
            axes.set_ylim(min(ms) / 1.4, max(ms) * 1.4)
    return canvas.path


def _draw_growth(axes: Axes, lines: Sequence[GrowthLine], colours: Mapping[str, str]) -> None:
    axes.set(xscale="log", yscale="log")
    for i, line in enumerate(lines):
        colour = colours[line.name]
        axes.plot(line.sizes, line.ms, color=colour, linewidth=1.2, marker=".", markersize=5)
        error = "" if line.standard_error is None else f" ± {line.standard_error:.2f}"
        place: dict[str, Any] = {"transform": axes.transAxes, "size": LABEL - 1, "color": colour}
        axes.text(0.0, -0.26 - 0.075 * i, f"{line.name}: {line.slope:.2f}{error}", parse_math=False, **place)
    axes.xaxis.set_major_locator(FixedLocator(lines[0].sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
