"""Tables as text: CSV in UTF-8, separated by commas, semicolons or tabs (whichever the first line has most of).

The first line is a header if none of its cells is a number, if one of them is an expected column name, or if one of
them is text above a number. Without a header the columns are called x0, x1, ... Errors name the line. Files that end in
.gz are decompressed, and the path - is the standard input. Where the separator is no comma, 1,5 is a number, unless
1.5 is one too: a file has one decimal sign. (A lone 1,234 could mean two numbers, and is refused.)

`format_csv` writes such a table. Spreadsheets run cells that begin with =, +, -, @, a tab or a carriage return as
formulas. Such a cell is escaped by an apostrophe, unless it is a number; `read_delimited` removes it.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
import sys
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeAlias, cast

import numpy as np

from ..spelling import quoted, with_path
from .choice import ColumnChoice, ColumnChooser
from .labels import MISSING, class_name
from .table import (
    Table,
    check_names,
    is_number,
    label_hint,
    missing_count,
    parse_number,
    refuse_cell,
)

Line: TypeAlias = tuple[int, list[str]]  # its number, counted from 1, and its cells
LOOK_AHEAD = 1000  # lines read after a cell that is not a number, to see whether its column is text
HEAD_LENGTH, LINE_LENGTH = 2**16, 2**26  # most characters of the first line that decide the separator; of any line

FORMULA = re.compile("'*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")  # the last four are full-width = + - @
DECIMAL_COMMA = re.compile(r"[+-]?[0-9]*,[0-9]+([eE][+-]?[0-9]+)?")
THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2},[0-9]{3}")
SEPARATORS = re.compile(r'[",;\t\r\n]')


def read_delimited(path: Path, choose: ColumnChooser, known: Collection[str] = ()) -> Table:
    """Read the chosen columns of a file; a first line with one of the `known` names is a header."""
    try:
        with _open(path) as file:
            separator = _separator(file)
            return _parse(path, _lines(path, file, separator), choose, known, separator)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8; byte {error.start} is not valid. Save it as UTF-8.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged ({error}). Compress it again with gzip.") from None
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


def _open(path: Path) -> TextIO:
    """Open a file of text, compressed or not, or the standard input, which is read at once, since it has no start."""
    if str(path) == "-":
        return io.StringIO(io.TextIOWrapper(sys.stdin.buffer, newline="", encoding="utf-8-sig").read(), newline="")
    if path.suffix.lower() == ".gz":
        return cast(TextIO, gzip.open(path, "rt", newline="", encoding="utf-8-sig"))
    return path.open(newline="", encoding="utf-8-sig")


def _separator(file: TextIO) -> str:
    first = re.sub(r'"[^"]*"', "", file.readline(HEAD_LENGTH))
    file.seek(0)
    return max(",;\t", key=first.count)


def _lines(path: Path, file: TextIO, separator: str) -> Iterator[Line]:
    """Iterate over the lines that are not empty; all must have as many cells as the first."""
    reader = csv.reader(_bounded(path, file), delimiter=separator, skipinitialspace=True)
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


def _parse(path: Path, lines: Iterator[Line], choose: ColumnChooser, known: Collection[str], separator: str) -> Table:
    head = list(islice(lines, 2))
    if not head:
        raise ValueError(f"{path} is empty. Give a table with at least one row.")
    first = [_unescape(cell.strip()) for cell in head[0][1]]
    header = _is_header(first, head[1][1] if len(head) > 1 else [], known)
    names = check_names(path, first) if header else [f"x{i}" for i in range(len(first))]
    choice = choose(path, names, header)
    columns = tuple(names[i] for i in choice.columns)
    numbers, places = array("d"), array("q")
    aside = {i: list[str]() for i in {*choice.words, choice.label, choice.id} - {None}}  # columns of text
    decimal = _Decimal(path, separator)
    rows = chain(head[header:], lines)
    for line, cells in rows:
        picked = ["0" if i in choice.words else cells[i] for i in choice.columns]
        try:
            joined = "".join(picked)  # float and `parse_number` agree on nearly every line, and float is faster
            numbers.extend(map(float if joined.isascii() and "_" not in joined else parse_number, picked))
            if not decimal.point and "." in joined:
                decimal.point = next(cell for cell in picked if "." in cell)
        except ValueError:
            values = [decimal.parse(cell, choice.skip_missing) for cell in picked]
            if None in values:
                above = _columns_of(numbers, len(places), len(columns))
                _refuse(path, choice, columns, (line, picked), values.index(None), above, rows)
            numbers[len(places) * len(columns) :] = array("d", cast(list[float], values))
        for i, cells_of in aside.items():
            cells_of.append(_unescape(cells[cast(int, i)].strip()))
        places.append(line)
    decimal.check()
    words = {names[i]: list(map(class_name, aside[i])) for i in choice.words}
    x = np.array(numbers, dtype=np.float64).reshape(-1, len(columns))
    label = "" if choice.label is None else names[choice.label]
    return Table(
        path, columns, x, label, list(map(class_name, aside[choice.label])) if label else None,
        lambda i: f"line {places[i]}", words, aside[choice.id] if choice.id is not None else None,
    )  # fmt: skip


class _Decimal:
    """Reads the numbers that Python does not: those with a decimal comma, and missing ones."""

    def __init__(self, path: Path, separator: str) -> None:
        self.path, self.separator = path, separator
        self.comma, self.point, self.clear = "", "", False

    def parse(self, cell: str, skip_missing: bool) -> float | None:
        """Return the number in a cell, NaN for a missing one that may be skipped, and None for other text."""
        if skip_missing and class_name(cell) == MISSING:
            return math.nan
        if is_number(cell):
            self.point = self.point or (cell if "." in cell else "")
            return parse_number(cell)
        if self.separator == "," or not DECIMAL_COMMA.fullmatch(cell.strip()):
            return None
        self.comma, self.clear = self.comma or cell, self.clear or not THOUSANDS.fullmatch(cell.strip())
        return float(cell.replace(",", "."))

    def check(self) -> None:
        """Refuse a file whose commas may be something else than decimal signs."""
        if self.comma and (self.point or not self.clear):
            why = f"{quoted(self.point)} has a decimal point" if self.point else "no other number shows which"
            raise ValueError(
                f"{self.path}: {quoted(self.comma)} may have a decimal comma or separate thousands; {why}. "
                "Write numbers with a decimal point, without separators."
            )


def _columns_of(numbers: array[float], rows: int, width: int) -> Callable[[int], Sequence[float]]:
    return lambda i: numbers[i : rows * width : width]


def _refuse(
    path: Path, choice: ColumnChoice, columns: Sequence[str], at: Line, bad: int,
    above: Callable[[int], Sequence[float]], rows: Iterator[Line],
) -> NoReturn:  # fmt: skip
    """Raise the error for the first cell of the file that is not a number, with what the lines below it tell."""
    (line, picked), positions = at, [i for i in choice.columns if i not in choice.words]
    below = list(islice(rows, LOOK_AHEAD))
    remedy = ""
    if choice.suggest_label:
        remedy = label_hint(columns[bad], chain(above(bad), [picked[bad]], (c[choice.columns[bad]] for _, c in below)))
    if not remedy and "," in picked[bad] and DECIMAL_COMMA.fullmatch(picked[bad].strip()):
        remedy = " A decimal comma needs semicolons or tabs between the columns."
    if not remedy and class_name(picked[bad]) == MISSING:
        with suppress(ValueError, csv.Error):  # a line below that cannot be read either is not counted
            below.extend(rows)
        counts = [sum(class_name(c[i]) == MISSING for i in positions) for _, c in below]
        here = sum(class_name(cell) == MISSING for cell in picked)
        remedy = missing_count(here + sum(counts), 1 + sum(map(bool, counts)))
    refuse_cell(path, picked[bad], f"line {line}", columns[bad], remedy)


def _is_header(first: Sequence[str], second: Sequence[str], known: Collection[str]) -> bool:
    text_above = (class_name(a) and not is_number(a) and is_number(b) for a, b in zip(first, second, strict=False))
    return not any(map(is_number, first)) or any(cell in known for cell in first) or any(text_above)
