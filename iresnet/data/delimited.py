"""Tables in text: CSV, in UTF-8, with commas, semicolons or tabs between the cells (whichever the first line has most).

The first line holds the names of the columns if none of its cells is a number, if one is a name that is looked for,
or if a cell of text stands above a number. Otherwise the columns are called x0, x1, ... Errors name the line.

`written` makes such a table. A spreadsheet computes what begins with =, +, -, @, a tab or a carriage return, so that a
class could be a formula; such a cell gets an apostrophe before it, unless it is a number, and `read` takes it away.
"""

from __future__ import annotations

import csv
import re
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import numpy as np

from ..spelling import quoted, with_path
from .labels import class_name
from .table import Choose, Table, check_names, is_number, label_hint, number

Line: TypeAlias = tuple[int, list[str]]  # its number, counted from 1, and its cells
LOOK = 1000  # lines below a cell that is no number, to see whether its column is text
BEGINNING, LONGEST = 2**16, 2**26  # characters of the first line that are counted; of any line

FORMULA = re.compile("'*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")  # the last four are wide = + - @
SEPARATORS = re.compile(r'[",;\t\r\n]')


def read(path: Path, choose: Choose, known: Collection[str] = ()) -> Table:
    """The chosen columns of a file; `known` are names that only a header would hold."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _read(path, _lines(path, file), choose, known)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8; byte {error.start} is not. Save it as UTF-8.") from None
    except csv.Error as error:
        raise ValueError(f"{path} cannot be read as CSV ({error}). Save it as comma-separated text.") from None
    except OSError as error:
        raise with_path(error, path) from None


def written(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table as text, with a header; numbers with nine digits, enough to give every float32 back.

    >>> written(["kind", "x"], [["=rose", 0.5], ["-1", 2.0]])
    "kind,x\\n'=rose,0.5\\n-1,2\\n"
    """
    return "".join(f"{','.join(map(_cell, row))}\n" for row in chain([names], rows))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.9g}"
    text = str(value).encode("utf-8", "backslashreplace").decode("utf-8")  # a file's name may be no UTF-8
    if FORMULA.match(text) and not is_number(text):
        text = f"'{text}"
    return '"{}"'.format(text.replace('"', '""')) if not text or SEPARATORS.search(text) else text


def _plain(cell: str) -> str:
    """A cell without the apostrophe that `written` put before it."""
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell


def _lines(path: Path, file: TextIO) -> Iterator[Line]:
    """The lines that hold anything; all must have as many cells as the first."""
    first = re.sub(r'"[^"]*"', "", file.readline(BEGINNING))
    file.seek(0)
    reader = csv.reader(_bounded(path, file), delimiter=max(",;\t", key=first.count), skipinitialspace=True)
    width = 0
    for cells in reader:
        width = width or len(cells)
        if cells and len(cells) != width:
            raise ValueError(f"{path}: line {reader.line_num} has {len(cells)} cells; those above have {width}.")
        if cells:
            yield reader.line_num, cells


def _bounded(path: Path, file: TextIO) -> Iterator[str]:
    for i in count(1):
        line = file.readline(LONGEST)
        if len(line) == LONGEST:
            raise ValueError(f"{path}: line {i} is longer than {LONGEST:,} characters. Break it into rows.")
        if not line:
            return
        yield line


def _read(path: Path, lines: Iterator[Line], choose: Choose, known: Collection[str]) -> Table:
    head = list(islice(lines, 2))
    if not head:
        raise ValueError(f"{path} is empty. Give a table with at least one row.")
    first = [_plain(cell.strip()) for cell in head[0][1]]
    named = _is_header(first, head[1][1] if len(head) > 1 else [], known)
    names = check_names(path, first) if named else [f"x{i}" for i in range(len(first))]
    choice = choose(path, names, named)
    columns = tuple(names[i] for i in choice.columns)
    numbers, labels, places = array("d"), list[str](), array("q")
    rows = chain(head[named:], lines)
    for line, cells in rows:
        picked = [cells[i] for i in choice.columns]
        try:
            joined = "".join(picked)  # nearly always what float and `number` read alike, and float is faster
            numbers.extend(map(float if joined.isascii() and "_" not in joined else number, picked))
        except ValueError:
            bad = next(i for i, cell in enumerate(picked) if not is_number(cell))
            above = numbers[bad : len(places) * len(columns) : len(columns)]
            below = (row[choice.columns[bad]] for _, row in islice(rows, LOOK))
            remedy = label_hint(columns[bad], chain(above, picked[bad : bad + 1], below)) if choice.open else ""
            _refuse(path, line, columns[bad], picked[bad], remedy)
        if choice.label is not None:
            labels.append(class_name(_plain(cells[choice.label].strip())))
        places.append(line)
    x = np.array(numbers, dtype=np.float64).reshape(-1, len(columns))
    label = "" if choice.label is None else names[choice.label]
    return Table(path, columns, x, label, labels if label else None, lambda i: f"line {places[i]}")


def _is_header(first: Sequence[str], second: Sequence[str], known: Collection[str]) -> bool:
    above = (class_name(a) and not is_number(a) and is_number(b) for a, b in zip(first, second, strict=False))
    return not any(map(is_number, first)) or any(cell in known for cell in first) or any(above)


def _refuse(path: Path, line: int, column: str, cell: str, remedy: str) -> None:
    what = f"{quoted(cell)} is not a number" if cell.strip() else "a number is missing"
    raise ValueError(
        f"{path}: {what} in line {line}, column {quoted(column)}. Correct it, or remove the row or the column.{remedy}"
    )
