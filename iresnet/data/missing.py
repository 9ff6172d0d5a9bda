"""Missing cells of a table: refused, with their number and a remedy; or their rows are left out on request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from ..spelling import quoted
from .labels import EMPTY
from .table import Table


def check_finite(table: Table, below: Iterable[Table] = ()) -> None:
    """Refuse cells that are missing or no finite float32."""
    with np.errstate(over="ignore"):  # numbers that overflow become infinite, which is refused
        finite = np.isfinite(table.x.astype(np.float32))
    if not finite.all():
        row, column = (int(i) for i in np.argwhere(~finite)[0])
        counts = [(int(m.sum()), int(m.any(axis=1).sum())) for m in map(_is_missing, tables_from(table, below))]
        raise ValueError(
            f"{table.path}: numbers must be finite and fit float32; got {table.x[row, column]} in {table.place(row)}, "
            f"column {quoted(table.columns[column])}. Fill it in, or remove the row."
            f"{missing_count(*map(sum, zip(*counts, strict=True)))}"
        )
    for name, cells in table.words.items():
        if EMPTY in cells:
            row = cells.index(EMPTY)
            count = sum(t.words[name].count(EMPTY) for t in tables_from(table, below))
            raise ValueError(
                f"{table.path}: a category is missing in {table.place(row)}, column {quoted(name)}. Fill it in, or "
                f"remove the row.{missing_count(count, count)}"
            )


def _is_missing(table: Table) -> NDArray[np.bool_]:
    missing = np.isnan(table.x)
    for name, cells in table.words.items():
        missing[:, table.columns.index(name)] = [cell == EMPTY for cell in cells]
    return missing


def missing_count(cells: int, rows: int) -> str:
    """Say how many cells are missing and what can be done; empty if none is."""
    if cells < 2:
        return " No other cell is missing; --missing drop leaves this row out." if cells else ""
    return f" {cells} cells in {rows} rows are missing; --missing drop leaves these rows out."


def tables_from(table: Table, below: Iterable[Table]) -> Iterator[Table]:
    """Iterate over this table and those below it, up to one that cannot be read."""
    yield table
    with suppress(ValueError):
        yield from below


def whole_rows(table: Table) -> NDArray[np.int64]:
    """Return the positions of the rows without a missing cell."""
    whole = ~np.isnan(table.x).any(axis=1)
    for cells in table.words.values():
        whole &= np.array([cell != EMPTY for cell in cells], dtype=bool)
    return np.flatnonzero(whole)


def without_missing(table: Table) -> tuple[Table, tuple[int, ...]]:
    """Leave out the rows with a missing cell; return the others and their positions, empty if all are there."""
    rows = whole_rows(table)
    if len(rows) == len(table.x):
        return table, ()
    if not len(rows):
        raise ValueError(f"{table.path}: every row has a missing cell, so none is left. Drop the columns they are in.")
    return table.take(rows), tuple(rows.tolist())
