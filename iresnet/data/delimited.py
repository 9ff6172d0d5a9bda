"""Tables as text: CSV in UTF-8, separated by commas, semicolons or tabs (whichever the first line has most of).

The first line is a header if none of its cells is a number, if one of them is an expected column name, or if one of
them is text above a number. Without a header the columns are called x0, x1, ... Errors name the line.

`format_csv` writes such a table. Spreadsheets run cells that begin with =, +, -, @, a tab or a carriage return as
formulas. Such a cell is escaped by an apostrophe, unless it is a number; `read_delimited` removes it.
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

from ..spelling import with_path
from .labels import class_name
from .table import ColumnChooser, Table, check_names, is_number, label_hint, parse_number, refuse_cell

Line: TypeAlias = tuple[int, list[str]]  # its number, counted from 1, and its cells
LOOK_AHEAD = 1000  # lines read after a cell that is not a number, to see whether its column is text
HEAD_LENGTH, LINE_LENGTH = 2**16, 2**26  # most characters of the first line that decide the separator; of any line

FORMULA = re.compile("'*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")  # the last four are full-width = + - @
SEPARATORS = re.compile(r'[",;\t\r\n]')


def read_delimited(path: Path, choose: ColumnChooser, known: Collection[str] = ()) -> Table:
    """Read the chosen columns of a file; a first line with one of the `known` names is a header."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _parse(path, _lines(path, file), choose, known)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8; byte {error.start} is not valid. Save it as UTF-8.") from None
    except csv.Error as error:
        raise ValueError(f"{path} cannot be read as CSV ({error}). Save it as comma-separated text.") from None
    except OSError as error:
        raise with_path(error, path) from None


def format_csv(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format a table as CSV with a header; numbers have nine digits, which restore every float32 exactly.

    >>> format_csv(["kind", "x"], [["=rose", 0.5], ["-1", 2.0]])
    "kind,x\\n'=rose,0.5\\n-1,2\\n"
    """
    return "".join(f"{','.join(map(_cell, row))}\n" for row in chain([names], rows))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.9g}"
    text = str(value).encode("utf-8", "backslashreplace").decode("utf-8")  # a file name may be invalid UTF-8
    if FORMULA.match(text) and not is_number(text):
        text = f"'{text}"
    return '"{}"'.format(text.replace('"', '""')) if not text or SEPARATORS.search(text) else text


def _unescape(cell: str) -> str:
    """Remove the apostrophe that `format_csv` put before a cell."""
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell


def _lines(path: Path, file: TextIO) -> Iterator[Line]:
    """Iterate over the lines that are not empty; all must have as many cells as the first."""
    first = re.sub(r'"[^"]*"', "", file.readline(HEAD_LENGTH))
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
        line = file.readline(LINE_LENGTH)
        if len(line) == LINE_LENGTH:
            raise ValueError(f"{path}: line {i} is longer than {LINE_LENGTH:,} characters. Break it into rows.")
        if not line:
            return
        yield line


def _parse(path: Path, lines: Iterator[Line], choose: ColumnChooser, known: Collection[str]) -> Table:
    head = list(islice(lines, 2))
    if not head:
        raise ValueError(f"{path} is empty. Give a table with at least one row.")
    first = [_unescape(cell.strip()) for cell in head[0][1]]
    header = _is_header(first, head[1][1] if len(head) > 1 else [], known)
    names = check_names(path, first) if header else [f"x{i}" for i in range(len(first))]
    choice = choose(path, names, header)
    columns = tuple(names[i] for i in choice.columns)
    numbers, labels, places = array("d"), list[str](), array("q")
    rows = chain(head[header:], lines)
    for line, cells in rows:
        picked = [cells[i] for i in choice.columns]
        try:
            joined = "".join(picked)  # float and `parse_number` agree on nearly every line, and float is faster
            numbers.extend(map(float if joined.isascii() and "_" not in joined else parse_number, picked))
        except ValueError:
            bad = next(i for i, cell in enumerate(picked) if not is_number(cell))
            above = numbers[bad : len(places) * len(columns) : len(columns)]
            below = (row[choice.columns[bad]] for _, row in islice(rows, LOOK_AHEAD))
            remedy = (
                label_hint(columns[bad], chain(above, picked[bad : bad + 1], below)) if choice.suggest_label else ""
            )
            refuse_cell(path, picked[bad], f"line {line}", columns[bad], remedy)
        if choice.label is not None:
            labels.append(class_name(_unescape(cells[choice.label].strip())))
        places.append(line)
    x = np.array(numbers, dtype=np.float64).reshape(-1, len(columns))
    label = "" if choice.label is None else names[choice.label]
    return Table(path, columns, x, label, labels if label else None, lambda i: f"line {places[i]}")


def _is_header(first: Sequence[str], second: Sequence[str], known: Collection[str]) -> bool:
    text_above = (class_name(a) and not is_number(a) and is_number(b) for a, b in zip(first, second, strict=False))
    return not any(map(is_number, first)) or any(cell in known for cell in first) or any(text_above)
