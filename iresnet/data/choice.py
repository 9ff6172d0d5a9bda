"""Which columns of a table are read, and as what: data, categories, labels or names of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from ..spelling import hint, quoted
from .columns import parse_kinds
from .schema import Schema


@dataclass(frozen=True)
class TableOptions:
    """Which columns of a table are data, labels and ids, of which kinds they are, and whether cells may be missing.

    Without `columns`, all columns are data but the label, the id and those to `drop`; with `skip_constants`, constant
    columns are not. The density is that of the data without the `context`, conditional on it.
    """

    label: str = ""
    columns: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    id: str = ""
    kinds: tuple[str, ...] = ()
    skip_missing: bool = False
    context: tuple[str, ...] = ()
    skip_constants: bool = False


class ColumnChoice(NamedTuple):
    """The positions in a file of the columns of data and of the columns of labels and of ids (None: there is none).

    In `training` data, errors suggest what else a column of text may be. The columns at the positions in `words` hold
    categories; those in `undeclared` do if they hold words. With `skip_missing`, missing numbers are read as NaN.
    """

    columns: list[int]
    label: int | None
    training: bool = False
    id: int | None = None
    words: frozenset[int] = frozenset()
    skip_missing: bool = False
    undeclared: frozenset[int] = frozenset()


def text_columns(choice: ColumnChoice) -> list[int]:
    """Return the positions of the columns that are read as text: categories, labels and ids."""
    return sorted({*choice.words, *(i for i in (choice.label, choice.id) if i is not None)})


#: Chooses columns, given (file, column names, whether the file has a header with these names).
ColumnChooser: TypeAlias = Callable[[Path, Sequence[str], bool], ColumnChoice]


def choose_training_columns(options: TableOptions) -> ColumnChooser:
    """Choose the columns of training data: those that are requested, or all but the label, the id and the dropped."""
    label, kinds = options.label, parse_kinds(options.kinds)

    def choose(path: Path, names: Sequence[str], named: bool) -> ColumnChoice:
        if label and label not in names:
            raise ValueError(f"{path} has no column {quoted(label)} for the labels. {hint(label, names)}")
        for what in ("columns", "drop", "context"):
            check_known(path, f"--{what}", getattr(options, what), names)
        check_known(path, "--id", (options.id,), names)
        others = {label, options.id, *options.drop, ""}  # a column without a name numbers the rows
        chosen = [name for name in dict.fromkeys((*(options.columns or names), *options.context)) if name not in others]
        if not chosen and label:
            raise ValueError(f"{path} has no column of numbers beside the labels {quoted(label)}. Give at least one.")
        if not chosen:
            raise ValueError(f"{path} has no column left. Give at least one.")
        check_known(path, "--kind", kinds, chosen)
        if options.context and not set(options.context) < set(chosen):
            known = set(chosen)
            wrong = next((name for name in options.context if name not in known), options.context[0])
            raise ValueError(
                f"{path}: the context must be some of the columns, and leave at least one other; got {quoted(wrong)}."
            )
        position = {name: i for i, name in enumerate(names)}
        return ColumnChoice(
            [position[name] for name in chosen],
            position[label] if label else None,
            training=True,
            id=position[options.id] if options.id else None,
            words=frozenset(position[column] for column, kind in kinds.items() if kind is None),
            skip_missing=options.skip_missing,
            undeclared=frozenset(position[name] for name in chosen if name not in kinds),
        )

    return choose


def with_words(choose: ColumnChooser, columns: Sequence[str]) -> ColumnChooser:
    """Choose the same columns, of which these hold words, and no others."""

    def choose_again(path: Path, names: Sequence[str], named: bool) -> ColumnChoice:
        words = frozenset(i for i, name in enumerate(names) if name in columns)
        return choose(path, names, named)._replace(words=words, undeclared=frozenset())

    return choose_again


def check_known(path: Path, option: str, columns: Iterable[str], names: Sequence[str]) -> None:
    """Refuse an option that names a column which the file does not have."""
    known = {*names, ""}
    for column in columns:
        if column not in known:
            raise ValueError(f"{path} has no column {quoted(column)}, which {option} names. {hint(column, names)}")


def choose_schema_columns(
    schema: Schema, *, labels: bool = True, id: str = "", skip_missing: bool = False
) -> ColumnChooser:
    """Choose the columns of a schema, by name; in a file without a header, by position.

    Labels may be absent; so may the schema's own column of ids, but not one that is given here.
    """

    def choose(path: Path, names: Sequence[str], named: bool) -> ColumnChoice:
        wanted, categories = schema.names, [kind.name == "category" for kind in schema.column_kinds]
        check_known(path, "--id", [id], names)
        if not named and len(names) == len(wanted):
            words = frozenset(i for i, is_category in enumerate(categories) if is_category)
            return ColumnChoice(list(range(len(names))), None, words=words, skip_missing=skip_missing)
        position = {name: i for i, name in enumerate(names)}
        missing = next((column for column in wanted if column not in position), None)
        if missing is not None and not named:
            raise ValueError(f"{path} has {len(names)} columns and no header; the model takes {schema}, in this order.")
        if missing is not None:
            others = set(names).difference(wanted)
            remedy = hint(missing, [name for name in names if name in others] or names)
            raise ValueError(f"{path} has no column {quoted(missing)}, which the model needs. {remedy}")
        chosen = [position[column] for column in wanted]
        return ColumnChoice(
            chosen,
            position.get(schema.label) if labels else None,
            id=position.get(id or schema.id),
            words=frozenset(i for i, is_category in zip(chosen, categories, strict=True) if is_category),
            skip_missing=skip_missing,
        )

    return choose
