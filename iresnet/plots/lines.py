"""Curves of the paper's appendix: singular values of every layer (Figure 6), error against iterations (Figure 8)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from .canvas import ACCENT, DIM, INK, WARM, blank, draw, logarithmic, plot_axes, text_at

ALL_ONE = 1.0  # where a layer begins to expand
JOINED = 40  # up to so many layers, dots are joined by lines


@dataclass(frozen=True)
class SpectrumLine:
    """The layers of one net in order: proven bounds of their norms and estimates from below; c if it is constrained."""

    name: str
    coefficient: float | None
    bounds: Sequence[float]
    estimates: Sequence[float]


@dataclass(frozen=True)
class DecayLine:
    """The error of one net after so many iterations, and the largest Lip(g) of its blocks, if it is proven."""

    name: str
    iterations: Sequence[int]
    errors: Sequence[float | None]
    lipschitz: float | None


def spectra_picture(lines: Sequence[SpectrumLine], path: str | Path, *, dpi: int = 200) -> Path:
    """Write the layers' norms as one PNG: nets without constraint on the left, with it on the right."""
    if not lines:
        raise ValueError("lines must hold at least one net; got none.")
    return draw(path, dpi, lambda: _panels(lines))


def _panels(lines: Sequence[SpectrumLine]) -> Figure:
    free = [line for line in lines if line.coefficient is None]
    bound = [line for line in lines if line.coefficient is not None]
    panels = [(title, part) for title, part in (("Without constraint", free), ("i-ResNet", bound)) if part]
    figure = blank(0.2 + 4.5 * len(panels), 3.75)
    text_at(figure, 0.2, 3.5, "Largest singular value of every convolution", 10.5)
    text_at(figure, 0.2, 3.32, _gap(lines), 7, DIM)
    for i, (title, part) in enumerate(panels):
        _spectra(plot_axes(figure, (0.6 + 4.5 * i, 0.5, 3.2, 2.45), ticks=6), part)
        text_at(figure, 0.6 + 4.5 * i, 3.04, title, 9, DIM)
    return figure


def _gap(lines: Sequence[SpectrumLine]) -> str:
    """How far the proven bounds, which are drawn, are from the estimates."""
    gap = max(b - e for line in lines for b, e in zip(line.bounds, line.estimates, strict=True))
    return f"proven from above; estimates from below are at most {math.ceil(100 * gap) / 100:.2g} lower"


def _spectra(axes: Axes, lines: Sequence[SpectrumLine]) -> None:
    top = max(max(line.bounds) for line in lines)
    count = max(len(line.bounds) for line in lines)
    wide = top > 20 * ALL_ONE  # then a straight scale would hide which layers are below one
    axes.set_yscale("log" if wide else "linear")
    axes.axhline(ALL_ONE, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    for line, colour in zip(lines, _colours(lines), strict=True):
        x = range(1, len(line.bounds) + 1)
        if count <= JOINED:
            axes.plot(x, line.bounds, color=colour, linewidth=0.7, alpha=0.5)
        axes.plot(x, line.bounds, ".", color=colour, markersize=4.5, markeredgewidth=0, alpha=0.9)
    low = min(min(line.bounds) for line in lines)
    axes.set(xlim=(0, count + 1), ylim=(low / 1.5, 1.5 * top) if wide else (0, 1.08 * max(top, ALL_ONE)))
    axes.set_xlabel("layer", size=8, color=DIM)
    _name_lines(axes, [(line.name, statistics.median(line.bounds)) for line in lines], _colours(lines))


def _colours(lines: Sequence[SpectrumLine | DecayLine]) -> list[str]:
    """Two contrasting colours for baselines; shades from dark to light for coefficients from large to small."""
    if all(not line.name.startswith("c=") for line in lines):
        return [INK, WARM, ACCENT][: len(lines)]
    places = [0.15 + 0.62 * i / max(1, len(lines) - 1) for i in range(len(lines))]
    return [to_hex(matplotlib.colormaps["viridis"](p)) for p in places]


def decay_picture(lines: Sequence[DecayLine], path: str | Path, *, images: int, dpi: int = 200) -> Path:
    """Write error against iterations as one PNG, on a logarithmic scale, with the slope Lip(g) lightly beside."""
    if not lines:
        raise ValueError("lines must hold at least one net; got none.")
    return draw(path, dpi, lambda: _decays(lines, images))


def _decays(lines: Sequence[DecayLine], images: int) -> Figure:
    figure = blank(7.2, 4.0)
    axes = plot_axes(figure, (0.78, 0.52, 6.2, 2.95), ticks=6, label="fixed-point iterations in every block")
    for line, colour in zip(lines, _colours(lines), strict=True):
        _decay(axes, line, colour)
    errors = [e for line in lines for e in line.errors if e]
    logarithmic(axes, 8)
    last = max(line.iterations[-1] for line in lines)
    axes.set(xlim=(0, last + 0.5), ylim=(min(errors) / 3, 3 * max(errors)))
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0, ncols=len(lines), frameon=False,
        fontsize=8.5, labelcolor=INK, handlelength=1.4, columnspacing=1.4,
    )  # fmt: skip
    about = f"l2, grey levels, mean of {images} test images; dashes: slope Lip(g) a step, for comparison"
    text_at(figure, 0.2, 3.74, "Reconstruction error", 10.5)
    text_at(figure, 6.98, 3.74, about, 7, DIM, "right")
    return figure


def _decay(axes: Axes, line: DecayLine, colour: str) -> None:
    known = [(n, e) for n, e in zip(line.iterations, line.errors, strict=True) if e]
    axes.plot(*zip(*known, strict=True), color=colour, linewidth=1.2, marker=".", markersize=5, label=line.name)
    if line.lipschitz is not None and 0 < line.lipschitz < 1:
        n0, e0 = known[0]
        rate = [(n, e0 * line.lipschitz ** (n - n0)) for n in range(n0, line.iterations[-1] + 1)]
        axes.plot(*zip(*rate, strict=True), color=colour, linewidth=0.8, linestyle=(0, (3, 3)), alpha=0.45)


def _name_lines(axes: Axes, names: Sequence[tuple[str, float]], colours: Sequence[str]) -> None:
    """The name of every line at the right, as high as its median, kept apart where those are close."""
    low, high = axes.get_ylim()
    log = axes.get_yscale() == "log"

    def place(v: float) -> float:
        return (math.log(v / low) / math.log(high / low)) if log else (v - low) / (high - low)

    order = sorted(range(len(names)), key=lambda i: names[i][1])
    at, before = {}, -1.0
    for i in order:
        at[i] = before = max(place(names[i][1]), before + 0.075)
    for i, (name, _) in enumerate(names):
        axes.text(1.02, at[i], name, size=8, color=colours[i], transform=axes.transAxes, va="center", parse_math=False)
