"""Read large text files with pyarrow, where it is installed: several times as fast as `delimited`.

Only a file without any irregularity is read this way. Otherwise, for a missing number, a decimal comma, an infinite
number, a line that is too short or whatever pyarrow refuses, `read_columns` returns None, and `delimited` reads the
file line by line, so that results and error messages do not depend on what is installed.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from .choice import ColumnChoice, text_columns

#: Files below this number of bytes are read faster than pyarrow is imported.
LARGE = 2**22


def read_columns(
    path: Path, separator: str, names: Sequence[str], choice: ColumnChoice, header: int
) -> tuple[NDArray[np.float64], dict[int, list[str]]] | None:
    """Return the numbers of the chosen columns, 0 for categories, and the cells of the columns of text, by position.

    `header` is the line of the header, 0 if there is none. None if the file is small, compressed or not regular, or
    there is no pyarrow.
    """
    if header > 1 or not path.is_file() or path.suffix.lower() == ".gz" or path.stat().st_size < LARGE:
        return None
    try:
        with path.open("rb") as file:
            found = _read(file, separator, names, choice, header)
    except Exception:  # pyarrow has errors of its own; whatever is wrong, `delimited` says it
        return None
    return _columns(found, names, choice)


def parse_block(
    block: Sequence[str], separator: str, names: Sequence[str], choice: ColumnChoice
) -> tuple[NDArray[np.float64], dict[int, list[str]]] | None:
    """Return the same as `read_columns` for some lines of a file; None also for lines with quotes."""
    text = "".join(block)
    if '"' in text:
        return None
    try:
        found = _read(io.BytesIO(text.encode("utf-8")), separator, names, choice, 0)
    except Exception:
        return None
    return _columns(found, names, choice)


def _columns(
    found: Any, names: Sequence[str], choice: ColumnChoice
) -> tuple[NDArray[np.float64], dict[int, list[str]]] | None:
    text = {i: found[names[i]].to_pylist() for i in text_columns(choice)}
    x = np.zeros((found.num_rows, len(choice.columns)))
    for k, i in enumerate(choice.columns):
        if i not in choice.words:
            x[:, k] = found[names[i]].to_numpy()
    quoted = any('"' in cell for column in text.values() for cell in column)  # a quote that pyarrow does not remove
    return None if quoted or not np.isfinite(x).all() else (x, text)


def _read(file: IO[bytes], separator: str, names: Sequence[str], choice: ColumnChoice, header: int) -> Any:
    arrow, csv = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.csv")
    numbers = [names[i] for i in choice.columns if i not in choice.words]
    text = [names[i] for i in text_columns(choice)]
    kinds = {**dict.fromkeys(numbers, arrow.float64()), **dict.fromkeys(text, arrow.string())}
    return csv.read_csv(
        file,
        read_options=csv.ReadOptions(column_names=list(names), skip_rows=header),
        parse_options=csv.ParseOptions(delimiter=separator),
        convert_options=csv.ConvertOptions(
            column_types=kinds, include_columns=list(kinds), null_values=[], strings_can_be_null=False
        ),
    )
