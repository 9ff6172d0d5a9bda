"""Arrays as datasets: rows with the names of their columns, weights and kinds."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import _check_sample_weight, validate_data

from ..data import Dataset, Schema, table
from ..data.choice import TableOptions, check_known
from ..data.columns import parse_kinds
from ..spelling import quoted

Array: TypeAlias = NDArray[np.float64]

#: The fewest rows that a density is trained on.
MIN_ROWS = 5


def as_table(x: Array, columns: Sequence[str], label: str = "", labels: list[str] | None = None) -> table.Table:
    """Return an array as a table, whose errors name row and column."""
    return table.Table(Path("X"), tuple(columns), x, label, labels, lambda i: f"row {i}")


def check_rows(estimator: BaseEstimator, X: ArrayLike, *y: ArrayLike, **options: Any) -> Any:
    """Return rows as float64, and y if given, as scikit-learn checks them; `fit` remembers the columns."""
    _refuse_columns_without_numbers(X)
    return validate_data(estimator, X, *y, dtype=np.float64, **options)


def _refuse_columns_without_numbers(X: Any) -> None:
    """Name the first column of a pandas table that holds words or dates; NumPy takes dates for numbers."""
    if not hasattr(X, "iloc") or X.ndim != 2:
        return
    for i, name in enumerate(X.columns):
        column = X.iloc[:, i].dropna()
        if np.asarray(column).dtype.kind in "biufc":
            continue
        cell = next((cell for cell in column.tolist() if not _is_number(cell)), None)
        if cell is not None:
            encode = f'Encode it with OrdinalEncoder in a Pipeline and settings={{"data.kinds": ["{name}=category"]}}'
            remedy = encode if isinstance(cell, str) else "Convert it to numbers, such as days"
            raise ValueError(
                f"column {quoted(name)} holds {quoted(str(cell))}, which is not a number. {remedy}, or leave it out."
            )


def _is_number(cell: Any) -> bool:
    """Whether NumPy can convert a cell to a number."""
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return True


def unnamed(count: int) -> tuple[str, ...]:
    """Return the names of columns without names."""
    return Schema((count,)).names


def training_dataset(
    rows: table.Table, weights: Array | None, kinds: tuple[str, ...], targets: tuple[str, ...]
) -> Dataset:
    """Return the dataset to train on: rows of weight zero are left out, and so are weights that are all equal.

    `kinds` are declared kinds of columns. Columns that are only given, because there are `targets`, are real
    numbers unless they are declared as categories, which become indicators.
    """
    if weights is not None:
        rows, weights = rows.take(np.flatnonzero(weights)), weights[weights > 0]
        if len(rows.x) < MIN_ROWS:
            raise ValueError(f"at least {MIN_ROWS} rows must have a positive weight; got {len(rows.x)}. Add rows.")
    check_known(rows.path, "data.kinds", parse_kinds(kinds), rows.columns)
    if targets:
        kinds = (*(f"{name}=real" for name in rows.columns if name not in targets), *kinds)
    dataset = table.training_dataset(rows, TableOptions(kinds=kinds))
    if targets:
        dataset = replace(dataset, schema=dataset.schema.given_others(targets))
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
        table.refuse_degenerate_columns(train)
    except ValueError as error:
        sentence = str(error).partition(". ")[0]
        remedy = 'Leave it out, or declare its kind: settings={"data.kinds": ["NAME=rounded:0.01"]}.'
        warnings.warn(f"{sentence}. {remedy}", UserWarning, stacklevel=4)
