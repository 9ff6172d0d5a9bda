"""Data: what a table holds, the name of its source, rows of each split, and columns with their kinds."""

from __future__ import annotations

import torch
from torch import Tensor

from ..data.columns import ColumnKind
from ..spelling import listed
from .markup import Markup, joined, pairs, table
from .material import Material
from .words import cell, count, percent

#: Columns that are listed, and categories whose share is shown.
LISTED, CATEGORIES = 64, 4


def contents(material: Material) -> Markup:
    """Render the source, the splits and the columns of a table; nothing for images."""
    if material.is_image:
        return Markup("")
    facts = [item for item in _facts(material) if item[1]]
    return joined([pairs(facts, kind="facts-list"), _columns(material)])


def _facts(material: Material) -> list[tuple[str, str]]:
    schema, sizes = material.schema, material.sizes
    others = [name for name in schema.names if name not in schema.targets]
    splits = ", ".join(f"{n:,} {NAMES.get(name, name)}" for name, n in sizes.items())
    return [
        ("source", material.source),
        ("rows", f"{sum(sizes.values()):,}: {splits}" if sizes else ""),
        ("columns", f"{schema.dimension:,}"),
        ("density", f"of {listed(schema.targets)}, given {listed(others)}" if schema.targets else ""),
        ("label", f"{schema.label}: {listed(schema.classes)}" if schema.label else ""),
        ("names of rows", schema.id),
        ("left out", f"{listed(schema.constants)}, with the same value in every row" if schema.constants else ""),
    ]


#: The splits as they are called here.
NAMES = {"train": "for training", "validation": "for validation", "test": "for testing"}


def _columns(material: Material) -> Markup:
    schema, data = material.schema, material.data
    head, rows = ["column", "kind"], list[list[object]]()
    known = data is not None and len(data) > 0
    for j, (name, kind) in enumerate(zip(schema.names[:LISTED], schema.column_kinds, strict=False)):
        rows.append(
            [
                name,
                _kind(kind, _treatment(material, name, kind)),
                *([_values(kind, data[:, j])] if data is not None and known else []),
            ]
        )
    head += [f"values in {count(len(data), f'{material.split} row')}"] if data is not None and known else []
    first = f", first {LISTED} of {schema.dimension}" if schema.dimension > LISTED else ""
    return table(f"Columns{first}; in brackets, what a density makes of them", head, rows)


def _kind(kind: ColumnKind, treatment: str) -> str:
    words = f"category of {len(kind.categories)}" if kind.categories else kind.describe()
    return f"{words} ({treatment})" if treatment else words


def _treatment(material: Material, name: str, kind: ColumnKind) -> str:
    """Return what a density makes of a column; nothing for a classifier, which takes numbers as they are."""
    if material.objective == "classification":
        return ""
    if material.schema.targets and name not in material.schema.targets:
        return "given, as indicators" if name in material.schema.one_hot else "given"
    bounds = sum(end is not None for end in kind.interval[:2])
    parts = ["noise" if kind.discrete else "", ("", "logarithm", "logit")[bounds]]
    return " and ".join(filter(None, parts))


def _values(kind: ColumnKind, column: Tensor) -> str:
    if kind.categories:
        counts = torch.bincount(column.round().long().clamp(0, len(kind.categories) - 1))
        order = counts.argsort(descending=True, stable=True)[:CATEGORIES].tolist()
        shown = [f"{kind.categories[k]} {percent(int(counts[k]) / len(column))}" for k in order if counts[k]]
        return ", ".join(shown) + (", …" if int((counts > 0).sum()) > CATEGORIES else "")
    low, middle, high = (cell(kind, float(v)) for v in column.double().quantile(torch.tensor([0.0, 0.5, 1.0]).double()))
    return f"{low} to {high}, median {middle}"
