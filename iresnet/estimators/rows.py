"""Arrays as datasets: rows with the names of their columns, weights and kinds."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import _check_sample_weight

from ..data import Dataset, Schema, conversion, table
from ..data.choice import TableOptions, check_known
from ..data.columns import parse_kinds
from ..spelling import MOST, listed, quoted

Array: TypeAlias = NDArray[np.float64]

#: The fewest rows that a density is trained on.
MIN_ROWS = 5


def as_table(x: Array, columns: Sequence[str], words: Mapping[str, list[str]]) -> table.Table:
    """Return an array as a table, with the names of categories in columns of words; errors name row and column."""
    return table.Table(Path("X"), tuple(columns), x, "", None, lambda i: f"row {i}", words)


def unnamed(count: int) -> tuple[str, ...]:
    """Return the names of columns without names."""
    return Schema((count,)).names


def training_dataset(
    rows: table.Table, weights: Array | None, kinds: tuple[str, ...], targets: tuple[str, ...]
) -> Dataset:
    """Return the dataset to train on: rows of weight zero are left out, and so are weights that are all equal.

    `kinds` are declared kinds of columns. Columns that are only given, because there are `targets`, are real
    numbers unless they are categories, by their words or as declared, which become indicators.
    """
    if weights is not None:
        rows, weights = rows.take(np.flatnonzero(weights)), weights[weights > 0]
        if len(rows.x) < MIN_ROWS:
            raise ValueError(f"at least {MIN_ROWS} rows must have a positive weight; got {len(rows.x)}. Add rows.")
    check_known(rows.path, "data.kinds", parse_kinds(kinds), rows.columns)
    given = tuple(name for name in rows.columns if name not in targets) if targets else ()
    kinds = (*(f"{name}=real" for name in given), *kinds)
    dataset = conversion.training_dataset(rows, TableOptions(kinds=kinds, context=given))
    if weights is None or (weights == weights[0]).all():
        return dataset
    return replace(dataset, weights=torch.from_numpy(weights))


def checked_weights(sample_weight: ArrayLike | None, X: Array) -> Array | None:
    """Return one weight per row, not negative; None without weights."""
    if sample_weight is None:
        return None
    weights: Array = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True, copy=True)
    if not weights.any():
        raise ValueError("sample_weight is zero for all rows; at least one weight must be positive.")
    return weights


def warn_of_degenerate_columns(train: Dataset) -> None:
    """Warn of columns whose density has no upper bound, which `iresnet train` refuses.

    A pipeline makes such columns: if one is rounded, its standardised values still repeat, but have no step.
    """
    try:
        conversion.refuse_degenerate_columns(train)
    except ValueError as error:
        sentence = str(error).partition(". ")[0]
        remedy = 'Leave it out, or declare its kind: settings={"data.kinds": ["NAME=rounded:0.01"]}.'
        warnings.warn(f"{sentence}. {remedy}", UserWarning, stacklevel=4)


def warn_of_unknown_categories(rows: table.Table, data: Dataset) -> None:
    """Warn of categories that the model does not know: the log-density of their rows is -inf."""
    for name, cells in rows.words.items():
        unknown = (data.x[:, rows.columns.index(name)] < 0).nonzero().flatten().tolist()
        if unknown:
            found = listed(sorted({quoted(cells[i]) for i in unknown}), MOST)
            warnings.warn(
                f"column {quoted(name)} holds {found}, not one of the categories that the model was trained on: the "
                f"log-density of {len(unknown)} of {len(data)} rows is -inf.",
                UserWarning,
                stacklevel=4,
            )
