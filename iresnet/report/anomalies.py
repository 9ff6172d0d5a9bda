"""Anomalies: unusual rows of a table, and likelihood scores of corrupted inputs.

The score of an input is the fraction of validation data that is more likely, so it is uniform on data of the same kind.
"""

from __future__ import annotations

from .chart import Axis, dots, drawing
from .markup import Markup, joined, table, tag
from .material import Anomaly, Material
from .tiles import Look, fitting, look
from .unusual import unusual
from .words import fixed

KINDS, IMAGES, STRIP = 8, 8, 200
BUDGET = 18_500  # bytes of pixels in one row


def anomalies(material: Material) -> Markup:
    """Render the scores of each kind of corruption and, for images, a few examples."""
    kinds = [a for a in material.anomalies if len(a.images)][:KINDS]
    if not kinds:
        return unusual(material)
    rows = [[_name(a), _strip(a), fixed(float(a.scores.double().quantile(0.5)), 3)] for a in kinds]
    scale = joined([tag("span", "0"), " score ", tag("span", "1")])
    head = ["kind", tag("span", scale, class_="scale"), "median"]
    caption = "Anomaly scores; 1: less likely than all validation data"
    how = look(material) if material.is_image else None
    strips = joined([table(caption, head, rows, kind="strips"), _images(kinds, how) if how else ""])
    return joined([unusual(material), strips])


def _name(a: Anomaly) -> Markup:
    return joined([a.name, tag("small", a.note) if a.note else ""])


def _strip(a: Anomaly) -> Markup:
    x, y = Axis(0, 1), Axis(0, 1)
    points = [(s, 0.5) for s in a.scores[:STRIP].double().tolist()]
    return tag("span", drawing([dots(x, y, points, "accent")]), class_="strip")


def _images(kinds: list[Anomaly], how: Look) -> Markup:
    return tag("div", joined(_row(a, how) for a in kinds), class_="kinds")


def _row(a: Anomaly, how: Look) -> Markup:
    images = fitting(a.images, IMAGES, BUDGET)
    tiles = how.tiles(images, [f"{a.name}, {k + 1}" for k in range(len(images))])
    items = (
        tag("div", tile, tag("p", tag("span", fixed(float(score), 3)), class_="facts"))
        for tile, score in zip(tiles, a.scores, strict=False)
    )
    words = tag("figcaption", a.name)
    return tag("figure", words, tag("div", joined(items), class_="columns eight"), class_="kind-of")
