"""What a flow on the plane has learned, in one image.

`toy_picture` draws one row per density and four columns: the data; the learned density p(x) (Eq. 3); samples; and a
square grid of codes pulled back by F^-1, which shows how the bijection bends the plane: by Theorem 1 the lines may bend
and crowd together, but never tear, nor cross where the grid has no crossing.
"""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from ..flow import Flow
from ..spelling import at_least
from .canvas import axes_at, blank, draw, png_path, text_at

Array: TypeAlias = NDArray[Any]
Window: TypeAlias = tuple[float, ...]  # left, right, bottom, top

# One perceptually uniform map on a very dark ground: density zero is the ground itself, so that only mass gives light.
COLOURS = LinearSegmentedColormap.from_list("night", matplotlib.colormaps["magma"](np.linspace(0.045, 0.985, 256)))
GROUND, POINTS, INK, DIM = to_hex(COLOURS(0.0)), to_hex(COLOURS(0.8)), "#f3eee8", "#9d97ab"
FAINT = 0.22  # how bright the density is under the grid

COLUMNS = {
    "Data": "points x",
    "Learned density": "p(x) = p(z) |det dF/dx|,  z = F(x)",
    "Samples": "x = F⁻¹(z),  z from the base",
    "Inverse grid": "F⁻¹ of a square grid of codes z, bright at z = 0",
}

# Inches: the side of a panel, the gap between two, the row labels, the head, the lines under a row, and the margin.
SIDE, GAP, LABEL, HEAD, FOOT, MARGIN = 2.6, 0.14, 1.66, 0.66, 0.46, 0.26

CHUNK = 4096  # points that pass through a flow at a time
EDGE, SPACING = 2.5, 0.25  # the grid of codes: lines in [-EDGE, EDGE]^2, and the distance between two


@dataclass(frozen=True)
class ToyPanel:
    """One row: a flow on the plane, its data (n, 2), its negative log-likelihood beside the floor, what is proven."""

    name: str
    flow: Flow
    data: Tensor
    nats: float
    floor: float | None
    certificate_line: str

    def __post_init__(self) -> None:
        if self.data.dim() != 2 or self.data.shape[1] != 2 or len(self.data) < 2:
            raise ValueError(
                f"data must have shape (n, 2) with n at least 2; got {tuple(self.data.shape)}. Pass points in 2-D."
            )
        if not bool(self.data.isfinite().all()):
            raise ValueError(f"data must be finite; that of {self.name!r} has NaN or infinity. Leave such points out.")
        if self.flow.base.shape != (2,):
            raise ValueError(f"flow must have codes of shape (2,); got {self.flow.base.shape}. Only a plane is drawn.")

    @property
    def score(self) -> str:
        """The negative log-likelihood beside the floor: "3.52 nats; floor 3.47"."""
        return f"{self.nats:.2f} nats" + ("" if self.floor is None else f"; floor {self.floor:.2f}")


@dataclass(frozen=True)
class _Row:
    """What is drawn: points, p on the pixels of the window, samples, lines (k, n, 2) and the radii of their codes."""

    window: Window
    data: Array
    density: Array
    samples: Array
    lines: Array
    radii: Array


def toy_picture(
    panels: Sequence[ToyPanel],
    path: str | Path,
    *,
    dpi: int = 200,
    resolution: int = 300,
    points: int = 4000,
    seed: int = 0,
) -> Path:
    """Draw the panels into the PNG file `path`, whole or not at all, and return its path.

    A density is evaluated on `resolution` x `resolution` pixels. The first `points` of the data are shown, beside as
    many samples, drawn from `seed`. The flows are used in eval mode and left as they are.
    """
    png_path(path)  # refused before anything is computed
    if not panels:
        raise ValueError("panels must hold at least one ToyPanel; got none. Pass one for each row.")
    at_least(2, dpi=dpi, resolution=resolution, points=points)
    rows = [_compute(panel, resolution, points, seed) for panel in panels]
    return draw(path, dpi, lambda: _compose(panels, rows))


@torch.no_grad()
def _compute(panel: ToyPanel, resolution: int, points: int, seed: int) -> _Row:
    flow, data = copy.deepcopy(panel.flow).eval(), panel.data[:points]
    like, window = flow.base.mean, square(data)
    pixels, codes = plane_points(window, resolution).to(like), _grid_lines(2 * resolution).to(like)
    density = torch.cat([flow.log_prob(x) for x in torch.split(pixels, CHUNK)]).exp()
    if not bool(density.isfinite().all()):
        raise ValueError(f"the density of {panel.name!r} has NaN or infinity where its data lie. Train the flow anew.")
    samples = flow.sample((len(data),), generator=torch.Generator(like.device).manual_seed(seed))
    pulled_back = [flow.transform.inverse(z) for z in torch.split(codes.reshape(-1, 2), CHUNK)]
    lines, density = torch.cat(pulled_back).reshape(codes.shape), density.reshape(resolution, resolution)
    return _Row(window, *(t.double().cpu().numpy() for t in (data, density, samples, lines, codes.norm(dim=-1))))


