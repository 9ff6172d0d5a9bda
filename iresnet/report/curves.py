"""Training curves: every logged metric against the step, on training and validation data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from .chart import LARGEST, Axis, Mark, axis, dots, line, plot
from .markup import Markup, figure, joined, tag
from .material import Material
from .words import listed, number

#: (step, value) in the order of the steps.
Series: TypeAlias = list[tuple[float, float]]

POINTS = 500  # of one curve, at the most
HELD_OUT = "validation "
NAMES = {
    "loss": "loss",
    "bits/dim": "bits per dimension",
    "nats": "nats per sample",
    "truncation bits/dim": "truncation error of the training estimator, bits per dimension",
    "learning_rate": "learning rate",
    "cross-entropy": "cross-entropy, nats",
}


def training(material: Material) -> Markup:
    """Render one chart per logged metric; the learning rate comes last."""
    names = _metrics(material.log)
    charts = [_chart(material.log, name, material.released) for name in names]
    if not charts:
        return Markup("")
    notes = ["Axes of losses and likelihoods do not start at zero; axes of errors and learning rates do."]
    if len(material.log) > POINTS:
        per = -(-len(material.log) // POINTS)
        notes.append(f"Each point of a training curve is the mean of {per} of the {len(material.log):,} logged values.")
    if material.released is not None:
        notes.append(f"The dot marks step {material.released:,}, whose weights are released.")
    if cut := [note for _, note in charts if note]:
        notes.append(f"Cut off at the top, at the start of training: {listed(cut)}.")
    return figure(tag("div", joined(chart for chart, _ in charts), class_="charts"), " ".join(notes))


def _metrics(log: Sequence[dict[str, float | None]]) -> list[str]:
    """Return the names of the logged metrics, in the order of their first appearance."""
    others = ("step", "seconds", "learning_rate")
    keys = dict.fromkeys(k.removeprefix(HELD_OUT) for row in log for k in row if k not in others)
    names = [k for k in keys if series(log, k) or series(log, HELD_OUT + k)]
    loss = series(log, "loss")
    if loss and not series(log, HELD_OUT + "loss") and any(k != "loss" and series(log, k) == loss for k in names):
        names.remove("loss")  # a loss that equals the likelihood is shown once
    return names[:8] + (["learning_rate"] if series(log, "learning_rate") else [])


def series(log: Sequence[dict[str, float | None]], name: str) -> Series:
    """Return (step, value) of every logged line that has both, if the value can be drawn."""
    pairs = [(row.get("step"), row.get(name)) for row in log]
    return [(s, v) for s, v in pairs if s is not None and v is not None and abs(v) < LARGEST]


def thinned(points: Series, most: int = POINTS) -> Series:
    """Thin a curve to at most so many points, by means over neighbours.

    >>> thinned([(0, 1.0), (1, 3.0), (2, 5.0), (3, 5.0)], most=2)
    [(0.5, 2.0), (2.5, 5.0)]
    """
    k = -(-len(points) // most)
    if k <= 1:
        return points
    groups = [points[i : i + k] for i in range(0, len(points), k)]
    return [(sum(s for s, _ in g) / len(g), sum(v for _, v in g) / len(g)) for g in groups]


def _chart(log: Sequence[dict[str, float | None]], name: str, released: int | None) -> tuple[Markup, str]:
    """Render the chart, with a dot at the released step, else at the last one.

    Also return a note on what its axis cuts off at the top, if anything.
    """
    trained, held_out = thinned(series(log, name)), thinned(series(log, HELD_OUT + name))
    title, both = NAMES.get(name, name), trained + held_out
    x = axis(0.0, 1.015 * max(s for s, _ in both), "step")
    y, highest = _y_axis(both, zero=name == "learning_rate" or "error" in name)
    cut = f"{title} (up to {number(highest)})" if highest > y.high else ""
    marks, chosen = list[Mark](), Series()
    if trained:
        marks.append(line(x, y, trained, "train"))
    if held_out:
        chosen = [point for point in series(log, HELD_OUT + name) if point[0] == released] or held_out[-1:]
        marks += [line(x, y, held_out, "held-out"), dots(x, y, chosen, "held-out")]
    ends = [f"{w} ends at {number(s[-1][1])}" for w, s in (("training", trained), ("validation", held_out)) if s]
    description = f"{title} against steps: {', '.join(ends)}."
    head = tag("div", tag("h3", title), _legend(trained, chosen), class_="chart-head")
    return tag("div", head, plot(x, y, marks, description, kind="low" if name == "learning_rate" else "wide")), cut


def _y_axis(points: Series, *, zero: bool) -> tuple[Axis, float]:
    """Return an axis that fits all but the first 5 % of the steps, and the highest value, which may lie above it."""
    start = 0.05 * max(s for s, _ in points)
    low, highest = min(v for _, v in points), max(v for _, v in points)
    later = max(v for s, v in points if s >= start)
    top = low + 1.06 * (later - low)
    if highest - low < 1.5 * (top - low):  # too little would be cut off to be worth it
        top = low + 1.06 * (highest - low)
    return axis(low if zero else low - 0.06 * (top - low), top, zero=zero), highest


def _legend(trained: Series, chosen: Series) -> Markup:
    parts = []
    if trained:
        parts.append(tag("span", "training", class_="key-train"))
    if chosen:
        parts.append(tag("span", "validation ", tag("b", number(chosen[-1][1])), class_="key-held-out"))
    return tag("div", joined(parts), class_="legend") if chosen else Markup("")
