"""From a table to a dataset.

Numbers are parsed as float64 and stored as float32, the type that models compute in; a column whose differences would
be lost in float32 is refused. Categories are stored as 0, 1, ... Also refused are infinite numbers, missing cells
(unless their rows are left out on request) and, in training data, constant columns, since no density exists for them;
those of a file are left out.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..spelling import listed, prefix_errors, quoted
from .choice import TableOptions
from .columns import REAL, ColumnKind, parse_kinds
from .dataset import Dataset
from .detection import DETECT_FROM, degenerate, detect
from .labels import EMPTY, class_names, codes_by_name, encode_labels
from .missing import check_finite, tables_from, without_missing
from .schema import Schema
from .table import Table, names_rows

#: Finds the test rows of a table, given the labels and the rows that are left: returns positions among these.
RowChooser: TypeAlias = Callable[[Tensor | None, NDArray[np.int64]], NDArray[np.int64]]

#: The largest distance of neighbouring float32, as a part of the step of a discrete column.
COARSEST = 1 / 16


def training_dataset(
    table: Table,
    options: TableOptions | None = None,
    known: Schema | None = None,
    test_rows: RowChooser | None = None,
) -> Dataset:
    """Convert a table to a dataset to train on, with a schema of its own, or the kinds of one that is `known`.

    Kinds are detected without the `test_rows`. The names of categories are those of all rows, as those of classes are:
    they say which values exist.
    """
    options = options or TableOptions()
    total = len(table.x)
    table, rows = without_missing(table) if options.skip_missing else (table, ())
    constants = _constants(table, options) if known is None else known.constants
    table = table.select(tuple(name for name in table.columns if name not in constants))
    classes = class_names(table.labels or ())
    labelled = sum(label != EMPTY for label in table.labels or ())
    if names_rows(len(classes), labelled):
        raise ValueError(
            f"{table.path} has {len(classes)} different labels in {labelled} rows of column {quoted(table.label)}; "
            "labels must be classes. Choose another label column."
        )
    if table.labels is not None and not classes:
        raise ValueError(f"{table.path} has no label in column {quoted(table.label)}. Add some, or set label = ''.")
    check_finite(table)
    if known is None:
        left = np.array(rows, dtype=np.int64) if rows else np.arange(total)
        kinds = _kinds(table, parse_kinds(options.kinds), _without_test_rows(table, classes, left, test_rows))
    else:
        kinds = known.kinds
    with prefix_errors(table.path):
        schema = Schema((len(table.columns),), None, table.columns, table.label, classes, kinds, options.id)
        if options.context:
            schema = schema.given_others([name for name in table.columns if name not in options.context])
        if known is not None:  # an earlier version made no indicators
            schema = replace(schema, one_hot=known.one_hot)
        schema = replace(schema, constants=constants)
    dataset = dataset_for_schema(table, schema)
    _check_precision(table, dataset)
    return replace(dataset, rows=rows)


def dataset_for_schema(
    table: Table, schema: Schema, *, skip_missing: bool = False, below: Iterable[Table] = (), known: bool = False
) -> Dataset:
    """Convert a table, whose columns were chosen for this schema, to a dataset.

    A category that the schema does not know becomes -1, a value that its column cannot have; it is refused in a given
    column, since nothing is known of the density given it, and with `known` in every column. `below` are the tables of
    the rows below these, if a file is read in chunks: error messages count what is wrong in them, too.
    """
    table, rows = without_missing(table) if skip_missing else (table, ())
    check_finite(table, below)
    x = table.x.astype(np.float32, order="C")  # rows of equal files have equal scores, however they are stored
    for i, (column, kind) in enumerate(zip(table.columns, schema.column_kinds, strict=True)):
        if kind.name == "category":
            codes = codes_by_name(kind.categories)
            x[:, i] = [codes.get(name, -1) for name in table.categories(column)]
            if known or column in schema.one_hot:
                _refuse_unknown(table, column, kind, x[:, i] < 0, below)
    if not len(x):
        raise ValueError(f"{table.path} has no rows. Give at least one.")
    y = encode_labels(table.labels, schema.classes, lambda i: f"{table.path}, {table.place(i)}")
    return Dataset(torch.from_numpy(x), y, schema, tuple(table.ids or ()), rows)


def _refuse_unknown(
    table: Table, column: str, kind: ColumnKind, unknown: NDArray[np.bool_], below: Iterable[Table]
) -> None:
    for row in np.flatnonzero(unknown).tolist():
        known = codes_by_name(kind.categories)
        count = sum(name not in known for t in tables_from(table, below) for name in t.categories(column))
        raise ValueError(
            f"{table.path}: column {quoted(column)} must hold one of {listed(kind.categories)}; got "
            f"{quoted(table.categories(column)[row])} in {table.place(row)}, of which the model knows nothing. Remove "
            f"the row.{f' There are {count} such rows.' if count > 1 else ''}"
        )


def _without_test_rows(
    table: Table, classes: Sequence[str], left: NDArray[np.int64], test_rows: RowChooser | None
) -> NDArray[np.bool_]:
    """Return which rows choose the kinds of columns."""
    chosen = np.ones(len(table.x), dtype=np.bool_)
    if test_rows is not None and len(chosen) > 1:
        with prefix_errors(table.path):
            chosen[test_rows(encode_labels(table.labels, classes, table.place), left)] = False
    return chosen


def _kinds(
    table: Table, declared: Mapping[str, ColumnKind | None], chosen: NDArray[np.bool_]
) -> tuple[ColumnKind, ...]:
    """Return the kind of every column, declared or detected in the chosen rows; empty if all are real."""
    kinds = [_kind(table, i, column, declared, chosen) for i, column in enumerate(table.columns)]
    return () if all(kind == REAL for kind in kinds) else tuple(kinds)


def _kind(
    table: Table, i: int, column: str, declared: Mapping[str, ColumnKind | None], chosen: NDArray[np.bool_]
) -> ColumnKind:
    if column in table.words:
        return _category(table, column)
    if column not in declared:
        return detect(table.x[chosen, i]) or _category(table, column)
    x, kind = table.x[:, i], declared[column]
    if kind is None:
        return _category(table, column)
    outside = np.flatnonzero(~kind.contains(x))
    if len(outside):
        raise ValueError(
            f"{table.path}: column {quoted(column)} is declared as {kind}; got {x[outside[0]]:g} in "
            f"{table.place(int(outside[0]))}. Correct it, or declare another kind."
        )
    return kind


def _category(table: Table, column: str) -> ColumnKind:
    """Return the kind of a column of categories; one with a single name is refused later, unless it is only given."""
    names, rows = class_names(table.categories(column)), len(table.x)
    if names_rows(len(names), rows):
        name = shlex.quote(column)
        raise ValueError(
            f"{table.path} has {len(names)} different values in {rows} rows of column {quoted(column)}; a category has "
            f"few. Leave the column out (of a file: --drop {name}, or --id {name} if it names the rows)."
        )
    return ColumnKind.category(names) if names else REAL


def _constants(table: Table, options: TableOptions) -> tuple[str, ...]:
    """Return the columns with one and the same value in every row; none where they are declared, given, or all."""
    if not options.skip_constants:
        return ()
    kept = {*options.context, *parse_kinds(options.kinds)}
    found = [name for i, name in enumerate(table.columns) if name not in kept and _is_constant(table, i)]
    return tuple(found) if len(found) < len(set(table.columns) - set(options.context)) else ()


def _is_constant(table: Table, i: int) -> bool:
    cells = table.words.get(table.columns[i])
    return len(table.x) >= DETECT_FROM and bool((table.x[:, i] == table.x[0, i]).all()) and len(set(cells or [""])) == 1


def _check_precision(table: Table, dataset: Dataset) -> None:
    """Refuse columns whose differences float32, with its 24 bits, would lose, such as seconds since 1970.

    Also those whose noise it would lose: the likelihood of a discrete column is then no bound of a probability.
    """
    schema, x = dataset.schema, dataset.x.numpy()
    lost = np.abs(table.x - x).max(axis=0) * [kind.name != "category" for kind in schema.column_kinds]
    spread = np.where(np.ptp(table.x, axis=0) > 0, table.x.std(axis=0), np.inf)  # a constant has nothing to lose
    columns = zip(schema.column_kinds, schema.modelled, strict=True)
    steps = [(modelled and kind.step) or np.inf for kind, modelled in columns]
    coarse = np.spacing(np.abs(x).max(axis=0)) > COARSEST * np.array(steps)
    for i in np.flatnonzero((lost > 1e-3 * spread) | coarse):
        what = f"noise, as {schema.column_kinds[i]}, does" if coarse[i] else "differences do"
        raise ValueError(
            f"{table.path}: column {quoted(table.columns[i])} holds numbers like {table.x[0, i]:.17g}, whose "
            f"{what} not fit float32. Subtract an offset from the column."
        )


def refuse_constant_columns(train: Dataset) -> None:
    """Refuse to train on a constant column: a density has no upper bound there. One that is only given may be."""
    schema = train.schema
    if len(train) == 1:
        raise ValueError("only 1 row is left to train on. Add rows, or hold out fewer (data.test, data.validation).")
    modelled = torch.tensor(schema.modelled)
    constant = ((train.x == train.x[0]).all(dim=0).cpu() & modelled).nonzero()
    if len(constant):
        i = int(constant[0])
        name = schema.names[i]
        kind, value = schema.column_kinds[i], float(train.x[0, i])
        what = quoted(kind.categories[int(value)]) if kind.categories else f"{value:g}"
        raise ValueError(
            f"column {quoted(name)} is {what} in all {len(train)} training rows, so its density has "
            f"no upper bound. Leave the column out (of a file: --drop {shlex.quote(name)})."
        )


def refuse_impossible_rows(test: Dataset) -> None:
    """Refuse to train a density that could not be evaluated: on test data with values that a column cannot have."""
    schema = test.schema
    if not schema.kinds or not bool((outside := ~schema.allowed(test.x)).any()):
        return
    row, i = (int(n) for n in outside.nonzero()[0])
    name, count = schema.names[i], int(outside[:, i].sum())
    raise ValueError(
        f"column {quoted(name)} is {schema.column_kinds[i].describe()} in the training rows, but {test.x[row, i]:g} in "
        f"the test data ({count} of {len(test)} rows), which would have the likelihood 0. Declare its kind, e.g. "
        f"--kind {shlex.quote(name)}=real, or remove such rows."
    )


def refuse_degenerate_columns(train: Dataset) -> None:
    """Refuse to train a density that has no upper bound on these rows; `detection` says where."""
    schema = train.schema
    if schema.is_image:
        return
    names, positions = schema.targets or schema.names, {name: i for i, name in enumerate(schema.names)}
    rows = train.x[:, [positions[name] for name in names]].cpu().double().numpy()
    if reason := degenerate(rows, names, schema.select(names).column_kinds if schema.columns else schema.column_kinds):
        raise ValueError(reason)
