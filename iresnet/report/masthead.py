"""The head of the page: the name, a one-sentence summary, and the key metrics with error bars."""

from __future__ import annotations

import math
from typing import Any

from ..models import ORIGINS
from ..results import nonfinite_to_none
from .chart import UNITS, Axis, Mark, drawing
from .inverse import unproven
from .markup import Markup, joined, pairs, tag
from .material import Material
from .words import at_most, count, decimals_for, duration, fixed, listed, number


def masthead(material: Material) -> Markup:
    """Everything above the sections."""
    of_inverse = (_measured, _proven) if material.is_image else (_baseline,)
    found = (make(material) for make in (_error, _density, *of_inverse, _contraction))
    metrics = [figure for figure in found if figure is not None]
    return tag(
        "header",
        tag("h1", material.name),
        tag("p", summary(material), class_="summary"),
        tag("p", joined((tag("span", part) for part in _environment(material)), " · "), class_="circumstances"),
        pairs(metrics, kind="key") if metrics else "",
    )


def summary(material: Material) -> str:
    """Summarise the network in one sentence."""
    blocks = len(material.certificate.get("blocks") or [])
    size = f"{count(blocks, 'block')} and {material.parameters:,} parameters" if blocks else ""
    size = size or f"{material.parameters:,} parameters"
    abilities = _abilities(material)
    sentence = f"One {kind(material)} of {size}{' that ' + listed(abilities) if abilities else ''}."
    return f"{sentence} Its inverse is not proven." if material.unproven else sentence


def kind(material: Material) -> str:
    """What the network is called: by its family's name, and a residual network invertible where that is known."""
    if material.family in ORIGINS:
        return ORIGINS[material.family][0]
    return "invertible residual network" if material.is_inverted and not material.unproven else "residual network"


def _abilities(material: Material) -> list[str]:
    rows, e = what_rows_are(material), material.evaluation
    abilities = []
    classes = 0 if material.objective == "density" else len(material.schema.classes)
    if classes:
        wrong = e.get("error") or {}
        tested = wrong.get("rows") or e.get("rows")
        noted = f" ({wrong['wrong']} of {tested} wrong)" if "wrong" in wrong and tested else ""
        abilities.append(f"classifies {rows} into {classes} classes{noted}")
    if density := e.get("density"):
        of = "their likelihood" if classes else f"the likelihood of {rows}"
        beside = _beside_baseline(e)
        abilities.append(f"gives {of} ({number(density['value'])} {density['unit']}{beside})")
    if material.samples is not None:
        abilities.append("generates new ones" if abilities else f"generates {rows}")
    if material.unproven or not material.is_inverted:
        return abilities
    proof = ", with a proof for every block" if material.certificate.get("passed") else ""
    return [*abilities, f"is inverted{proof}"]


def _beside_baseline(e: dict[str, Any]) -> str:
    """Compare the likelihood with that of the best baseline, in a few words; empty if there is none."""
    if not (found := e.get("baselines")):
        return ""
    best = _best_baseline(found)
    which = "better" if best["gain"] >= 0 else "worse"
    return f", {number(abs(best['gain']), 2)} {which} than a {best['name']}"


def _best_baseline(found: list[dict[str, Any]]) -> dict[str, Any]:
    return min(found, key=lambda baseline: float(baseline["value"]))


def what_rows_are(material: Material) -> str:
    """The rows in words: "8 × 8 grey images"."""
    shape = material.schema.shape
    if material.is_image:
        colour = {1: "grey ", 3: "colour "}.get(shape[0], f"{shape[0]}-channel ")
        return f"{shape[1]} × {shape[2]} {colour}images"
    return "points in the plane" if shape == (2,) else f"rows of {count(shape[0], 'column')}"


def _environment(material: Material) -> list[str]:
    e = material.environment
    parts = [f"{material.objective} objective"]
    if isinstance(e.get("seconds"), int | float):
        parts.append(f"trained in {duration(e['seconds'])}")
    if e.get("date"):
        parts.append(str(e["date"])[:10])
    if e.get("commit"):
        parts.append(f"commit {str(e['commit'])[:8]}")
    return parts


def interval(low: float, value: float, high: float, decimals: int) -> Markup:
    """Render an error bar with its ends as numbers."""
    at = Axis(low, high).at(value) if 0 < high - low < math.inf else UNITS // 2
    marks = [Mark("M0 500H1000", "line"), Mark("M0 150V850M1000 150V850", "line"), Mark(f"M{at} 500h0", "dots")]
    ends = (tag("span", fixed(v, decimals)) for v in (low, high))
    return tag("div", next(ends), drawing(marks), next(ends), class_="bar")


