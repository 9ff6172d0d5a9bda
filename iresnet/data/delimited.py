"""Tables in text: CSV, in UTF-8, with commas, semicolons or tabs between the cells (whichever the first line has most).

The first line holds the names of the columns if none of its cells is a number, if one is a name that is looked for,
or if a cell of text stands above a number. Otherwise the columns are called x0, x1, ... Errors name the line.
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TextIO, TypeAlias

import numpy as np

from .labels import class_name
from .table import Choose, Table, is_number, label_hint

Line: TypeAlias = tuple[int, list[str]]  # its number, counted from 1, and its cells
LOOK = 1000  # lines below a cell that is no number, to see whether its column is text


def read(path: Path, choose: Choose, known: Collection[str] = ()) -> Table:
    """The chosen columns of a file; `known` are names that only a header would hold."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _read(path, _lines(path, file), choose, known)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8; byte {error.start} is not. Save it as UTF-8.") from None
    except csv.Error as error:
        raise ValueError(f"{path} cannot be read as CSV ({error}). Save it as comma-separated text.") from None


def _lines(path: Path, file: TextIO) -> Iterator[Line]:
    """The lines that hold anything; all must have as many cells as the first."""
    first = file.readline()
    file.seek(0)
    reader = csv.reader(file, delimiter=max(",;\t", key=first.count), skipinitialspace=True)
    width = 0
    for cells in reader:
        width = width or len(cells)
        if cells and len(cells) != width:
            raise ValueError(f"{path}: line {reader.line_num} has {len(cells)} cells; those above have {width}.")
        if cells:
            yield reader.line_num, cells


def _read(path: Path, lines: Iterator[Line], choose: Choose, known: Collection[str]) -> Table:
    head = list(islice(lines, 2))
    if not head:
        raise ValueError(f"{path} is empty. Give a table with at least one row.")
    first = [cell.strip() for cell in head[0][1]]
    named = _is_header(first, head[1][1] if len(head) > 1 else [], known)
    names = _names(path, first) if named else [f"x{i}" for i in range(len(first))]
    choice = choose(path, names, named)
    columns = tuple(names[i] for i in choice.columns)
    numbers, labels, places = array("d"), list[str](), array("q")
    rows = chain(head[named:], lines)
    for number, cells in rows:
        picked = [cells[i] for i in choice.columns]
        try:
            numbers.extend(map(float, picked))
        except ValueError:
            bad = next(i for i, cell in enumerate(picked) if not is_number(cell))
            above = numbers[bad : len(places) * len(columns) : len(columns)]
            below = (row[choice.columns[bad]] for _, row in islice(rows, LOOK))
            remedy = label_hint(columns[bad], chain(above, picked[bad : bad + 1], below)) if choice.open else ""
            _refuse(path, number, columns[bad], picked[bad], remedy)
        if choice.label is not None:
            labels.append(class_name(cells[choice.label]))
        places.append(number)
    x = np.array(numbers, dtype=np.float64).reshape(-1, len(columns))
    label = "" if choice.label is None else names[choice.label]
    return Table(path, columns, x, label, labels if label else None, lambda i: f"line {places[i]}")


def _is_header(first: Sequence[str], second: Sequence[str], known: Collection[str]) -> bool:
    above = (class_name(a) and not is_number(a) and is_number(b) for a, b in zip(first, second, strict=False))
    return not any(map(is_number, first)) or any(cell in known for cell in first) or any(above)


def _names(path: Path, names: list[str]) -> list[str]:
    for i, name in enumerate(names):
        if not name:
            raise ValueError(f"{path}: column {i + 1} has no name. Name it, or remove it if it only counts the rows.")
        if name in names[:i]:
            raise ValueError(f"{path}: two columns are called {name!r}. Give every column a name of its own.")
    return names


def _refuse(path: Path, line: int, column: str, cell: str, remedy: str) -> None:
    what = f"{cell!r:.40} is not a number" if cell.strip() else "a number is missing"
    raise ValueError(
        f"{path}: {what} in line {line}, column {column!r}. Correct it, or remove the row or the column.{remedy}"
    )
