"""Plots in SVG whose curves stretch with the page while their text keeps its size.

The drawing lives in a square of 1000 units that is stretched to its frame (`preserveAspectRatio="none"`), with
strokes that do not scale; labels are HTML, placed in per cent. So one plot is right on a phone, a wide screen and
paper, in light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .markup import Markup, joined, tag
from .words import minus

UNITS = 1000

#: The numbers that an axis can hold, and the least it spans: beyond, their differences are no numbers any more.
LARGEST, SMALLEST = 1e300, 1e-290

#: How far outside an axis a place can be, in axes.
FAR = 1e4


@dataclass(frozen=True)
class Axis:
    """A range with ticks. `label` names the quantity and its unit."""

    low: float
    high: float
    label: str = ""
    ticks: tuple[float, ...] = ()

    def at(self, value: float) -> int:
        """The place of a value, in units."""
        return round(UNITS * self._share(value))

    def percent(self, value: float) -> str:
        return f"{100 * self._share(value):.1f}%"

    def _share(self, value: float) -> float:
        share = (max(-LARGEST, min(value, LARGEST)) - self.low) / (self.high - self.low)
        return max(-FAR, min(share, FAR))


@dataclass(frozen=True)
class Mark:
    """Something drawn: a line, dots, an area or a rule, in one of the style's colours."""

    d: str
    kind: str


def axis(low: float, high: float, label: str = "", *, ticks: int = 4, zero: bool = False) -> Axis:
    """A range with about so many round ticks; with `zero`, one that starts there.

    >>> axis(0.03, 2.2).ticks
    (0.5, 1.0, 1.5, 2.0)
    """
    low, high = (max(-LARGEST, min(v, LARGEST)) for v in (min(low, 0.0) if zero else low, high))
    if not high - low > SMALLEST:
        air = max(0.5 * abs(high), SMALLEST) if abs(high) > SMALLEST else 0.5
        low, high = low - (0.0 if zero else air), high + air
    step = _round_step((high - low) / ticks)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return Axis(low, high, label, tuple(round(i * step, 12) for i in range(first, last + 1)))


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next(m for m in (1, 2, 2.5, 5, 10) if m * power >= 0.75 * rough)


def line(x: Axis, y: Axis, points: Sequence[tuple[float, float]], kind: str) -> Mark:
    """A curve through points; what lies outside the axis runs out of the frame, which cuts it."""
    far = 20 * UNITS
    places = [(x.at(a), UNITS - max(-far, min(y.at(b), far))) for a, b in points]
    return Mark("M" + "L".join(f"{a} {b}" for a, b in places), f"line {kind}")


def dots(x: Axis, y: Axis, points: Sequence[tuple[float, float]], kind: str) -> Mark:
    """Dots that stay round: strokes of no length with round ends. Those outside the axes are left out."""
    inside = [(a, b) for a, b in points if x.low <= a <= x.high and y.low <= b <= y.high]
    return Mark("".join(f"M{x.at(a)} {UNITS - y.at(b)}h0" for a, b in inside), f"dots {kind}")


def area(x: Axis, y: Axis, points: Sequence[tuple[float, float]], kind: str) -> Mark:
    """The ground between a curve and the bottom."""
    path = line(x, y, points, "").d
    return Mark(f"{path}L{x.at(points[-1][0])} {UNITS}L{x.at(points[0][0])} {UNITS}Z", f"area {kind}")


def rule(y: Axis, value: float, kind: str) -> Mark:
    """A level line."""
    return Mark(f"M0 {UNITS - y.at(value)}H{UNITS}", f"line {kind}")


def drawing(marks: Sequence[Mark]) -> Markup:
    """The bare drawing, without labels."""
    paths = joined(tag("path", d=mark.d, class_=mark.kind) for mark in marks if mark.d)
    return tag("svg", paths, viewBox=f"0 0 {UNITS} {UNITS}", preserveAspectRatio="none")


def plot(x: Axis, y: Axis, marks: Sequence[Mark], description: str, *, kind: str = "") -> Markup:
    """A drawing with its ticks and labels: y's label above it, x's below. `description` is read to who cannot see."""
    grid = [Mark(f"M0 {UNITS - y.at(t)}H{UNITS}", "tick") for t in y.ticks]
    y_ticks = joined(tag("span", text, style=f"bottom:{y.percent(t)}") for t, text in _texts(y))
    x_ticks = joined(tag("span", text, style=f"left:{x.percent(t)}") for t, text in _texts(x))
    parts = [
        tag("div", y.label, class_="y-label") if y.label else "",
        tag("div", y_ticks, class_="y"),
        drawing([*grid, *marks]),
        tag("div", x_ticks, class_="x"),
        tag("div", x.label, class_="x-label") if x.label else "",
    ]
    return tag("div", *parts, class_=f"plot {kind}".strip(), role="img", aria_label=description)


def _texts(a: Axis) -> list[tuple[float, str]]:
    if not a.ticks:
        return []
    step = a.ticks[1] - a.ticks[0] if len(a.ticks) > 1 else abs(a.ticks[0]) or 1.0
    largest = max(abs(t) for t in a.ticks)
    if largest < 1e-3 or largest >= 1e7:
        return [(t, minus(f"{t:.3g}").replace("e−0", "e−").replace("e+0", "e")) for t in a.ticks]
    decimals = next((k for k in range(7) if abs(step * 10**k - round(step * 10**k)) < 1e-6), 7)
    return [(t, minus(f"{t:,.{decimals}f}")) for t in a.ticks]
