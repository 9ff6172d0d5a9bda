"""Samples beside data, and decoded interpolations between codes: as images, points or columns."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..plots import scatter
from .chart import axis, dots, line, plot
from .columns import columns
from .markup import Markup, figure, joined, tag
from .material import Material
from .tiles import fitting, grid, look, reduction
from .words import count

#: Images of a grid, points of a plot.
IMAGES, POINTS = 64, 1000
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
    return columns(material, data, material.samples)


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
    numbers = [j for j, kind in enumerate(material.schema.column_kinds) if not kind.categories]
    for j in numbers[: scatter.COLUMNS]:
        name = material.columns[j]
        values = lines[:PAIRS, :, j].double()
        air = 0.06 * float(values.max() - values.min())
        y = axis(float(values.min()) - air, float(values.max()) + air)
        ways = [[(k / max(1, len(way) - 1), v) for k, v in enumerate(way)] for way in values.tolist()]
        content = plot(x, y, [line(x, y, way, "path") for way in ways], f"{name} along the lines", kind="wide")
        charts.append(tag("div", tag("div", tag("h3", name), class_="chart-head"), content))
    words = "One line for each pair of samples; axes do not start at zero."
    words += " Columns of categories are left out." if len(numbers) < len(material.columns) else ""
    if not charts:
        return Markup("")
    return figure(tag("div", joined(charts), class_="charts"), words)
