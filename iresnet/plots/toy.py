"""Flows in the plane: data, learned density, samples, and how the flow bends the plane.

`plot_toy_flows` draws one row per flow and four columns: the data; the learned density p(x) (Eq. 3); samples; and a
square grid of codes pulled back by F^-1, which shows how the bijection bends the plane. By Theorem 1 its lines may bend
and crowd together, but never tear, nor cross where the grid has no crossing.
"""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from numpy.typing import NDArray
from torch import Tensor

from ..flow import Flow
from ..spelling import at_least
from .canvas import DARK, HEADING, NIGHT, Canvas, Panels, new_plot, png_path

Array: TypeAlias = NDArray[Any]
Window: TypeAlias = tuple[float, ...]  # left, right, bottom, top

POINTS = to_hex(NIGHT(0.8))
FAINT = 0.22  # the brightness of the density behind the grid

COLUMNS = {
    "Data": "points x",
    "Learned density": "p(x) = p(z) |det dF/dx|,  z = F(x)",
    "Samples": "x = F⁻¹(z),  z from the base",
    "Inverse grid": "F⁻¹ of a square grid of codes z, bright at z = 0",
}

#: Inches: the side of a panel, between columns, below a row, the row names, the head, and the right margin.
SIDE, GAP, BELOW, NAMES, HEAD, RIGHT = 2.6, 0.14, 0.46, 1.92, 0.66, 0.26

CHUNK = 4096  # points evaluated at a time
EDGE, SPACING = 2.5, 0.25  # the grid of codes: lines in [-EDGE, EDGE]^2, and the distance between two


@dataclass(frozen=True)
class ToyPanel:
    """One row: a flow in the plane, its data (n, 2), its negative log-likelihood with the floor, what is proven."""

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
        """The negative log-likelihood and its floor: "3.52 nats; floor 3.47"."""
        return f"{self.nats:.2f} nats" + ("" if self.floor is None else f"; floor {self.floor:.2f}")


@dataclass(frozen=True)
class _Row:
    """What one row shows: points, p(x) on pixels, samples, grid lines (k, n, 2) and the radii of their codes."""

    window: Window
    data: Array
    density: Array
    samples: Array
    lines: Array
    radii: Array


def plot_toy_flows(
    panels: Sequence[ToyPanel],
    path: str | Path,
    *,
    dpi: int = 200,
    resolution: int = 300,
    points: int = 4000,
    seed: int = 0,
) -> Path:
    """Write one row of panels per flow as the PNG file `path`, and return its path.

    A density is evaluated on `resolution` x `resolution` pixels. The first `points` of the data are shown, with as
    many samples, drawn with `seed`. The flows are evaluated as copies in eval mode.
    """
    png_path(path)  # checked before anything is computed
    if not panels:
        raise ValueError("panels must hold at least one ToyPanel; got none. Pass one for each row.")
    at_least(2, dpi=dpi, resolution=resolution, points=points)
    rows = [_compute(panel, resolution, points, seed) for panel in panels]
    table = Panels((SIDE,) * len(rows), len(COLUMNS), SIDE, (GAP, BELOW), (NAMES, RIGHT, HEAD, BELOW + RIGHT / 2))
    with new_plot(path, table, dpi=dpi, theme=DARK) as canvas:
        for j, (title, subtitle) in enumerate(COLUMNS.items()):
            left, y = table.box(0, j)[0], canvas.height - HEAD
            canvas.text(left, y + 0.27, title, 12)
            canvas.note(left, y + 0.1, subtitle)
        for i, (panel, row) in enumerate(zip(panels, rows, strict=True)):
            data, density, samples, grid = (plane_axes(canvas, i, j, row.window) for j in range(len(COLUMNS)))
            draw_points(data, row.data)
            draw_density(density, row.density, row.window)
            draw_points(samples, row.samples)
            _draw_grid(grid, row)
            left, bottom, _, height = table.box(i)
            middle = bottom + height / 2
            canvas.text(RIGHT, middle, textwrap.fill(panel.name, 13, max_lines=3), 14, up="bottom")
            canvas.note(RIGHT, middle - 0.09, panel.score, HEADING, up="top")
            canvas.note(left, bottom - 0.11, textwrap.fill(panel.certificate_line, 160, max_lines=2), 7.5, up="top")
    return canvas.path


