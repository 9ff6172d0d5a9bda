"""Tables: the content of a file, with names of columns, and what readers of files ask of names and cells.

`choice` says which columns are read, `columns` has their kinds; `delimited` reads text files, `arrays` NumPy and
Parquet files. `conversion` makes a dataset of a table.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from ..spelling import quoted
from .detection import DETECT_FROM
from .labels import EMPTY, class_name
from .numerals import is_date, is_number, is_written_number, number_alone


@dataclass(frozen=True)
class Table:
    """The content of a file: numbers (N, D) in float64, labels ("" where missing), and where in the file row i is.

    `words` holds the cells of columns of categories ("" where missing), which are 0 in x, and `ids` the names of rows.
    """

    path: Path
    columns: tuple[str, ...]
    x: NDArray[np.float64]
    label: str
    labels: list[str] | None
    place: Callable[[int], str]
    words: Mapping[str, list[str]] = field(default_factory=dict)
    ids: list[str] | None = None

    def categories(self, column: str) -> list[str]:
        """Return the cells of a column as names of categories."""
        if column in self.words:
            return self.words[column]
        return [class_name(value) for value in self.x[:, self.columns.index(column)].tolist()]

    def select(self, columns: tuple[str, ...]) -> Table:
        """Select columns."""
        position, chosen = {name: i for i, name in enumerate(self.columns)}, {*columns}
        places = [position[name] for name in columns]
        words = {name: cells for name, cells in self.words.items() if name in chosen}
        return replace(self, columns=columns, x=self.x[:, places], words=words)

    def take(self, rows: NDArray[np.int64]) -> Table:
        """Select rows."""
        chosen = rows.tolist()

        def some(cells: list[str]) -> list[str]:
            return [cells[i] for i in chosen]

        return replace(
            self,
            x=self.x[rows],
            labels=None if self.labels is None else some(self.labels),
            place=lambda i: self.place(chosen[i]),
            words={name: some(cells) for name, cells in self.words.items()},
            ids=None if self.ids is None else some(self.ids),
        )


def check_names(path: Path, names: list[str], *, unnamed: Collection[int] = ()) -> list[str]:
    """Return the column names of a file if they are unique and none is empty.

    Columns at the positions `unnamed` need no name, and no column choice includes them.
    """
    seen: set[str] = set()
    for i, name in enumerate(names):
        if not name:
            if i in unnamed:
                continue
            raise ValueError(f"{path}: column {i + 1} has no name. Name it, or remove it if it only numbers the rows.")
        if name in seen:
            raise ValueError(f"{path}: two columns are called {quoted(name)}. Give every column a unique name.")
        seen.add(name)
    return names


def text_hint(column: str, cells: Iterable[object], *, labelled: bool) -> str:
    """Return advice on what a column may be, if nearly all of its cells are text; else nothing."""
    filled = [cell for cell in cells if class_name(cell) != EMPTY]
    text = [cell for cell in filled if isinstance(cell, str) and not is_written_number(cell)]
    if len(text) < 2 or len(text) < 0.9 * len(filled):
        return ""
    name = shlex.quote(column)
    if all(map(is_date, text)):
        return (
            f" If these dates name the rows: --id {name}. To learn from them, write them as numbers, such as days or "
            f"hours. Else leave the column out: --drop {name}."
        )
    if number := number_alone(text):
        return (
            f" Write numbers alone, such as {number}, without signs, units and separators. Else leave the column out: "
            f"--drop {name}."
        )
    if names_rows(len(set(map(str, filled))), len(filled)):
        return f" If it names the rows: --id {name}; else leave it out: --drop {name}."
    label = "" if labelled else f" If it holds the classes, name it: --label {name}."
    return f"{label} If it is data, a category: --kind {name}=category. Else leave it out: --drop {name}."


def names_rows(distinct: int, rows: int) -> bool:
    """Whether a column has too many different values for classes or categories."""
    return distinct > 10 and 2 * distinct > rows


def holds_words(cells: Sequence[object]) -> bool:
    """Whether a column holds categories: text in every cell that is filled, and ten cells for each different word.

    A text that does not begin with a letter may be a number that is written in another way, such as $1 or 5 %.

    >>> holds_words(50 * ["rose", "tulip"]), holds_words(50 * ["rose", "7"]), holds_words(["rose", "tulip"])
    (True, False, False)
    """
    filled = [name for name in map(class_name, cells) if name != EMPTY]
    words = all(name[0].isalpha() and not is_number(name) for name in filled)
    return words and len(filled) >= max(DETECT_FROM, 10 * len(set(filled)))


def refuse_cell(path: Path, cell: object, place: str, column: str, remedy: str) -> NoReturn:
    """Raise the error for a cell that is not a number; `remedy` follows the sentence."""
    what = "a number is missing" if isinstance(cell, str) and not cell.strip() else f"{quoted(cell)} is not a number"
    raise ValueError(
        f"{path}: {what} in {place}, column {quoted(column)}. Correct it, or remove the row or the column.{remedy}"
    ) from None
