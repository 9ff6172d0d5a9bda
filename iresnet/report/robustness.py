"""Robustness: how many rows keep their class within a radius, proven, beside what an attack leaves of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..results import nonfinite_to_none
from ..spelling import round_down
from .markup import Markup, table, tag
from .material import Material
from .words import at_most, count, fixed, number

HOW = (
    "Certified: no change of at most this length, to values that the data can have, can change the class, by the "
    "margin of the logits and Lip(F). Under attack: what projected gradient descent leaves."
)


def robustness(found: Sequence[dict[str, Any]], material: Material) -> Markup:
    """One line a radius, what it rests on, and why nothing is certified, where that is so."""
    caption = f"Classes that are right and stay so, in percent of {count(found[0]['rows'], 'sample')}"
    scaled = any(nonfinite_to_none(r.get("pixel_radius")) is not None for r in found)
    head = ["l₂ radius", *(["for pixels in [0, 1]"] if scaled else [])]
    head += ["certified", "95 % interval", "under attack", "clean"]
    remarks = dict.fromkeys(_sentence(str(r["remark"])) for r in found if r.get("remark"))
    words = " ".join([HOW, *_bound(found[0], material), *remarks])
    return tag("div", table(caption, head, [_row(r, scaled) for r in found]), tag("p", words, class_="note"))


def _row(r: dict[str, Any], scaled: bool) -> list[str]:
    shares = [fixed(r["value"], 2), f"{fixed(r['low'], 2)} to {fixed(r['high'], 2)}"]
    shares += [fixed(r["attacked"], 2), fixed(r["clean"], 2)]
    return [number(r["radius"]), *([number(r.get("pixel_radius"))] if scaled else []), *shares]


def _bound(r: dict[str, Any], material: Material) -> list[str]:
    """The constant and the middle of what it proves; nothing where there is none, as a remark says then."""
    if nonfinite_to_none(r.get("lipschitz")) is None:
        return []
    if nonfinite_to_none(r.get("median")) is None:
        return [f"Lip(F) {at_most(r['lipschitz'])}."]
    unit = " grey levels" if material.is_image else ""
    median = number(float(round_down(r["median"], ".3g")))
    return [f"Lip(F) {at_most(r['lipschitz'])}; the median certified radius is {median}{unit}."]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
