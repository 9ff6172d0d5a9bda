"""Unusual rows: the held-out rows of a table with the highest anomaly scores, and the columns that make them so.

The score of a row is the fraction of validation rows that are more likely. The gain of a column is how much more likely
the row would be with an ordinary value in this column, in nats.
"""

from __future__ import annotations

import math

import numpy as np

from .chart import Axis, Mark, area, axis, dots, plot
from .columns import row_values
from .markup import Markup, figure, joined, table, tag
from .material import Material, UnusualRows
from .words import cell, count, fixed, number, percent

#: Columns that are named for a row, bars of the histogram, and the scores whose frequency is shown.
REASONS, BARS, LEVELS = 3, 40, (0.9, 0.99)

MEANING = (
    "The anomaly score of a row is the fraction of validation rows that are more likely: at 0.99, one in a hundred of "
    "them is as unlikely. Rows that are less likely than all validation rows are only ranked. A gain is how much "
    "more likely the row would be, in nats, with an ordinary value in this column; gains do not add up. A high score "
    "says that a row is unlike the others, not that it is wrong."
)


def unusual(material: Material) -> Markup:
    """Render the rows with the highest scores, their columns, the distribution of scores, and what a score means."""
    found = material.unusual
    if found is None or not len(found.scores):
        return Markup("")
    names = [str(name) for name in found.names]
    content = [tag("p", MEANING, class_="note"), _top(material, found, names), row_values(material, names, found.rows)]
    return joined([*content, _distribution(material, found)])


def _top(material: Material, found: UnusualRows, names: list[str]) -> Markup:
    best = found.gains.topk(min(REASONS, found.gains.shape[1]), dim=1)
    rows = []
    for k, name in enumerate(names):
        places = zip(best.indices[k].tolist(), best.values[k].tolist(), strict=True)
        reasons = [_reason(material, found, k, j, gain) for j, gain in places]
        rows.append([name, score_text(float(found.top[k])), fixed(float(found.likelihoods[k]), 1), *reasons])
    word = material.schema.id or "row"
    head = [word, "score", "ln p", "column that contributes most", "second", "third"][: 3 + best.indices.shape[1]]
    caption = f"The {count(len(names), 'row')} with the highest scores, of {len(found.scores):,} {material.split} rows"
    caption += "" if material.schema.id else ", which are counted from 0"
    return table(caption, head, rows, kind="data unusual")


def _reason(material: Material, found: UnusualRows, k: int, j: int, gain: float) -> Markup:
    """Name a column with its value and gain; nothing if an ordinary value would not make the row more likely."""
    if not gain > 0:
        return Markup("")
    value = cell(material.schema.column_kinds[j], float(found.rows[k, j]))
    words = "cannot have this value" if math.isinf(gain) else f"gain {fixed(gain, 1)} nats"
    return joined([tag("b", material.columns[j]), f" {value}", tag("small", words)])


def score_text(score: float) -> str:
    """Return a score with four decimals, never rounded up to 1.

    >>> score_text(0.98349), score_text(0.99999), score_text(1.0)
    ('0.9835', '> 0.9999', '1')
    """
    return "1" if score >= 1 else "> 0.9999" if score > 0.9999 else f"{score:.4f}"


def _distribution(material: Material, found: UnusualRows) -> Markup:
    """Render a histogram of -ln p of all rows, the listed ones as dots, and how many rows have a high score."""
    values = -found.all_likelihoods.double().numpy()
    values = values[np.isfinite(values)]
    shares = [f"{percent(float((found.scores > s).double().mean()))} score above {s:g}" for s in LEVELS]
    expected = " and ".join(percent(1 - s) for s in LEVELS)
    words = (
        f"The negative log-likelihoods of {count(len(found.scores), f'{material.split} row')}; dots: the rows of the "
        f"table. {' and '.join(shares)}; {expected} are expected of rows of the same kind as the validation rows."
    )
    if not len(values):
        return Markup("")
    low, high = float(values.min()), float(values.max())
    heights, edges = np.histogram(values, BARS, (low, high if high > low else low + 1))
    air = 0.02 * float(edges[-1] - edges[0])
    x = axis(float(edges[0]) - air, float(edges[-1]) + air, "−ln p, nats")
    y = Axis(0, 1.1 * float(heights.max()))
    steps = [(float(e), float(h)) for k, h in enumerate(heights) for e in edges[k : k + 2]]
    top = [(-float(v), 0.03 * y.high) for v in found.likelihoods if math.isfinite(float(v))]
    marks: list[Mark] = [area(x, y, steps, "accent"), dots(x, y, top, "warm-dots")]
    description = f"Histogram of −ln p: {number(low)} to {number(high)} nats"
    return figure(plot(x, y, marks, description, kind="wide bare"), words)
