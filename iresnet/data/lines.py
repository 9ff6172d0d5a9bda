"""The lines of a text file: opened, decompressed, counted, and split into cells.

Lines are read one at a time, so that a file of any size, and the standard input, need little memory. Lines that were
read to find out about a file can be put back.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

from .npy import FREE, RATIO, is_overpacked
from .numerals import DECIMAL_COMMA

Line: TypeAlias = tuple[int, list[str]]  # its number, counted from 1, and its cells

#: Most characters of the first line that decide the separator; of any line.
HEAD_LENGTH, LINE_LENGTH = 2**16, 2**26

#: What bytes that are not UTF-8 are read as.
INVALID = re.compile("[\udc80-\udcff]")

DECIMAL_HINT = " If its commas are decimal signs, separate the columns by semicolons or tabs, or quote such numbers."
COMMENT_HINT = " Lines that begin with # are not skipped: remove them."


class Lines:
    """An iterator over the lines of a file, compressed or not, or of the standard input (-); `number` counts them.

    It refuses a line that is too long, and a compressed file that unpacks to far too much.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.number, self._size = path, 0, 0
        self._ahead: deque[str] = deque()
        self._kept: list[str] | None = []
        if str(path) == "-" and sys.stdin is None:
            raise ValueError("the standard input is closed. Give a file, or pipe a table into the command.")
        packed = path.suffix.lower() == ".gz"
        self._raw: IO[bytes] = sys.stdin.buffer if str(path) == "-" else path.open("rb")
        binary = cast(IO[bytes], gzip.GzipFile(fileobj=self._raw)) if packed else self._raw
        self._file = io.TextIOWrapper(binary, newline="", encoding="utf-8-sig", errors="surrogateescape")
        self._bytes = 0 if str(path) == "-" else path.stat().st_size
        self._packed = self._bytes if packed else 0

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        if self._raw is sys.stdin.buffer:
            self._file.detach()
        else:
            self._file.close()
            self._raw.close()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._ahead.popleft() if self._ahead else self._read()
        if not line:
            raise StopIteration
        self.number += 1
        if self._kept is not None:
            self._kept.append(line)
        return line

    @property
    def fraction(self) -> float | None:
        """The fraction of the file that has been read; None for the standard input."""
        return min(1.0, self._raw.tell() / self._bytes) if self._bytes else None

    def separator(self) -> str:
        """Return the separator of the cells, judging by the first line, which is put back."""
        first = re.sub(r'"[^"]*"', "", next(self, "")[:HEAD_LENGTH])
        self.return_to(0)
        decimal = next((other for other in ";\t" if other in first and _has_decimal_commas(first.split(other))), None)
        common = decimal or max(",;\t", key=first.count)
        return "|" if "|" in first and common not in first else common

    def return_to(self, number: int) -> None:
        """Go back to after this line."""
        assert self._kept is not None
        self.put_back(self._kept[number:])
        del self._kept[number:]

    def forget(self) -> None:
        """Keep no lines from here on to return to."""
        self._kept = None

    def put_back(self, lines: Sequence[str]) -> None:
        """Let these lines, which were the last, be the next."""
        self._ahead.extendleft(reversed(lines))
        self.number -= len(lines)

    def cells(self, separator: str, width: int = 0) -> Iterator[Line]:
        """Iterate over the cells of the lines, none for an empty line; all must have as many as the first."""
        before, top = self.number, ""
        reader = csv.reader(self, delimiter=separator, skipinitialspace=True)
        for cells in _explained(reader, before):
            width, top = width or len(cells), top or "".join(cells[:1])
            if cells and len(cells) != width:
                hint = DECIMAL_HINT if separator == "," and len(cells) > width else ""
                hint = COMMENT_HINT if top.startswith("#") else hint
                line = before + reader.line_num
                raise ValueError(f"{self.path}: line {line} has {len(cells)} cells; those above have {width}.{hint}")
            yield before + reader.line_num, cells

    def _read(self) -> str:
        line = self._file.readline(LINE_LENGTH)
        self._size += len(line)
        if not line.isascii() and INVALID.search(line):
            raise ValueError(f"{self.path} must be text in UTF-8; line {self.number + 1} is not. Save it as UTF-8.")
        if self._packed and is_overpacked(self._size, self._packed):
            raise ValueError(
                f"{self.path} unpacks from {self._packed:,} to more than {self._size:,} bytes; above {FREE:,} bytes it "
                f"may unpack to {RATIO} times its size. Save it without compression."
            )
        if len(line) == LINE_LENGTH:
            number = self.number + 1
            raise ValueError(
                f"{self.path}: line {number} is longer than {LINE_LENGTH:,} characters. Break it into rows."
            )
        return line


def _explained(reader: Any, before: int) -> Iterator[list[str]]:
    """Iterate over rows of cells; an error names the line that its row begins in."""
    while True:
        above = reader.line_num
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise csv.Error(f"line {before + above + 1}: {error}") from None
        yield cells


def _has_decimal_commas(cells: Sequence[str]) -> bool:
    """Whether every comma in these cells is that of a number."""
    return all(DECIMAL_COMMA.fullmatch(cell.strip()) for cell in cells if "," in cell)
