"""Data frames of pandas: which columns hold categories, their cells as names, and samples as data frames.

A column holds categories if `data.kinds` declares it so, if its dtype is category or bool, or if it holds words as
`iresnet train` finds them. In samples, a category is the cell of the training rows that it stands for.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..data import ColumnKind, Schema
from ..data.arrays import column_values
from ..data.labels import BOOLEANS, EMPTY, class_name, is_missing_number
from ..data.numerals import is_number
from ..data.table import holds_words
from ..spelling import quoted
from .rows import Array, unnamed


def is_frame(X: Any) -> bool:
    """Whether rows are a data frame of pandas."""
    return hasattr(X, "iloc") and X.ndim == 2


def columns_of(frame: Any) -> dict[str, Any]:
    """Return the columns by name; they are x0, x1, ... if their names are not text."""
    named = all(isinstance(name, str) for name in frame.columns)
    names = tuple(frame.columns) if named else unnamed(frame.shape[1])
    return {name: frame.iloc[:, i] for i, name in enumerate(names)}


def in_order(frame: Any, names: Sequence[str]) -> Any:
    """Return a data frame with its columns in the order of these names, if it has these columns and no others."""
    others = list(frame.columns) != list(names) and {*frame.columns} == {*names} and frame.columns.is_unique
    return frame[list(names)] if others else frame


def find_categories(frame: Any, declared: Mapping[str, ColumnKind | None]) -> list[str]:
    """Return the columns that hold categories: those that are declared, and others by their dtype or words."""
    return [
        name
        for name, column in columns_of(frame).items()
        if (declared[name] is None if name in declared else _looks_like_categories(column))
    ]


def _looks_like_categories(column: Any) -> bool:
    if column.dtype.kind in "iufc":
        return False
    return column.dtype.kind == "b" or column.dtype.name == "category" or holds_words(column_values(column).tolist())


def split_words(frame: Any, categories: Iterable[str]) -> tuple[Any, dict[str, list[str]]]:
    """Return a data frame with 0, or NaN if missing, in columns of categories, and the names in these.

    Columns that only hold numbers stay as they are.
    """
    numbers, words = frame.copy(deep=False), {}
    for i, (name, column) in enumerate(columns_of(frame).items()):
        if column.dtype.kind in "iuf":
            continue
        if name in categories:
            words[name] = [class_name(cell) for cell in column_values(column).tolist()]
            numbers.isetitem(i, np.array([np.nan if cell == EMPTY else 0.0 for cell in words[name]]))
        else:
            _refuse_other_than_numbers(name, column.dropna())
    return numbers, words


def _refuse_other_than_numbers(name: str, column: Any) -> None:
    """Refuse a column that holds words or dates; NumPy takes dates for numbers."""
    if np.asarray(column).dtype.kind in "biufc":
        return
    cell = next((cell for cell in column.tolist() if not _is_number(cell)), None)
    if cell is None:
        return
    remedy = "Convert it to numbers, such as days, or leave it out."
    if isinstance(cell, str) and is_missing_number(cell):
        remedy = "If it marks a missing cell, fill it in or leave out its row: "
        remedy += f"X.replace({cell!r}, float('nan')).dropna()."
    elif isinstance(cell, str):
        settings = f'settings={{"data.kinds": ["{name}=category"]}}'
        remedy = f'If it is a category, X["{name}"].astype("category") or {settings} says so; else leave it out.'
    raise ValueError(f"column {quoted(name)} holds {quoted(str(cell))}, which is not a number. {remedy}")


def _is_number(cell: Any) -> bool:
    """Whether NumPy can convert a cell to a number."""
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return True


def cells_of(column: Any) -> Any:
    """Return the different cells of a column of categories as a series, whose index is the names of the categories."""
    cells = column.drop_duplicates()
    cells.index = [class_name(cell) for cell in column_values(cells).tolist()]
    return cells[~cells.index.duplicated()]


def word_columns(schema: Schema) -> dict[str, ColumnKind]:
    """Return the columns with a category whose name is not a number."""
    kinds = zip(schema.names, schema.column_kinds, strict=True)
    return {name: kind for name, kind in kinds if not all(map(is_number, kind.categories))}


def samples_frame(values: Array, schema: Schema, cells: Mapping[str, Any]) -> Any:
    """Return samples as a data frame; `cells` holds what `cells_of` returns, for columns of which it is known."""
    pandas: Any = importlib.import_module("pandas")
    columns = {}
    for name, kind, x in zip(schema.names, schema.column_kinds, values.T, strict=True):
        if kind.categories:
            of_names = cells[name] if name in cells else _plain_cells(pandas, kind)
            columns[name] = of_names.loc[[kind.categories[int(code)] for code in x]].array
        else:
            columns[name] = x.astype(np.int64) if kind.name == "integer" else x
    return pandas.DataFrame(columns)


def _plain_cells(pandas: Any, kind: ColumnKind) -> Any:
    """Return the names of categories as cells: numbers or truth values, if all are."""
    numbers, names = all(map(is_number, kind.categories)), list(kind.categories)
    cells = pandas.Series([False, True] if kind.categories in BOOLEANS and not numbers else names, index=names)
    return pandas.to_numeric(cells) if numbers else cells
