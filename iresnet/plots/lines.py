"""Curves of the paper's appendix: singular values of every layer (Figure 6), error against iterations (Figure 8)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from .canvas import ACCENT, DASHED, INK, LABEL, WARM, Panels, add_legend, check_not_empty, new_plot, use_log_scale

EXPANDS = 1.0  # a layer with a larger norm expands distances
JOINED = 40  # dots are joined by lines for at most so many layers


@dataclass(frozen=True)
class SpectrumLine:
    """The layers of one network in order: proven upper bounds of their norms and estimates from below.

    `coefficient` is c of a constrained network, None of others.
    """

    name: str
    coefficient: float | None
    bounds: Sequence[float]
    estimates: Sequence[float]


@dataclass(frozen=True)
class DecayLine:
    """The error of one network after so many iterations, and the largest proven Lip(g) of its blocks, if any."""

    name: str
    iterations: Sequence[int]
    errors: Sequence[float | None]
    lipschitz: float | None


def plot_spectra(lines: Sequence[SpectrumLine], path: str | Path, *, dpi: int = 200) -> Path:
    """Plot the norms of all layers: unconstrained networks on the left, i-ResNets on the right."""
    check_not_empty("network", lines=lines)
    free = [line for line in lines if line.coefficient is None]
    constrained = [line for line in lines if line.coefficient is not None]
    parts = [(title, part) for title, part in (("Unconstrained", free), ("i-ResNet", constrained)) if part]
    panels = Panels((2.45,), len(parts), 3.2, (1.35, 0.0), (0.6, 0.9, 0.85, 0.5))
    with new_plot(path, panels, dpi=dpi) as canvas:
        canvas.title("Largest singular value of every convolution", _describe_gap(lines))
        for i, (title, part) in enumerate(parts):
            _draw_spectra(canvas.chart(i, xlabel="layer", title=title), part)
    return canvas.path


def _describe_gap(lines: Sequence[SpectrumLine]) -> str:
    """Say how far the proven bounds, which are drawn, are from the estimates."""
    gap = max(b - e for line in lines for b, e in zip(line.bounds, line.estimates, strict=True))
    return f"proven upper bounds; estimates from below are at most {math.ceil(100 * gap) / 100:.2g} lower"


def _draw_spectra(axes: Axes, lines: Sequence[SpectrumLine]) -> None:
    top = max(max(line.bounds) for line in lines)
    count = max(len(line.bounds) for line in lines)
    wide = top > 20 * EXPANDS  # a linear scale would hide which layers are below one
    axes.set_yscale("log" if wide else "linear")
    axes.axhline(EXPANDS, color=INK, linewidth=0.8, linestyle=DASHED)
    for line, colour in zip(lines, _colours(lines), strict=True):
        x = range(1, len(line.bounds) + 1)
        if count <= JOINED:
            axes.plot(x, line.bounds, color=colour, linewidth=0.7, alpha=0.5)
        axes.plot(x, line.bounds, ".", color=colour, markersize=4.5, markeredgewidth=0, alpha=0.9)
    low = min(min(line.bounds) for line in lines)
    axes.set(xlim=(0, count + 1), ylim=(low / 1.5, 1.5 * top) if wide else (0, 1.08 * max(top, EXPANDS)))
    _name_lines(axes, [(line.name, statistics.median(line.bounds)) for line in lines], _colours(lines))


def _colours(lines: Sequence[SpectrumLine | DecayLine]) -> list[str]:
    """Two contrasting colours for baselines; shades from dark to light for coefficients from large to small."""
    if all(not line.name.startswith("c=") for line in lines):
        return [INK, WARM, ACCENT][: len(lines)]
    places = [0.15 + 0.62 * i / max(1, len(lines) - 1) for i in range(len(lines))]
    return [to_hex(matplotlib.colormaps["viridis"](p)) for p in places]


def _name_lines(axes: Axes, names: Sequence[tuple[str, float]], colours: Sequence[str]) -> None:
    """Write the name of every line on the right at the height of its median, with room between names."""
    low, high = axes.get_ylim()
    log = axes.get_yscale() == "log"

    def place(v: float) -> float:
        return (math.log(v / low) / math.log(high / low)) if log else (v - low) / (high - low)

    order = sorted(range(len(names)), key=lambda i: names[i][1])
    at, before = {}, -1.0
    for i in order:
        at[i] = before = max(place(names[i][1]), before + 0.075)
    style: dict[str, Any] = {"size": LABEL, "transform": axes.transAxes, "va": "center", "parse_math": False}
    for i, (name, _) in enumerate(names):
        axes.text(1.02, at[i], name, color=colours[i], **style)


def plot_reconstruction_error(lines: Sequence[DecayLine], path: str | Path, *, images: int, dpi: int = 200) -> Path:
    """Plot the error against the number of iterations on a logarithmic scale, with the slope Lip(g) beside it."""
    check_not_empty("network", lines=lines)
    about = f"l2, grey levels, mean of {images} test images; dashes: slope Lip(g) per step, for comparison"
    with new_plot(path, Panels((2.95,), 1, 6.1), dpi=dpi) as canvas:
        canvas.title("Reconstruction error", about)
        axes = canvas.chart(xlabel="fixed-point iterations in every block")
        for line, colour in zip(lines, _colours(lines), strict=True):
            _draw_decay(axes, line, colour)
        errors = [e for line in lines for e in line.errors if e]
        use_log_scale(axes, 8)
        last = max(line.iterations[-1] for line in lines)
        axes.set(xlim=(0, last + 0.5), ylim=(min(errors) / 3, 3 * max(errors)))
        add_legend(axes, above=True)
    return canvas.path


def _draw_decay(axes: Axes, line: DecayLine, colour: str) -> None:
    known = [(n, e) for n, e in zip(line.iterations, line.errors, strict=True) if e]
    axes.plot(*zip(*known, strict=True), color=colour, linewidth=1.2, marker=".", markersize=5, label=line.name)
    if line.lipschitz is not None and 0 < line.lipschitz < 1:
        n0, e0 = known[0]
        rate = [(n, e0 * line.lipschitz ** (n - n0)) for n in range(n0, line.iterations[-1] + 1)]
        axes.plot(*zip(*rate, strict=True), color=colour, linewidth=0.8, linestyle=(0, (3, 3)), alpha=0.45)
