"""Test metrics: every metric with its error bar, explained, and the confusion matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..results import nonfinite_to_none
from .markup import Markup, joined, scroller, table, tag
from .masthead import error_interval
from .material import Material
from .robustness import robustness
from .words import at_most, count, decimals_for, fixed, number

#: Classes for which the whole matrix is shown; beyond that, the most frequent confusions.
MATRIX, LISTED = 20, 12


def scores(material: Material) -> Markup:
    """Render the table of metrics, and the confusion matrix of a classifier."""
    rows = _rows(material)
    content = []
    if rows:
        counted = material.evaluation.get("rows")
        caption = f"Metrics on the {material.split} split" + (f", {count(counted, 'sample')}" if counted else "")
        content.append(table(caption, ["metric", "value", "error bar", "meaning"], rows, kind="figures"))
    density, found = material.evaluation.get("density"), material.evaluation.get("baselines")
    if density and found:
        content.append(_baselines(density, found))
    if robust := material.evaluation.get("robustness"):
        content.append(robustness(robust, material))
    if confusion := material.evaluation.get("confusion"):
        content.append(_confusion(confusion, _class_names(material, len(confusion)), material.split))
    return joined(content)


def _rows(material: Material) -> list[list[object]]:
    e = material.evaluation
    rows: list[list[object]] = []
    if error := e.get("error"):
        bounded = None not in (error.get("low"), error.get("high"))
        bar = f"{fixed(error['low'], 2)} to {fixed(error['high'], 2)} %" if bounded else "–"
        wrong = f"{count(error['wrong'], 'sample')} wrong; " if error.get("wrong") is not None else ""
        rows.append(["classification error", f"{fixed(error['value'], 2)} %", bar, wrong + error_interval(material)])
    if density := e.get("density"):
        rows += _density_rows(density, integrated=material.family == "ffjord")
    if probe := e.get("probe"):
        rows += _probe_rows(probe)
    if tightening := e.get("tightening"):
        changed = f"{tightening['predictions_changed']} of {count(tightening['rows'], 'sample')}"
        why = (
            f"{count(tightening['layers'], 'layer')} scaled down to the coefficient before these metrics were computed"
        )
        rows.append(["predictions changed by tightening", changed, "", why])
    return rows


def _probe_rows(p: dict[str, Any]) -> list[list[object]]:
    """The error of logistic regression on codes, and on the inputs beside it."""
    rows: list[list[object]] = []
    for name, e in (("codes", p["codes"]), ("inputs", p["inputs"])):
        bar = f"{fixed(e['low'], 2)} to {fixed(e['high'], 2)} %"
        why = f"95 % Wilson interval, {count(e['rows'], 'sample')}; fitted to {count(p['rows'], 'training sample')}"
        rows.append([f"error of a linear probe on {name}", f"{fixed(e['value'], 2)} %", bar, why])
    return rows


def _density_rows(d: dict[str, Any], *, integrated: bool = False) -> list[list[object]]:
    se, unit = nonfinite_to_none(d.get("standard_error")), d["unit"]
    decimals = decimals_for(se)
    value = f"{fixed(d['value'], decimals)} {unit}"
    over = "one standard error: the spread expected for other test data"
    bar = [f"± {fixed(se, decimals)}", over] if se else ["", "no error bar is known"]
    rows: list[list[object]] = [["negative log-likelihood", value, *bar]]
    if estimator := nonfinite_to_none(d.get("estimator_error")):
        draws = f", {count(d['draws'], 'draw')} per sample" if d.get("draws") else ""
        rows.append(["", "", f"± {number(estimator)}", f"one standard error of the estimator{draws}"])
    if integrated:
        why = "the log-determinant is the integral of a trace, within the tolerances of its solver"
        rows.append(["", "", "no bound known", why])
    elif "bias_bound" in d and d["bias_bound"] is None:  # infinite
        rows.append(["", "", "no bound known", "a part of the model is not known, or its constant is asserted"])
    elif (bias := d.get("bias_bound")) is not None:
        exact = (
            "the log-determinant is exact, or estimated without bias"
            if bias == 0
            else "proven bound on the truncation error of the series"
        )
        rows.append(["", "", "no bias" if bias == 0 else f"bias {at_most(bias)}", exact])
    return rows


def _baselines(own: dict[str, Any], found: list[dict[str, Any]]) -> Markup:
    """Render the likelihood of the model between those of the baselines, and what they were fitted to."""
    decimals = max(decimals_for(b.get("gain_error")) for b in found)
    rows: list[list[object]] = [["this model", fixed(own["value"], decimals), "", "", ""]]
    for b in found:
        gain = [fixed(b["gain"], decimals), f"± {fixed(b['gain_error'], decimals)}", f"{number(math.exp(b['gain']))}"]
        rows.append([b["name"], fixed(b["value"], decimals), *gain])
    head = [
        "density",
        "nats per row (lower is better)",
        "the model is better by",
        "standard error",
        "times as likely",
    ]
    words = (
        f"Baselines on the same rows and in the same units, fitted to {count(found[0]['fitted'], 'training row')} as "
        "the model sees them: with noise in discrete columns, and logarithm or logit at bounds. Validation rows choose "
        "the number of Gaussians. Differences are taken row by row; the last column is the exponential of their mean, "
        "how many times as likely a row is under this model (geometric mean)."
    )
    return joined([table("Compared with baselines", head, rows, kind="data"), tag("p", words, class_="note")])


def _class_names(material: Material, n: int) -> list[str]:
    given = [str(name) for name in material.schema.classes]
    return given if len(given) == n else [str(i) for i in range(n)]


def _confusion(counts: Sequence[Sequence[int]], names: Sequence[str], split: str) -> Markup:
    if len(counts) > MATRIX:
        return _most_confused(counts, names)
    caption = f"Samples of the {split} split: true class down, predicted class across"
    upright = "upright" if sum(len(name) for name in names) > 32 else None
    head = tag("tr", tag("td"), joined(tag("th", tag("span", name), scope="col") for name in names), class_=upright)
    body = joined(
        tag("tr", tag("th", name, scope="row"), joined(_cell(row, i, j) for j in range(len(row))))
        for i, (name, row) in enumerate(zip(names, counts, strict=True))
    )
    inner = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", body), class_="confusion")
    return scroller(inner, caption)


def _cell(row: Sequence[int], i: int, j: int) -> Markup:
    share = row[j] / max(sum(row), 1)
    kind = "right" if i == j else "wrong" if row[j] else None
    return tag("td", f"{row[j]:,}" if row[j] else "·", class_=kind, style=f"--share:{share:.2f}" if kind else None)


def _most_confused(counts: Sequence[Sequence[int]], names: Sequence[str]) -> Markup:
    wrong = [(n, i, j) for i, row in enumerate(counts) for j, n in enumerate(row) if i != j and n]
    rows = [[names[i], names[j], n] for n, i, j in sorted(wrong, key=lambda w: -w[0])[:LISTED]]
    if not rows:
        return Markup("")
    return table(f"The most frequent confusions of {len(names)} classes", ["true", "predicted", "samples"], rows)