def square(data: Tensor) -> Window:
    """A square around all but the outermost points, with some air."""
    low, high = data.double().quantile(0.001, dim=0), data.double().quantile(0.999, dim=0)
    half = 0.58 * float((high - low).max()) or 1.0
    x, y = ((low + high) / 2).tolist()
    return x - half, x + half, y - half, y + half


def plane_points(window: Window, n: int) -> Tensor:
    """The middles of n x n pixels, (n * n, 2), row by row from the bottom."""
    left, right, bottom, top = window
    u = (torch.arange(n) + 0.5) / n
    y, x = torch.meshgrid(bottom + (top - bottom) * u, left + (right - left) * u, indexing="ij")
    return torch.stack([x, y], dim=-1).reshape(-1, 2)


def _grid_lines(n: int) -> Tensor:
    """The lines of the grid of codes, (lines, n, 2): the vertical ones, then the horizontal ones."""
    levels = torch.linspace(-EDGE, EDGE, round(2 * EDGE / SPACING) + 1)
    vertical = torch.stack(torch.meshgrid(levels, torch.linspace(-EDGE, EDGE, n), indexing="ij"), dim=-1)
    return torch.cat([vertical, vertical.flip(-1)])


def _compose(panels: Sequence[ToyPanel], rows: Sequence[_Row]) -> Figure:
    width = MARGIN + LABEL + 4 * SIDE + 3 * GAP + MARGIN
    height = HEAD + len(rows) * (SIDE + FOOT) + MARGIN / 2
    figure = blank(width, height, GROUND)
    lefts = [MARGIN + LABEL + j * (SIDE + GAP) for j in range(4)]
    for left, (title, subtitle) in zip(lefts, COLUMNS.items(), strict=True):
        text_at(figure, left, height - HEAD + 0.27, title, 12, INK)
        text_at(figure, left, height - HEAD + 0.1, subtitle, 6.8, DIM)
    for i, (panel, row) in enumerate(zip(panels, rows, strict=True)):
        bottom = height - HEAD - SIDE - i * (SIDE + FOOT)
        for left, show in zip(lefts, (_draw_data, _draw_density, _draw_samples, _draw_grid), strict=True):
            show(window_at(figure, left, bottom, SIDE, row.window), row)
        name, line = textwrap.fill(panel.name, 13, max_lines=3), textwrap.fill(panel.certificate_line, 160, max_lines=2)
        text_at(figure, MARGIN, bottom + SIDE / 2, name, 14, INK, up="bottom")
        text_at(figure, MARGIN, bottom + SIDE / 2 - 0.09, panel.score, 9, DIM, up="top")
        text_at(figure, lefts[0], bottom - 0.11, line, 7.5, DIM, up="top")
    return figure


def window_at(figure: Figure, left: float, bottom: float, side: float, window: Window) -> Axes:
    """A square panel of the plane on the dark ground, placed in inches."""
    axes = axes_at(figure, left, bottom, side, side, ground=GROUND, rule=DIM)
    axes.set(xlim=window[:2], ylim=window[2:])
    axes.spines[:].set(linewidth=0.4, alpha=0.5)
    return axes


def _draw_data(axes: Axes, row: _Row) -> None:
    show_points(axes, row.data)


def _draw_samples(axes: Axes, row: _Row) -> None:
    show_points(axes, row.samples)


def show_points(axes: Axes, x: Array, size: float = 1.6) -> None:
    """Points as dots of light."""
    axes.scatter(x[:, 0], x[:, 1], s=size, color=POINTS, alpha=0.6, linewidths=0)


def show_density(axes: Axes, density: Array, window: Window, brightness: float = 1.0, **options: Any) -> None:
    """A density on the pixels of a window, from the bottom row up."""
    # A sharp peak must not darken the rest: the brightest pixels, one in two hundred, share one colour.
    top = max(float(np.quantile(density, 0.995)), 1e-30) / brightness
    left, right, low, high = window
    extent = (left, right, low, high)
    axes.imshow(density, COLOURS, vmin=0, vmax=top, extent=extent, origin="lower", interpolation="bilinear", **options)


def _draw_density(axes: Axes, row: _Row) -> None:
    show_density(axes, row.density, row.window)


def _draw_grid(axes: Axes, row: _Row) -> None:
    """The lines in short pieces, coloured by the radius of their codes, the brightest on top, over a faint density."""
    show_density(axes, row.density, row.window, FAINT)
    # A piece has two steps and shares one with the next, so that no seam shows.
    pieces = np.stack([row.lines[:, :-2], row.lines[:, 1:-1], row.lines[:, 2:]], axis=2).reshape(-1, 3, 2)
    radii = row.radii[:, 1:-1].reshape(-1)
    order = np.argsort(-radii)
    colours = COLOURS(0.95 - 0.7 * radii[order] / radii.max())
    axes.add_collection(LineCollection(list(pieces[order]), colors=colours, linewidths=0.55, capstyle="round"))