def _metric(value: object, unit: str, bar: object, note: str) -> Markup:
    return joined([tag("strong", value), " " if unit else "", tag("span", unit, class_="unit"), bar, tag("p", note)])


def _error(material: Material) -> tuple[str, Markup] | None:
    e: dict[str, Any] = material.evaluation.get("error") or {}
    if not e:
        return None
    bar = interval(e["low"], e["value"], e["high"], 2) if None not in (e.get("low"), e.get("high")) else ""
    note = f"bar: {error_interval(material)}" if bar else "over all samples"
    return f"{material.split.capitalize()} error", _metric(fixed(e["value"], 2), "%", bar, note)


def error_interval(material: Material) -> str:
    """Describe the error bar of a classification error."""
    e = material.evaluation.get("error") or {}
    rows = e.get("rows") or material.evaluation.get("rows")
    return "95 % Wilson interval" + (f", {count(rows, 'sample')}" if rows else "")


def _density(material: Material) -> tuple[str, Markup] | None:
    d: dict[str, Any] = material.evaluation.get("density") or {}
    if not d:
        return None
    se = nonfinite_to_none(d.get("standard_error"))
    decimals = decimals_for(d.get("standard_error"))
    value = nonfinite_to_none(d["value"])
    bar = interval(value - se, value, value + se, decimals) if se and value is not None else ""
    note = "bar: one standard error over test data" if bar else "mean over test data"
    return "Negative log-likelihood", _metric(fixed(d["value"], decimals), d["unit"], bar, note)


def _baseline(material: Material) -> tuple[str, Markup] | None:
    """By how much the model is better than the best baseline."""
    found: list[dict[str, Any]] = material.evaluation.get("baselines") or []
    if not found:
        return None
    best = _best_baseline(found)
    gain, error, decimals = best["gain"], best["gain_error"], decimals_for(best["gain_error"])
    bar = interval(gain - error, gain, gain + error, decimals)
    note = f"bar: one standard error; {fixed(best['value'], decimals)} nats by the {best['name']}"
    title = f"{'Better' if gain >= 0 else 'Worse'} than a {best['name'].split(' of ')[0]}, by"
    return title, _metric(fixed(abs(gain), decimals), "nats", bar if gain >= 0 else "", note)


def _measured(material: Material) -> tuple[str, Markup] | None:
    i: dict[str, Any] = material.evaluation.get("inverse") or {}
    if "measured_error" not in i:
        return None
    found, rows = nonfinite_to_none(i["measured_error"]), count(i["rows"], "sample")
    note = f"measured: largest l₂ distance to the true input, {rows}"
    if found is None:
        note = f"measured: the iteration diverges for the worst of {rows}"
    return "Error of the inverse", _metric("∞" if found is None else number(found), "", "", note)


def _proven(material: Material) -> tuple[str, Markup] | None:
    i: dict[str, Any] = material.evaluation.get("inverse") or {}
    if "largest_block_bound" not in i:
        return None
    bound = nonfinite_to_none(i["largest_block_bound"])
    rows = f"{i['proven']:,} of {count(i['rows'], 'sample')}"
    note = f"proven: largest error bound of one block’s inverse, {rows}"
    if bound is None:
        note = f"no bound: {unproven(i)}; {rows} proven"
    return "Inverse, bound per block", _metric("∞" if bound is None else at_most(bound), "", "", note)


def _contraction(material: Material) -> tuple[str, Markup] | None:
    blocks: list[dict[str, Any]] = material.certificate.get("blocks") or []
    if not blocks:
        return None
    bounds = [b["lipschitz"] for b in blocks if b.get("lipschitz") is not None]
    largest = max(bounds) if len(bounds) == len(blocks) else None
    good = sum(b.get("verdict") == "proven" for b in blocks)
    if not material.is_image:
        word = "proven" if material.certificate.get("passed") else "not proven"
        note = (
            f"{good} of {count(len(blocks), 'block')} proven to be contractions, largest Lip(g) {at_most(largest, 4)}"
        )
        return "Invertible", _metric(word, "", "", note)
    word = "proven" if good == len(blocks) else "NOT proven for all"
    note = f"{word}: largest Lip(g); {good} of {count(len(blocks), 'block')} below 1"
    return "Lipschitz constant", _metric(at_most(largest, 4), "", "", note)
