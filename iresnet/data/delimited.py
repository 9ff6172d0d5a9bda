"""Tables as text: CSV in UTF-8, separated by commas, semicolons or tabs: whichever the first line has most of, except
that in 3,5;2,1 the commas are decimal signs; or by | if it has none of these.

The first line is a header if none of its cells is a number, if one of them is an expected column name, or if one of
them is text above a number. Without a header the columns are called x0, x1, ... Errors name the line. Files that end in
.gz are decompressed, and the path - is the standard input. A cell 1,5, which is in quotes where commas separate the
columns, is a number, unless 1.5 is one too: a file has one decimal sign. (A lone 1,234 could mean two numbers, and is
refused.)

`format_csv` writes such a table. Spreadsheets run cells that begin with =, +, -, @, a tab or a carriage return as
formulas. Such a cell is escaped by an apostrophe, unless it is a number; `read_delimited` removes it.
"""

from __future__ import annotations

import csv
import gzip
import math
import re
import shlex
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from ..spelling import quoted, with_path
from . import arrow
from .choice import ColumnChoice, ColumnChooser, text_columns
from .labels import EMPTY, class_name, is_missing_number
from .lines import Line, Lines
from .missing import missing_count
from .numerals import DECIMAL_COMMA, is_number, is_numeric, parse_number
from .table import Table, check_names, holds_words, refuse_cell, text_hint

LOOK_AHEAD = 1000  # lines read where a cell is not a number, to see whether its column is text

FORMULA = re.compile("'*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")  # the last four are full-width = + - @
THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2},[0-9]{3}")
SEPARATORS = re.compile(r'[",;|\t\r\n]')


def read_delimited(path: Path, choose: ColumnChooser, known: Collection[str] = ()) -> Table:
    """Read the chosen columns of a file; a first line with one of the `known` names is a header."""
    with _explaining(path), Lines(path) as lines:
        separator = lines.separator()
        head = _read_head(path, _filled(lines.cells(separator)), choose, known)
        if (fast := arrow.read_columns(path, separator, head.names, head.choice, head.header)) is not None:
            return _table(path, head, *fast, lambda i: f"line {_line_of_row(path, separator, head.header, i)}")
        lines.forget()
        parser = _Parser(path, head, _Decimal(path))
        for line, cells in head.rows:
            parser.add(line, cells)
        return parser.table()


class DelimitedChunk(NamedTuple):
    """A table of some lines of a file, and the fraction of the file that has been read; None if it is not known."""

    table: Table
    fraction: float | None


def read_chunks(path: Path, choose: ColumnChooser, known: Collection[str], size: int) -> Iterator[DelimitedChunk]:
    """Read a file as `read_delimited` does, but `size` lines at a time, in memory that does not grow with the file.

    Whether commas are decimal signs is decided by the lines read so far.
    """
    with _explaining(path), Lines(path) as lines:
        separator = lines.separator()
        head = _read_head(path, _filled(lines.cells(separator)), choose, known)
        lines.return_to(head.header)
        lines.forget()
        decimal, fast = _Decimal(path), False  # one block is read faster than pyarrow is imported
        while block := list(islice(lines, size)):
            table = _read_block(path, separator, head, lines, block, decimal, fast=fast)
            yield DelimitedChunk(table, lines.fraction)
            fast = True


def _read_block(
    path: Path, separator: str, head: Head, lines: Lines, block: list[str], decimal: _Decimal, *, fast: bool
) -> Table:
    """Return the table of a block of lines; where it ends within a quoted cell, with the lines up to its end."""
    end = lines.number
    if fast and (columns := arrow.parse_block(block, separator, head.names, head.choice)) is not None:
        decimal.note_point(block, separator, head.choice)
        filled = [end - len(block) + i for i, line in enumerate(block, 1) if line.strip("\r\n")]
        return _table(path, head, *columns, lambda i: f"line {filled[i]}")
    lines.put_back(block)
    rows = lines.cells(separator, len(head.names))
    parser = _Parser(path, head._replace(rows=_filled(rows)), decimal)
    for line, cells in rows:
        if cells:
            parser.add(line, cells)
        if line >= end:
            break
    return parser.table()


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Turn the errors of reading a file of text into sentences."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged ({error}). Compress it again with gzip.") from None
    except csv.Error as error:
        raise ValueError(f"{path} cannot be read as CSV ({error}). Save it as comma-separated text.") from None
    except OSError as error:
        raise with_path(error, path) from None


