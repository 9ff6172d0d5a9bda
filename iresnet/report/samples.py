"""Samples beside data, and decoded interpolations between codes: as images, points or columns."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..plots import scatter
from .chart import Axis, area, axis, dots, drawing, line, plot
from .markup import Markup, figure, joined, table, tag
from .material import Material
from .tiles import fitting, grid, look, reduction
from .words import count, number

#: Images of a grid, points of a plot, points of a small plot, rows of the table of columns.
IMAGES, POINTS, FEW, NAMED = 64, 1000, 300, 20
PAIRS, STEPS, BUDGET = 6, 9, 115_000  # of an interpolation; bytes of its pixels


def samples(material: Material) -> Markup:
    """Samples, with real rows beside them where there are some."""
    if material.samples is None or len(material.samples) == 0:
        return Markup("")
    if material.is_image:
        return _images(material, material.samples)
    data = material.data if material.data is not None and len(material.data) else material.samples
    if material.schema.shape == (2,):
        return _points(material, data, material.samples)
    return _columns(material, data, material.samples)


def _images(material: Material, drawn: Tensor) -> Markup:
    how, frames = look(material), list[Markup]()
    for name, images in (("Samples", drawn), (f"{material.split.capitalize()} data", material.data)):
        if images is not None and len(images):
            shown = fitting(images, IMAGES)
            shown = shown[: len(shown) // 8 * 8 or len(shown)]
            content = grid(shown, how, f"{count(len(shown), 'image')}: {name.lower()}", min(8, len(shown)))
            frames.append(figure(content, f"{name}. {how.note() if not frames else reduction(material)}"))
    return tag("div", joined(frames), class_="beside")


def _points(material: Material, data: Tensor, drawn: Tensor) -> Markup:
    xs, ys = scatter.as_arrays(data, drawn)
    (left, right), (bottom, top) = scatter.square_window(xs)
    x, y = axis(left, right, material.columns[0]), axis(bottom, top, material.columns[1])
    frames = []
    for name, rows, kind in (("Samples", ys, "accent"), (f"{material.split.capitalize()} data", xs, "ink-dots")):
        if kind == "accent" or material.data is not None:
            points = [(float(a), float(b)) for a, b in rows[:POINTS]]
            content = plot(x, y, [dots(x, y, points, kind)], f"{name}: {count(len(points), 'point')}", kind="square")
            frames.append(figure(content, f"{name}: {count(len(points), 'point')}, the same window."))
    return tag("div", joined(frames), class_="beside")


def _columns(material: Material, data: Tensor, drawn: Tensor) -> Markup:
    """Every pair of the first columns: data below the diagonal, samples above, both as histograms on it."""
    xs, ys = scatter.as_arrays(data, drawn)
    d = min(xs.shape[1], scatter.COLUMNS)
    windows = [Axis(*scatter.window(xs[:, j])) for j in range(d)]
    cells = []
    for i in range(d):
        for j in range(d):
            if i == j:
                cells.append(_histograms(xs[:, j], ys[:, j], windows[j], material.columns[j]))
            else:
                rows, kind = (xs, "ink-dots") if i > j else (ys, "accent")
                points = [(float(r[j]), float(r[i])) for r in rows[:FEW]]
                cells.append(tag("div", drawing([dots(windows[j], windows[i], points, kind)])))
    which = f"the first {d} of {xs.shape[1]} columns" if xs.shape[1] > d else f"all {d} columns"
    square = tag(
        "div", joined(cells), class_="pairs", role="img", aria_label=f"Pairs of {which}", style=f"--columns:{d}"
    )
    words = (
        f"Pairs of {which}: real samples below the diagonal, samples (in colour) above it, both as histograms on it."
    )
    return joined([figure(square, words, kind="matrix"), _moments(material, data, drawn)])


def _histograms(x: scatter.Array, y: scatter.Array, window: Axis, name: str) -> Markup:
    heights = [scatter.histogram(column, window.low, window.high) for column in (x, y)]
    across, up = Axis(0, scatter.BINS), Axis(0, 1.5 * max(float(h.max()) for h in heights) or 1.0)
    steps = [[(k + e, float(v)) for k, v in enumerate(h) for e in (0, 1)] for h in heights]
    marks = [area(across, up, steps[1], "accent"), line(across, up, steps[0], "ink-line")]
    return tag("div", drawing(marks), tag("span", name), class_="own")


def _moments(material: Material, data: Tensor, drawn: Tensor) -> Markup:
    rows = []
    for j, name in enumerate(material.columns[:NAMED]):
        cells = [name]
        for column in (data[:, j].double(), drawn[:, j].double()):
            low, middle, high = (number(float(v)) for v in column.quantile(torch.tensor([0.05, 0.5, 0.95]).double()))
            cells += [middle, f"{low} to {high}"]
        rows.append(cells)
    more = f" (first {NAMED} of {len(material.columns)})" if len(material.columns) > NAMED else ""
    head = ["column", "data: median", "5 % to 95 %", "samples: median", "5 % to 95 %"]
    return table(f"Columns in the units of the data{more}", head, rows, kind="data")


def interpolation(material: Material) -> Markup:
    """Straight lines between the codes of two rows, decoded step by step."""
    lines = material.interpolation
    if lines is None and material.unproven:
        words = "Left out: interpolation needs a proven inverse, and not every block is proven to be a contraction."
        return tag("p", words, class_="note")
    if lines is None or 0 in lines.shape[:2]:
        return Markup("")
    if material.is_image:
        return _image_lines(material, lines)
    return _plane_lines(material, lines) if material.schema.shape == (2,) else _column_lines(material, lines)


def _image_lines(material: Material, lines: Tensor) -> Markup:
    keep = torch.linspace(0, lines.shape[1] - 1, min(STEPS, lines.shape[1])).round().long()
    lines = lines[:PAIRS, keep]
    shown = fitting(lines.flatten(0, 1), PAIRS * STEPS, BUDGET)
    pairs = max(1, len(shown) // len(keep))
    content = grid(shown[: pairs * len(keep)], look(material), f"{count(pairs, 'row')} of images", len(keep))
    return figure(content, f"Each row interpolates between two {material.split} images (left and right).", kind="lines")


def _plane_lines(material: Material, lines: Tensor) -> Markup:
    lines = lines[: 4 * PAIRS]
    ends = lines.flatten(0, 1)
    xs, ways = scatter.as_arrays(ends if material.data is None else material.data, ends)
    (left, right), (bottom, top) = scatter.square_window(np.concatenate([xs, ways]))
    x, y = axis(left, right, material.columns[0]), axis(bottom, top, material.columns[1])
    marks = [] if material.data is None else [dots(x, y, [(float(a), float(b)) for a, b in xs[:POINTS]], "faint")]
    for pair in lines.double().tolist():
        marks += [line(x, y, pair, "path"), dots(x, y, [pair[0], pair[-1]], "accent big")]
    content = plot(x, y, marks, f"{count(len(lines), 'decoded line')} in the plane", kind="square")
    return figure(content, f"Each line interpolates between two {material.split} points; grey: data.", kind="half")


def _column_lines(material: Material, lines: Tensor) -> Markup:
    x, charts = axis(0, 1, "position between the two codes", ticks=2), []
    for j, name in enumerate(material.columns[: scatter.COLUMNS]):
        values = lines[:PAIRS, :, j].double()
        air = 0.06 * float(values.max() - values.min())
        y = axis(float(values.min()) - air, float(values.max()) + air)
        ways = [[(k / max(1, len(way) - 1), v) for k, v in enumerate(way)] for way in values.tolist()]
        content = plot(x, y, [line(x, y, way, "path") for way in ways], f"{name} along the lines", kind="wide")
        charts.append(tag("div", tag("div", tag("h3", name), class_="chart-head"), content))
    words = "One line for each pair of samples; axes do not start at zero."
    return figure(tag("div", joined(charts), class_="charts"), words)
