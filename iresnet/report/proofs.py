"""Proofs: the singular values of each layer beside its bound, and the certificate, block by block."""

from __future__ import annotations

from typing import Any

from .chart import Axis, Mark, area, axis, dots, line, plot, rule
from .curves import thinned
from .markup import Markup, figure, joined, more, pairs, table, tag
from .material import Material, SpectrumOfLayer
from .words import at_most, count, fixed, number

#: Layers and blocks shown unfolded; points of one layer's curve.
LAYERS, BLOCKS, VALUES = 12, 16, 40

COVERS = [
    "Every bound is an upper bound for the function with the stored weights, in real arithmetic; shown rounded up.",
    "Where Lip(g) < 1, the block x + g(x) has exactly one inverse for every code (Theorem 1).",
    "From these bounds follow Lip(F), Lip(F⁻¹) (Lemma 2) and the range of ln det (Lemma 7).",
]
LEAVES_OUT = [
    "Rounding in the forward pass.",
    "Input sizes other than the one shown, and weights after further training.",
    "How well the density fits, or how well the classifier classifies.",
    "A constant that the user asserted is marked, and never passes.",
]


def singular_values(material: Material) -> Markup:
    """One small plot a layer, all on the same axis."""
    spectra = [s for s in material.spectra if s.values]
    if not spectra:
        return Markup("")
    top = max(1.0, *(max(s.bound, s.coefficient or 0.0, *s.values) for s in spectra))
    y = axis(0.0, 1.08 * top, ticks=2, zero=True)
    charts = [_spectrum(s, y) for s in spectra]
    content = tag("div", joined(charts[:LAYERS]), class_="multiples")
    if len(charts) > LAYERS:
        rest = tag("div", joined(charts[LAYERS:]), class_="multiples")
        content = joined([content, more(f"The other {count(len(charts) - LAYERS, 'layer')}", rest)])
    key = joined([tag("span", "proven bound", class_="key-bound"), tag("span", "coefficient", class_="key-asked")])
    words = "Singular values from the largest to the smallest, every layer on the same axis."
    return figure(joined([tag("div", key, class_="legend"), content]), words)


def _spectrum(s: SpectrumOfLayer, y: Axis) -> Markup:
    n = len(s.values)
    x = Axis(0.5, n + 0.5, "", (1, n) if n > 1 else (1,))
    points = thinned([(k + 1.0, v) for k, v in enumerate(s.values)], VALUES)
    marks: list[Mark] = [area(x, y, points, "accent"), line(x, y, points, "accent-line")] if n > 1 else []
    if n <= 24:
        marks.append(dots(x, y, points, "accent"))
    marks.append(rule(y, s.bound, "bound"))
    if s.coefficient is not None:
        marks.append(rule(y, s.coefficient, "asked"))
    facts = [f"σ₁ {fixed(s.values[0], 4)} {at_most(s.bound, 4)}"]
    facts += [] if s.coefficient is None else [f"coefficient {fixed(s.coefficient, 4)}"]
    content = plot(x, y, marks, f"{count(n, 'singular value')} of {s.name}: {', '.join(facts)}", kind="small")
    return tag("div", tag("h3", s.name), content, tag("p", joined(tag("span", f) for f in facts), class_="facts"))


def certificate(material: Material) -> Markup:
    """The verdict, the blocks, their layers on request, what it covers and what it does not."""
    c = material.certificate
    blocks: list[dict[str, Any]] = c.get("blocks") or []
    if not blocks:
        return Markup("")
    verdict = tag("p", _verdict(c, blocks), class_="verdict" if c.get("passed") else "verdict failed")
    shown = _blocks(blocks)
    if len(blocks) > BLOCKS:
        shown = joined([_overview(blocks), more(f"All {len(blocks)} blocks", shown)])
    layers = [layer for b in blocks for layer in b.get("layers") or [] if layer.get("estimate") is not None]
    every = more(f"Every layer of every block ({len(layers)})", _layers(blocks)) if layers else ""
    scope = tag("div", _list("What is proven", COVERS), _list("What is not proven", LEAVES_OUT), class_="beside")
    return joined([verdict, _stretch(c.get("stretch")), shown, every, scope])


def _verdict(c: dict[str, Any], blocks: list[dict[str, Any]]) -> Markup:
    good = sum(b.get("verdict") == "proven" for b in blocks)
    word = "Invertible: proven." if c.get("passed") else "Invertible: not proven."
    text = f" {good} of {count(len(blocks), 'block')} proven to be contractions."
    return joined([tag("strong", word), text])


def _stretch(stretch: dict[str, Any] | None) -> Markup:
    if not stretch:
        return Markup("")
    items = [("Lip(F)", at_most(stretch.get("forward"))), ("Lip(F⁻¹)", at_most(stretch.get("inverse")))]
    if (logdet := stretch.get("logdet")) and None not in logdet:
        items.append(("ln det", f"{number(logdet[0])} to {number(logdet[1])}"))
    return pairs(((name, tag("strong", text)) for name, text in items), kind="key small-key")


def _blocks(blocks: list[dict[str, Any]]) -> Markup:
    return table(
        "Residual blocks, in the order of the forward pass",
        ["block", "input", "Lip(g)", Markup(""), "Lip of the inverse", "status"],
        [_block(b) for b in blocks],
        kind="blocks",
    )


def _block(b: dict[str, Any]) -> list[object]:
    bound = b.get("lipschitz")
    inverse = None if bound is None or bound >= 1 else 1 / (1 - bound)
    bar = "" if bound is None else tag("span", style=f"--share:{min(1.0, bound):.3f}", class_="meter")
    verdict: object = b.get("verdict") or ""
    if verdict != "proven":
        verdict = joined([tag("em", verdict, class_="flag"), f" {b['remark']}" if b.get("remark") else ""])
    return [b["name"], _shape(b.get("input_shape")), at_most(bound, 4), bar, at_most(inverse, 2), verdict]


def _shape(shape: list[int] | None) -> str:
    return " × ".join(str(n) for n in shape) if shape else "any"


def _overview(blocks: list[dict[str, Any]]) -> Markup:
    points = [(k + 1.0, float(b["lipschitz"])) for k, b in enumerate(blocks) if b.get("lipschitz") is not None]
    x = axis(0, len(blocks) + 1, "block, in the order of the forward pass")
    y = axis(0, max([1.1, *(1.05 * v for _, v in points)]), "proven bound of Lip(g)", ticks=3, zero=True)
    marks = [rule(y, 1.0, "asked"), dots(x, y, points, "accent big")]
    content = plot(x, y, marks, f"Proven bounds of {count(len(points), 'block')}", kind="wide")
    return figure(content, "A block below the dashed line is a contraction.")


def _layers(blocks: list[dict[str, Any]]) -> Markup:
    rows = [
        [f"{b['name']}.{layer['name']}", layer["kind"], fixed(layer.get("coefficient"), 4), *_norm(layer)]
        for b in blocks
        for layer in b.get("layers") or []
        if layer.get("estimate") is not None
    ]
    head = ["layer", "kind", "coefficient", "estimate", "bound"]
    return table("Spectral norms: the estimate is below the norm, the bound above it", head, rows)


def _norm(layer: dict[str, Any]) -> list[str]:
    return [fixed(layer["estimate"], 4), at_most(layer.get("bound"), 4)]


def _list(title: str, points: list[str]) -> Markup:
    return tag("div", tag("h3", title), tag("ul", joined(tag("li", point) for point in points)))
