"""Columns of a table: samples beside data, column by column and in pairs; the values of a row, categories by name."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..data.columns import ColumnKind
from ..plots import scatter
from .chart import Axis, Mark, area, axis, dots, drawing, line, plot
from .markup import Markup, figure, joined, more, table, tag
from .material import Material
from .words import cell, count, number, percent

#: Panels of columns, categories of one, rows of the table of columns, points of a small plot.
PANELS, CATEGORIES, NAMED, FEW = 24, 8, 20, 300

#: A column of whole numbers, or of multiples of a step, has a bar for each value up to so many values.
BARS = 60


def columns(material: Material, data: Tensor, drawn: Tensor) -> Markup:
    """Render samples of a table beside data: every column, pairs of columns, and quantiles."""
    xs, ys = scatter.as_arrays(data, drawn)
    kinds, names = material.schema.column_kinds, material.columns
    numbers = [j for j, kind in enumerate(kinds) if not kind.categories]
    content = [_panels(xs, ys, names, kinds)]
    if len(numbers) > 1:
        own = ([names[j] for j in numbers], [kinds[j] for j in numbers])
        noun = "columns" if len(numbers) == len(names) else "columns of numbers"
        content.append(_pairs(xs[:, numbers], ys[:, numbers], *own, noun))
    if numbers:
        content.append(_quantiles(data, drawn, names, numbers))
    return joined(content)


def _panels(xs: scatter.Array, ys: scatter.Array, names: Sequence[str], kinds: Sequence[ColumnKind]) -> Markup:
    """Render the distribution of each column: bars of numbers, shares of categories."""
    panels = []
    for j, (name, kind) in enumerate(zip(names[:PANELS], kinds, strict=False)):
        x, y = xs[:, j], ys[:, j]
        panels.append(tag("div", tag("h3", name), _shares(x, y, kind) if kind.categories else _bars(x, y, kind, name)))
    key = joined([tag("span", "data", class_="key-bound"), tag("span", "samples", class_="key-held-out")])
    first = f"the first {PANELS} of {len(names)} columns" if len(names) > PANELS else "every column"
    words = f"The distribution of {first}: {count(len(xs), 'real row')} and {count(len(ys), 'sample')}."
    return figure(joined([tag("div", key, class_="legend"), tag("div", joined(panels), class_="multiples")]), words)


def _bars(x: scatter.Array, y: scatter.Array, kind: ColumnKind, name: str) -> Markup:
    edges = _edges(x, kind)
    across = axis(float(edges[0]), float(edges[-1]), ticks=2)
    description = f"Histogram of {name}: data as a line, samples filled"
    up, marks = _histograms(across, x, y, edges, 1.1)
    return plot(across, up, marks, description, kind="small bare")


def _histograms(
    across: Axis, x: scatter.Array, y: scatter.Array, edges: scatter.Array, room: float
) -> tuple[Axis, list[Mark]]:
    """Draw the shares of the rows between edges, data as a line and samples filled, on an axis with room above."""
    heights = [np.histogram(column, edges)[0] / len(column) for column in (x, y)]
    up = Axis(0, room * max(float(h.max()) for h in heights) or 1.0)
    steps = [[(float(e), float(v)) for v, ends in zip(h, pairwise(edges), strict=True) for e in ends] for h in heights]
    return up, [area(across, up, steps[1], "accent"), line(across, up, steps[0], "ink-line")]


def _edges(x: scatter.Array, kind: ColumnKind) -> scatter.Array:
    """Return the edges of the bars: around each value of a discrete column with few of them."""
    low, high = scatter.window(x)
    if kind.step and (high - low) / kind.step <= BARS:
        first, last = (kind.step * round(float(v) / kind.step) for v in np.quantile(x, (0.001, 0.999)))
        return np.asarray(np.arange(first - kind.step / 2, last + kind.step, kind.step), dtype=np.float64)
    return np.linspace(low, high, scatter.BINS + 1)


def _shares(x: scatter.Array, y: scatter.Array, kind: ColumnKind) -> Markup:
    """Render the share of every category in data and samples, the most frequent first."""
    shares = [np.bincount(np.clip(c.round().astype(int), 0, None), minlength=len(kind.categories)) for c in (x, y)]
    own, drawn = (found[: len(kind.categories)] / max(1, len(c)) for found, c in zip(shares, (x, y), strict=True))
    order = np.argsort(-own, kind="stable")
    lines = [_share(kind.categories[k], float(own[k]), float(drawn[k])) for k in order[:CATEGORIES]]
    if len(order) > CATEGORIES:
        rest = order[CATEGORIES:]
        lines.append(_share(count(len(rest), "other"), float(own[rest].sum()), float(drawn[rest].sum())))
    return tag("div", joined(lines), class_="shares")


def _share(name: str, own: float, drawn: float) -> Markup:
    bars = (
        tag("span", style=f"--share:{share:.3f}", class_=f"meter {kind}") for share, kind in ((own, "ink"), (drawn, ""))
    )
    words = tag("p", tag("b", name), f" {percent(own)}, samples {percent(drawn)}")
    return tag("div", words, *bars)


def _pairs(
    xs: scatter.Array, ys: scatter.Array, names: Sequence[str], kinds: Sequence[ColumnKind], noun: str
) -> Markup:
    """Render every pair of the first columns: data below the diagonal, samples above, both as histograms on it."""
    d = min(xs.shape[1], scatter.COLUMNS)
    windows = [Axis(*scatter.window(xs[:, j])) for j in range(d)]
    cells = []
    for i in range(d):
        for j in range(d):
            if i == j:
                cells.append(_own(xs[:, j], ys[:, j], windows[j], kinds[j], names[j]))
            else:
                rows, kind = (xs, "ink-dots") if i > j else (ys, "accent")
                points = [(float(r[j]), float(r[i])) for r in rows[:FEW]]
                cells.append(tag("div", drawing([dots(windows[j], windows[i], points, kind)])))
    which = f"the first {d} of {xs.shape[1]} {noun}" if xs.shape[1] > d else f"all {d} {noun}"
    square = tag(
        "div", joined(cells), class_="pairs", role="img", aria_label=f"Pairs of {which}", style=f"--columns:{d}"
    )
    words = (
        f"Pairs of {which}: real samples below the diagonal, samples (in colour) above it, both as histograms on it."
    )
    return figure(square, words, kind="matrix")


def _own(x: scatter.Array, y: scatter.Array, window: Axis, kind: ColumnKind, name: str) -> Markup:
    _, marks = _histograms(window, x, y, _edges(x, kind), 1.5)
    return tag("div", drawing(marks), tag("span", name), class_="own")


def _quantiles(data: Tensor, drawn: Tensor, names: Sequence[str], numbers: Sequence[int]) -> Markup:
    rows = []
    for j in numbers[:NAMED]:
        cells = [names[j]]
        for column in (data[:, j].double(), drawn[:, j].double()):
            low, middle, high = (number(float(v)) for v in column.quantile(torch.tensor([0.05, 0.5, 0.95]).double()))
            cells += [middle, f"{low} to {high}"]
        rows.append(cells)
    first = f" (first {NAMED} of {len(numbers)})" if len(numbers) > NAMED else ""
    head = ["column", "data: median", "5 % to 95 %", "samples: median", "5 % to 95 %"]
    return table(f"Columns in the units of the data{first}", head, rows, kind="data")


def row_values(material: Material, names: Sequence[str], rows: Tensor) -> Markup:
    """Render all values of a few rows, shown on request."""
    kinds = material.schema.column_kinds
    lines = [
        [name, *(cell(kind, float(v)) for kind, v in zip(kinds, row, strict=True))]
        for name, row in zip(names, rows, strict=True)
    ]
    return more("All values of these rows", table("In the units of the data", ["row", *material.columns], lines))
