"""Tables: rows of real numbers with a name for each column, and perhaps a column of labels.

Numbers are parsed as float64 and kept as float32, the type that models compute in; a column whose differences would
be lost on the way is refused. So is what has no density: a number that is missing or infinite, and (where the rows
are to be trained on) a column that is constant. `delimited`, `arrays` and `parquet` read the files.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..spelling import hint, quoted
from .dataset import Dataset, Schema, naming
from .labels import MISSING, class_name, class_names, encode


class Choice(NamedTuple):
    """The positions in a file of the columns of numbers, and of the label column (None: no labels).

    `open` says that no label was chosen, but one could be.
    """

    columns: list[int]
    label: int | None
    open: bool = False


#: What a reader asks once it knows the columns of a file: (file, names, whether the names are the file's own).
Choose: TypeAlias = Callable[[Path, Sequence[str], bool], Choice]


@dataclass(frozen=True)
class Table:
    """What a reader found: numbers (N, D) in float64, labels ("" where missing), and where row i stands in the file."""

    path: Path
    columns: tuple[str, ...]
    x: NDArray[np.float64]
    label: str
    labels: list[str] | None
    place: Callable[[int], str]


def check_names(path: Path, names: list[str]) -> list[str]:
    """The names of a file's columns, if every column has one of its own."""
    seen: set[str] = set()
    for i, name in enumerate(names):
        if not name:
            raise ValueError(f"{path}: column {i + 1} has no name. Name it, or remove it if it only counts the rows.")
        if name in seen:
            raise ValueError(f"{path}: two columns are called {quoted(name)}. Give every column a name of its own.")
        seen.add(name)
    return names


def all_columns(label: str) -> Choose:
    """Every column is data, except that of the labels."""

    def choose(path: Path, names: Sequence[str], named: bool) -> Choice:
        if label and label not in names:
            raise ValueError(f"{path} has no column {quoted(label)} for the labels. {hint(label, names)}")
        columns = [i for i, name in enumerate(names) if name != label]
        if not columns:
            raise ValueError(f"{path} has no column of numbers beside the labels {quoted(label)}. Give at least one.")
        return Choice(columns, names.index(label) if label else None, open=not label)

    return choose


def columns_of(schema: Schema, *, labels: bool = True) -> Choose:
    """The columns a model knows, by name; in a file without names, by position. Labels may be absent, or ignored."""

    def choose(path: Path, names: Sequence[str], named: bool) -> Choice:
        wanted = schema.names
        if not named and len(names) == len(wanted):
            return Choice(list(range(len(names))), None)
        position = {name: i for i, name in enumerate(names)}
        missing = next((column for column in wanted if column not in position), None)
        if missing is not None and not named:
            raise ValueError(f"{path} has {len(names)} columns without names; the model takes {schema}, in this order.")
        if missing is not None:
            others = set(names).difference(wanted)
            remedy = hint(missing, [name for name in names if name in others] or names)
            raise ValueError(f"{path} has no column {quoted(missing)}, which the model needs. {remedy}")
        label = position.get(schema.label) if labels else None
        return Choice([position[column] for column in wanted], label)

    return choose


def number(cell: str) -> float:
    """The number in a cell of text, be it infinite or NaN; a `ValueError` if it holds anything else.

    Python's float also takes 1_000 and the digits of every script, which other programs read in other ways, or not.

    >>> number(" -1.5e3 ")
    -1500.0
    """
    if not cell.isascii() or "_" in cell:
        raise ValueError(f"{quoted(cell)} is not a number.")
    return float(cell)


def is_number(cell: str) -> bool:
    """Whether a cell of text is a number, be it infinite or NaN.

    >>> [is_number(cell) for cell in ("1e3", "inf", "1_000", "\u0663", "")]
    [True, True, False, False, False]
    """
    try:
        number(cell)
    except ValueError:
        return False
    return True


def label_hint(column: str, cells: Iterable[object]) -> str:
    """What to add to the sentence about a cell that is no number, where (nearly) all cells of its column are text."""
    filled = [cell for cell in cells if class_name(cell) != MISSING]
    text = sum(isinstance(cell, str) and not is_number(cell) for cell in filled)
    if text < 2 or text < 0.9 * len(filled):
        return ""
    return f" If it holds the classes, name it: --label {shlex.quote(column)}."


def load(table: Table) -> Dataset:
    """A table to train on."""
    classes = class_names(table.labels or ())
    known = sum(label != MISSING for label in table.labels or ())
    if len(classes) > 10 and 2 * len(classes) > known:
        raise ValueError(
            f"{table.path} has {len(classes)} different labels in {known} rows of column {quoted(table.label)}; "
            "a label names a class. Choose another label column."
        )
    if table.labels is not None and not classes:
        raise ValueError(f"{table.path} has no label in column {quoted(table.label)}. Fill some in, or set label = ''.")
    with naming(table.path):
        schema = Schema((len(table.columns),), columns=table.columns, label=table.label, classes=classes)
    dataset = read(table, schema)
    _check_precision(table, dataset)
    return dataset


def read(table: Table, schema: Schema) -> Dataset:
    """A table for a model of this schema, to which its columns were chosen."""
    with np.errstate(over="ignore"):  # what overflows is infinite, and said so
        x = table.x.astype(np.float32)
    finite = np.isfinite(x)
    if not finite.all():
        row, column = (int(i) for i in np.argwhere(~finite)[0])
        raise ValueError(
            f"{table.path}: {table.x[row, column]} in {table.place(row)}, column "
            f"{quoted(table.columns[column])}; every number must be finite and fit float32. Fill it in, or remove the "
            "row."
        )
    if not len(x):
        raise ValueError(f"{table.path} has no rows. Give at least one.")
    labelled = table.labels is not None and schema.classes
    y = encode(table.labels or [], schema.classes, lambda i: f"{table.path}, {table.place(i)}") if labelled else None
    return Dataset(torch.from_numpy(x), y, schema)


def refuse_constant(train: Dataset) -> None:
    """A density can be as large as it likes on a column that never changes: refuse to train on one."""
    constant = (train.x == train.x[0]).all(dim=0).nonzero()
    if len(constant):
        i = int(constant[0])
        name = train.schema.names[i]
        raise ValueError(
            f"column {quoted(name)} is {float(train.x[0, i]):g} in all {len(train)} rows to train on, so its density "
            "has no bound. Remove the column."
        )


def _check_precision(table: Table, dataset: Dataset) -> None:
    """float32 has 24 bits: a column like a time in seconds since 1970 would lose what it differs by."""
    lost = np.abs(table.x - dataset.x.numpy()).max(axis=0)
    spread = np.where(np.ptp(table.x, axis=0) > 0, table.x.std(axis=0), np.inf)  # a constant has nothing to lose
    for i in np.flatnonzero(lost > 1e-3 * spread):
        raise ValueError(
            f"{table.path}: column {quoted(table.columns[i])} holds numbers like {table.x[0, i]:.17g}, whose "
            "differences do not fit float32. Subtract an offset from the column."
        )