def format_csv(names: Sequence[str] | None, rows: Iterable[Sequence[Any]]) -> str:
    """Format a table as CSV with a header; numbers have nine digits, which restore every float32 exactly.

    Without names there is no header: the rows continue a table.

    >>> format_csv(["kind", "x"], [["=rose", 0.5], ["-1", 2.0]])
    "kind,x\\n'=rose,0.5\\n-1,2\\n"
    """
    return "".join(f"{','.join(map(_cell, row))}\n" for row in chain([] if names is None else [names], rows))


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


def _filled(lines: Iterator[Line]) -> Iterator[Line]:
    """Iterate over the lines that are not empty."""
    return (line for line in lines if line[1])


def _line_of_row(path: Path, separator: str, header: int, row: int) -> int:
    """Return the line of a row, counted from 0."""
    with Lines(path) as lines:
        lines.forget()
        return next(islice(_filled(lines.cells(separator)), row + bool(header), None))[0]


class Head(NamedTuple):
    """What the first lines of a file tell: the names of its columns, which of them are read, and where its rows are."""

    names: list[str]
    choice: ColumnChoice
    header: int  # the line of the header; 0 if there is none
    rows: Iterator[Line]


def _read_head(path: Path, lines: Iterator[Line], choose: ColumnChooser, known: Collection[str]) -> Head:
    head = list(islice(lines, 2))
    if not head:
        raise ValueError(f"{path} is empty. Give a table with at least one row.")
    first = [_unescape(cell.strip()) for cell in head[0][1]]
    header = _is_header(first, head[1][1] if len(head) > 1 else [], known)
    names = (
        check_names(path, first, unnamed=_unnamed(head[1][1] if len(head) > 1 else []))
        if header
        else [f"x{i}" for i in range(len(first))]
    )
    choice, rows = _find_words(choose(path, names, header), chain(head[header:], lines))
    return Head(names, choice, head[0][0] if header else 0, rows)


def _unnamed(cells: Sequence[str]) -> set[int]:
    """Return the positions that need no name, by the line below the header.

    These are the first, where it numbers the rows, as pandas writes it, and the last, where it is empty, since programs
    write a separator after every cell.
    """
    last = len(cells) - 1
    return {
        i for i, marks in ((0, str.isdecimal), (last, lambda cell: not cell.strip())) if last > 0 and marks(cells[i])
    }


def _find_words(choice: ColumnChoice, rows: Iterator[Line]) -> tuple[ColumnChoice, Iterator[Line]]:
    """Add the undeclared columns that hold words, judging by the first lines, to those that hold categories."""
    top = list(islice(rows, 1))
    text = [i for _, cells in top for i in choice.undeclared if not is_numeric(cells[i])]
    top += islice(rows, LOOK_AHEAD) if text else []
    words = frozenset(i for i in text if holds_words([cells[i] for _, cells in top]))
    return choice._replace(words=choice.words | words), chain(top, rows)


class _Parser:
    """Collects the rows of a table: numbers, columns of text, and the line of each row."""

    def __init__(self, path: Path, head: Head, decimal: _Decimal) -> None:
        self.path, self.head, self.choice, self.decimal = path, head, head.choice, decimal
        self.columns = tuple(head.names[i] for i in head.choice.columns)
        self.numbers, self.places = array("d"), array("q")
        self.text = {i: list[str]() for i in text_columns(head.choice)}

    def add(self, line: int, cells: list[str]) -> None:
        """Add a row."""
        words, columns = self.choice.words, self.choice.columns
        picked = ["0" if i in words else cells[i] for i in columns] if words else [cells[i] for i in columns]
        try:
            joined = "".join(picked)  # float and `parse_number` agree on nearly every line, and float is faster
            self.numbers.extend(map(float if joined.isascii() and "_" not in joined else parse_number, picked))
            if not self.decimal.point and "." in joined:
                self.decimal.point = next(cell for cell in picked if "." in cell)
        except ValueError:
            self._add_unusual(line, picked)
        for i, column in self.text.items():
            column.append(cells[i])
        self.places.append(line)

    def _add_unusual(self, line: int, picked: list[str]) -> None:
        values = [self.decimal.parse(cell, self.choice.skip_missing) for cell in picked]
        start, width = len(self.places) * len(self.columns), len(self.columns)
        if None in values:
            bad = values.index(None)
            _refuse(self.path, self.head, (line, picked), bad, self.numbers[bad:start:width])
        self.numbers[start:] = array("d", cast(list[float], values))

    def table(self) -> Table:
        """Return the table of all rows."""
        self.decimal.check()
        x = np.array(self.numbers, dtype=np.float64).reshape(-1, len(self.columns))
        return _table(self.path, self.head, x, self.text, lambda i: f"line {self.places[i]}")