@torch.no_grad()
def _compute(panel: ToyPanel, resolution: int, points: int, seed: int) -> _Row:
    flow, data = copy.deepcopy(panel.flow).eval(), panel.data[:points]
    like, window = flow.base.mean, square_window(data)
    pixels, codes = pixel_centres(window, resolution).to(like), _grid_lines(2 * resolution).to(like)
    density = torch.cat([flow.log_prob(x) for x in torch.split(pixels, CHUNK)]).exp()
    if not bool(density.isfinite().all()):
        raise ValueError(f"the density of {panel.name!r} has NaN or infinity near its data. Train the flow again.")
    samples = flow.sample((len(data),), generator=torch.Generator(like.device).manual_seed(seed))
    pulled_back = [flow.transform.inverse(z) for z in torch.split(codes.reshape(-1, 2), CHUNK)]
    lines, density = torch.cat(pulled_back).reshape(codes.shape), density.reshape(resolution, resolution)
    return _Row(window, *(t.double().cpu().numpy() for t in (data, density, samples, lines, codes.norm(dim=-1))))


def square_window(data: Tensor) -> Window:
    """Return a square (left, right, bottom, top) around all but the outermost points, with a margin."""
    low, high = data.double().quantile(0.001, dim=0), data.double().quantile(0.999, dim=0)
    half = 0.58 * float((high - low).max()) or 1.0
    x, y = ((low + high) / 2).tolist()
    return x - half, x + half, y - half, y + half


def pixel_centres(window: Window, n: int) -> Tensor:
    """Return the centres of n x n pixels, (n * n, 2), row by row from the bottom."""
    left, right, bottom, top = window
    u = (torch.arange(n) + 0.5) / n
    y, x = torch.meshgrid(bottom + (top - bottom) * u, left + (right - left) * u, indexing="ij")
    return torch.stack([x, y], dim=-1).reshape(-1, 2)


def _grid_lines(n: int) -> Tensor:
    """Return the lines of the grid of codes, (lines, n, 2): first the vertical ones, then the horizontal ones."""
    levels = torch.linspace(-EDGE, EDGE, round(2 * EDGE / SPACING) + 1)
    vertical = torch.stack(torch.meshgrid(levels, torch.linspace(-EDGE, EDGE, n), indexing="ij"), dim=-1)
    return torch.cat([vertical, vertical.flip(-1)])


def plane_axes(canvas: Canvas, row: int, column: int, window: Window) -> Axes:
    """Add a panel that shows a window of the plane."""
    axes = canvas.panel(row, column)
    axes.set(xlim=window[:2], ylim=window[2:])
    return axes


def draw_points(axes: Axes, x: Array, size: float = 1.6) -> None:
    """Draw points (n, 2) as bright dots."""
    axes.scatter(x[:, 0], x[:, 1], s=size, color=POINTS, alpha=0.6, linewidths=0)


def draw_density(axes: Axes, density: Array, window: Window, brightness: float = 1.0) -> None:
    """Draw a density given on the pixels of a window, from the bottom row up."""
    # A sharp peak must not darken the rest: the brightest pixels, one in two hundred, share one colour.
    top = max(float(np.quantile(density, 0.995)), 1e-30) / brightness
    left, right, low, high = window
    style: dict[str, Any] = {"vmin": 0, "vmax": top, "origin": "lower", "interpolation": "bilinear", "aspect": "auto"}
    axes.imshow(density, NIGHT, extent=(left, right, low, high), **style)


def _draw_grid(axes: Axes, row: _Row) -> None:
    """Draw short pieces of the grid lines, coloured by the radius of their codes, over a faint density."""
    draw_density(axes, row.density, row.window, FAINT)
    # A piece has two steps and shares one with the next, so that no seam shows.
    pieces = np.stack([row.lines[:, :-2], row.lines[:, 1:-1], row.lines[:, 2:]], axis=2).reshape(-1, 3, 2)
    radii = row.radii[:, 1:-1].reshape(-1)
    order = np.argsort(-radii)  # the brightest on top
    colours = NIGHT(0.95 - 0.7 * radii[order] / radii.max())
    axes.add_collection(LineCollection(list(pieces[order]), colors=colours, linewidths=0.55, capstyle="round"))
