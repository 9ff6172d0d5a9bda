"""Reconstructions: rows rebuilt from their codes, and the numbers that say how well.

Three numbers say different things and are never merged: the largest bound of a block's solve (proven), the code
residual ||F(x^) - z|| (evaluated in float64) and the distance to the true x (measured). The bound composed through all
blocks is shown beside them, and marked where it says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.columns import ColumnKind
from ..plots import raster
from ..results import nonfinite_to_none
from ..spelling import outcomes
from .markup import Markup, figure, joined, pairs, table, tag
from .material import Material, Reconstruction
from .tiles import fitting, look, reduction
from .words import at_most, cell, count, fixed, number

IMAGES, ROWS, COLUMNS = 10, 10, 6
BUDGET = 31_000  # bytes of pixels in one of the three rows


def reconstructions(material: Material) -> Markup:
    """The numbers, then the rows."""
    inverse, content = material.evaluation.get("inverse"), []
    if inverse:
        content.append(_numbers(inverse))
    if material.reconstruction is not None and len(material.reconstruction.originals):
        show = _images if material.is_image else _rows
        content.append(show(material, material.reconstruction))
    return joined(content)


def _numbers(i: dict[str, Any]) -> Markup:
    items = [
        ("Largest block bound", "largest_block_bound", at_most, _proven(i)),
        ("Code residual", "code_residual", number, "computed: ‖F(x̂) − z‖, through the whole network in float64"),
        ("Measured error", "measured_error", number, "measured: ‖x̂ − x‖, since the true x is known here"),
        ("Composed bound", "composed_bound", at_most, _composed(i)),
    ]
    if _unbounded(i):
        del items[-1]
    shown = [(name, _number(i[key], show, note)) for name, key, show, note in items if key in i]
    parts = [f"{count(i['rows'], 'sample')} inverted"] if i.get("rows") else []
    if i.get("precision"):
        parts.append(f"in {i['precision']}")
    if i.get("iterations") == 0:
        parts.append("without an iteration")
    elif i.get("iterations") is not None:
        parts.append(f"with {fixed(i['iterations'], 1)} evaluations of g per sample on average")
    words = " ".join(parts) + ". Numbers are the largest over the samples, l₂ per sample." if parts else ""
    if _unbounded(i) and i.get("iterations") != 0:
        words += f" {_iteration(i)}"
    return joined([pairs(shown, kind="key numbers"), tag("p", words, class_="note")])


def _number(value: float | None, show: Callable[[float | None], str], note: object) -> Markup:
    """A number with what it is; one that is not finite (null in JSON) is infinite."""
    text = "∞" if nonfinite_to_none(value) is None else show(value)
    return joined([tag("strong", text), tag("p", note)])


def _unbounded(i: dict[str, Any]) -> bool:
    """Whether a bound was asked for and there is none: a block is not proven to be a contraction."""
    return "largest_block_bound" in i and nonfinite_to_none(i["largest_block_bound"]) is None


def _iteration(i: dict[str, Any]) -> str:
    """What the iteration came to, as it is."""
    if i.get("diverged"):
        words = outcomes(i["diverged"], i.get("converged"), i["rows"], " samples")
        return f"The iteration {words}; that does not say that there is no inverse."
    if nonfinite_to_none(i.get("measured_error")) is None:
        return "The iteration diverges, for the worst sample at least; that does not say that there is no inverse."
    return "The errors are those of the iteration, without a proof."


def _proven(i: dict[str, Any]) -> str:
    if _unbounded(i):
        return f"nothing is proven, for {count(i['rows'], 'sample')}: {unproven(i)}"
    rows = f", for {i['proven']:,} of {count(i['rows'], 'sample')}" if "proven" in i and i.get("rows") else ""
    return f"proven: every block’s own solve is this close to its exact solution{rows}"


def unproven(i: dict[str, Any]) -> str:
    """Why an inverse has no bound."""
    if i.get("iterations") == 0:
        return "no bound is known for this inverse"
    return "not every block is proven to be a contraction"


def _composed(i: dict[str, Any]) -> Markup:
    words = "proven: the block bounds carried through all later inverses"
    verdict = "" if i.get("informative", True) else tag("em", "not informative", class_="flag")
    return joined([words, "; " if verdict else "", verdict])


def _images(material: Material, r: Reconstruction) -> Markup:
    how = look(material)
    originals = fitting(r.originals, IMAGES, BUDGET)
    n = len(originals)
    drawn = _drawable(r.rebuilt[:n], material.levels)
    rebuilt = fitting(drawn, n, BUDGET)
    difference, largest = raster.differences(originals.double(), rebuilt.double())
    items = zip(
        how.tiles(originals, [f"original {k + 1}" for k in range(n)]),
        how.tiles(rebuilt, [f"rebuilt {k + 1}" for k in range(n)]),
        how.shades(difference, [f"difference {k + 1}" for k in range(n)]),
        (_beneath(r, k) for k in range(n)),
        strict=True,
    )
    content = tag("div", joined(tag("div", *item) for item in items), class_="columns")
    scale = f"magnified: its full scale is {number(largest)}" if largest > 0 else "which is zero everywhere"
    words = f"From top to bottom: the original, what was rebuilt from its code, and the difference, {scale}"
    words += f" of {material.levels - 1:,} levels. " if largest > 0 else ". "
    words += f"Under each: {', '.join(fact for fact, _, _ in _facts(r))}. "
    if not torch.equal(drawn, r.rebuilt[:n]):
        words += "What is far from all levels, or no number, is drawn as a level near them, and so is its difference. "
    return figure(content, words + reduction(material))


def _drawable(images: Tensor, levels: int) -> Tensor:
    """Images with what the iteration may have left brought near their range, so that differences can be drawn."""
    return torch.nan_to_num(images, nan=0.0).clamp(-levels, 2 * levels)


def _facts(r: Reconstruction) -> list[tuple[str, Tensor, Callable[[float], str]]]:
    """What is known of every row that was rebuilt: its name, values, and how to write one.

    A formula takes no evaluations of g; an inverse without iterations and bounds has its errors alone.
    """
    facts: list[tuple[str, Tensor, Callable[[float], str]]] = [("measured error", r.errors, number)]
    iterates = bool(r.iterations.any())
    if iterates or bool(torch.isfinite(r.bounds).any()):
        facts.append(("proven block bound", r.bounds, at_most))
    if iterates:
        facts.append(("evaluations of g", r.iterations, lambda n: str(int(n))))
    return facts


def _beneath(r: Reconstruction, k: int) -> Markup:
    lines = [write(float(values[k])) for _, values, write in _facts(r)]
    lines[2:] = [f"{text} eval." for text in lines[2:]]
    return tag("p", joined(tag("span", text.replace(" × ", "×")) for text in lines), class_="facts")


def _rows(material: Material, r: Reconstruction) -> Markup:
    names = material.columns[:COLUMNS]
    head = ["row", *names, *(fact for fact, _, _ in _facts(r))]
    kinds = material.schema.column_kinds
    rows = [[str(k + 1), *_cells(r, k, kinds)] for k in range(min(ROWS, len(r.originals)))]
    first = f", first {COLUMNS} of {len(material.columns)} columns" if len(material.columns) > COLUMNS else ""
    return table(f"Samples reconstructed from their codes{first}", head, rows, kind="data")


def _cells(r: Reconstruction, k: int, kinds: Sequence[ColumnKind]) -> list[str]:
    values = [cell(kind, float(v)) for kind, v in zip(kinds, r.originals[k, :COLUMNS], strict=False)]
    return [*values, *(write(float(found[k])) for _, found, write in _facts(r))]
