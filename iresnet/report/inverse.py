"""Reconstructions: rows rebuilt from their codes, and the numbers that say how well.

Three numbers say different things and are never merged: the largest bound of a block's solve (proven), the code
residual ||F(x^) - z|| (evaluated in float64) and the distance to the true x (measured). The bound composed through all
blocks is shown beside them, and marked where it says nothing.
"""

from __future__ import annotations

from typing import Any

from ..figures import raster
from .markup import Markup, figure, joined, pairs, table, tag
from .material import Material, Reconstruction
from .tiles import fitting, look, reduction
from .words import at_most, count, fixed, number

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
        ("Largest block bound", i.get("largest_block_bound"), at_most, _proven(i)),
        (
            "Code residual",
            i.get("code_residual"),
            number,
            "evaluated: ‖F(x̂) − z‖, through the whole network in float64",
        ),
        ("Measured error", i.get("measured_error"), number, "measured: ‖x̂ − x‖, as the true x is known here"),
        ("Composed bound", i.get("composed_bound"), at_most, _composed(i)),
    ]
    shown = [(n, joined([tag("strong", show(v)), tag("p", note)])) for n, v, show, note in items if v is not None]
    parts = [f"{count(i['rows'], 'row')} inverted"] if i.get("rows") else []
    if i.get("precision"):
        parts.append(f"in {i['precision']}")
    if i.get("iterations") is not None:
        parts.append(f"with {fixed(i['iterations'], 1)} evaluations of g a row on average")
    words = " ".join(parts) + ". Numbers are the largest over the rows, l₂ per row." if parts else ""
    return joined([pairs(shown, kind="key numbers"), tag("p", words, class_="note")])


def _proven(i: dict[str, Any]) -> str:
    rows = f", for {i['proven']:,} of {count(i['rows'], 'row')}" if "proven" in i and i.get("rows") else ""
    return f"proven: every block’s own solve is this close to its exact solution{rows}"


def _composed(i: dict[str, Any]) -> Markup:
    words = "proven: the block bounds carried through all later inverses"
    verdict = "" if i.get("informative", True) else tag("em", "not informative", class_="flag")
    return joined([words, "; " if verdict else "", verdict])


def _images(material: Material, r: Reconstruction) -> Markup:
    how = look(material)
    originals = fitting(r.originals, IMAGES, BUDGET)
    n = len(originals)
    rebuilt = fitting(r.rebuilt[:n], n, BUDGET)
    difference, largest = raster.differences(originals.double(), rebuilt.double())
    items = zip(
        how.tiles(originals, [f"original {k + 1}" for k in range(n)]),
        how.tiles(rebuilt, [f"rebuilt {k + 1}" for k in range(n)]),
        how.shades(difference, [f"difference {k + 1}" for k in range(n)]),
        (_facts(r, k) for k in range(n)),
        strict=True,
    )
    content = tag("div", joined(tag("div", *item) for item in items), class_="columns")
    scale = f"magnified: its full scale is {number(largest)}" if largest > 0 else "which is zero everywhere"
    words = f"From top to bottom: the original, what was rebuilt from its code, and the difference, {scale}"
    words += f" of {material.levels - 1:,} levels. " if largest > 0 else ". "
    words += "Under each: measured error, proven block bound, evaluations of g. "
    return figure(content, words + reduction(material))


def _facts(r: Reconstruction, k: int) -> Markup:
    lines = (number(float(r.errors[k])), at_most(float(r.bounds[k])), f"{int(r.iterations[k])} eval.")
    return tag("p", joined(tag("span", text.replace(" × ", "×")) for text in lines), class_="facts")


def _rows(material: Material, r: Reconstruction) -> Markup:
    names = material.columns[:COLUMNS]
    head = ["row", *names, "measured error", "block bound", "evaluations of g"]
    rows = [[str(k + 1), *_cells(r, k)] for k in range(min(ROWS, len(r.originals)))]
    first = f", first {COLUMNS} of {len(material.columns)} columns" if len(material.columns) > COLUMNS else ""
    return table(f"Rows rebuilt from their codes{first}", head, rows, kind="data")


def _cells(r: Reconstruction, k: int) -> list[str]:
    values = [number(float(v)) for v in r.originals[k, :COLUMNS]]
    return [*values, number(float(r.errors[k])), at_most(float(r.bounds[k])), str(int(r.iterations[k]))]