def _table(
    path: Path, head: Head, x: NDArray[np.float64], text: Mapping[int, list[str]], place: Callable[[int], str]
) -> Table:
    """Make a table of its numbers and its cells of text, by position."""
    names, choice = head.names, head.choice
    cells = {i: [_unescape(cell.strip()) for cell in column] for i, column in text.items()}
    words = {names[i]: list(map(class_name, cells[i])) for i in choice.words}
    label = "" if choice.label is None else names[choice.label]
    ids = None if choice.id is None else cells[choice.id]
    labels = None if choice.label is None else list(map(class_name, cells[choice.label]))
    return Table(path, tuple(names[i] for i in choice.columns), x, label, labels, place, words, ids)


class _Decimal:
    """Reads the numbers that Python does not: those with a decimal comma, and missing ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.comma, self.point, self.clear = "", "", False

    def parse(self, cell: str, skip_missing: bool) -> float | None:
        """Return the number in a cell, NaN for a missing one that may be skipped, and None for other text."""
        if skip_missing and is_missing_number(cell):
            return math.nan
        if is_number(cell):
            self.point = self.point or (cell if "." in cell else "")
            return parse_number(cell)
        if not DECIMAL_COMMA.fullmatch(cell.strip()):
            return None
        self.comma, self.clear = self.comma or cell, self.clear or not THOUSANDS.fullmatch(cell.strip())
        return float(cell.replace(",", "."))

    def note_point(self, block: Sequence[str], separator: str, choice: ColumnChoice) -> None:
        """Note whether the numbers of a block without decimal commas have a decimal point."""
        if self.point or not any("." in line for line in block):
            return
        cells = (line.rstrip("\r\n").split(separator) for line in block if line.strip("\r\n"))
        numbers = [i for i in choice.columns if i not in choice.words]
        self.point = next((row[i] for row in cells for i in numbers if "." in row[i]), "")

    def check(self) -> None:
        """Refuse a file whose commas may be something else than decimal signs."""
        if self.comma and (self.point or not self.clear):
            why = f"{quoted(self.point)} has a decimal point" if self.point else "no other number shows which"
            raise ValueError(
                f"{self.path}: {quoted(self.comma)} may have a decimal comma or separate thousands; {why}. "
                "Write numbers with a decimal point, without separators."
            )


def _refuse(path: Path, head: Head, at: Line, bad: int, above: Sequence[float]) -> NoReturn:
    """Raise the error for the first cell of the file that is not a number, with what the lines below it tell."""
    (line, picked), choice = at, head.choice
    column, below = head.names[choice.columns[bad]], list(islice(head.rows, LOOK_AHEAD))
    remedy = ""
    if choice.training:
        beside = chain(above, [picked[bad]], (cells[choice.columns[bad]] for _, cells in below))
        remedy = text_hint(column, beside, labelled=choice.label is not None)
    if not remedy and is_missing_number(picked[bad]):
        if below and not above and all(is_missing_number(cells[choice.columns[bad]]) for _, cells in below):
            refuse_cell(path, picked[bad], f"line {line}", column, f" It has none: --drop {shlex.quote(column)}.")
        here, rows = sum(map(is_missing_number, picked)), 1
        with suppress(ValueError, csv.Error):  # a line below that cannot be read either is not counted
            for _, cells in chain(below, head.rows):
                numbers = (cells[i] for i in choice.columns if i not in choice.words)
                count = sum(map(is_missing_number, numbers)) + sum(class_name(cells[i]) == EMPTY for i in choice.words)
                here, rows = here + count, rows + bool(count)
        remedy = missing_count(here, rows)
    refuse_cell(path, picked[bad], f"line {line}", column, remedy)


def _is_header(first: Sequence[str], second: Sequence[str], known: Collection[str]) -> bool:
    above = zip(first, second, strict=False)
    text_above = (not is_missing_number(a) and not is_numeric(a) and is_numeric(b) for a, b in above)
    return not any(map(is_numeric, first)) or any(cell in known for cell in first) or any(text_above)
