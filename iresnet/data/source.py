"""Load data by name or path: `load` for training, as three splits; `read` for a model whose schema is known.

A source is a built-in dataset (`names()`), a folder of images, or a table (.csv, .tsv, .npy, .npz, .parquet; .csv.gz
and .tsv.gz too, and - for the standard input). Built-in names take precedence: write ./digits for a folder of that
name.

The test split is the source's own if it has one. Otherwise it is held out from the training data, with the same samples
for every seed, so that runs with different seeds are comparable and none trains on test samples. The validation split
is the source's own if it has one (a folder of images may). Otherwise it is the end of the training data for MNIST and
CIFAR, and samples drawn by the seed, stratified by class, for other sources.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..spelling import hint, prefix_errors, quoted
from . import arrays, blocks, canonical, choice, conversion, delimited, images, large_table, split, table
from .builtin import load_builtin, names
from .dataset import Dataset, Splits
from .sampling import seeded_generator
from .schema import Schema
from .settings import PLACEHOLDER, DataSettings, is_placeholder

TEXT, ARRAYS, PARQUET = (".csv", ".tsv"), (".npy", ".npz"), (".parquet",)
COMPRESSED, STDIN = (".csv.gz", ".tsv.gz"), "-"
PARTS = ("train", "validation", "test")
KINDS = ", ".join((*TEXT, *ARRAYS, *PARQUET))


def load(settings: DataSettings, schema: Schema | None = None) -> Splits:
    """Load the training, validation and test splits, on the CPU.

    The kinds of a table's columns are those of the `schema` of an earlier run, if it is given, else detected.

    >>> [len(part) for part in load(DataSettings("digits")).parts.values()]
    [1221, 216, 360]
    """
    if (large := _open_large(settings)) is not None:
        return _load_large(large, settings, schema)
    train, validation, test = _own_splits(settings, schema)
    with prefix_errors(settings.source):
        if test is None and settings.test:
            train, test = split.divide(train, split.test_rows(train.y, len(train), settings.test))
        if validation is None:
            train, validation = _hold_out_validation(train, settings)
        if not train.schema.is_image:
            conversion.refuse_constant_columns(train)
        settings.augment.check(train.schema.shape)
        return Splits(
            split.keep_labels(train, settings.labelled, seeded_generator(settings.seed, "labels")), validation, test
        )


def read(
    source: str | Path,
    schema: Schema,
    *,
    folder: str = "data",
    part: str = "test",
    size: int = 0,
    labels: bool = True,
    id: str = "",
    skip_missing: bool = False,
) -> Dataset:
    """Read samples for a model of this schema, from a file, a folder, or one split of a built-in dataset or folder.

    The columns of a table are found by name, in any order; others are ignored, and labels may be absent. Labels of a
    dataset with other classes are dropped. With `labels=False` no labels are read, so a file may hold classes that the
    model does not know. `size` resizes the images of a folder, as in training. `id` is the column of a table that names
    its rows; with `skip_missing`, rows of a table with missing cells are left out.
    """
    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(PARTS)}; got {part!r}.")
    if str(source) in names():
        dataset = _with_schema(str(source), load_builtin(str(source), folder, part), schema)
        return dataset if labels else replace(dataset, y=None)
    path = Path(STDIN) if str(source) == STDIN else existing_path(source)
    if path.is_dir() or images.is_image(path):
        _check_kind(path, schema, images=True)
        parts = images.split_folders(path)
        if parts and part not in parts:
            raise ValueError(f"{path} has no sub-folder {part!r}. Give the folder that holds the images.")
        return images.read_image_folder(parts.get(part, path), schema, size, path, labels=labels)
    choose = choice.choose_schema_columns(schema, labels=labels, id=id, skip_missing=skip_missing)
    return _read_file(path, schema, choose, labels=labels, skip_missing=skip_missing)


def _open_large(settings: DataSettings) -> blocks.TableFile | None:
    """Return the table, if it is too large to be held in memory."""
    if settings.source in names() or not Path(settings.source).expanduser().is_file():
        return None
    return blocks.open_large(existing_path(settings.source), settings.in_memory * 2**30)


def _load_large(file: blocks.TableFile, settings: DataSettings, schema: Schema | None) -> Splits:
    """Load a table that is read in blocks."""
    _refuse_unused(settings, size=True)
    if settings.labelled != 1:
        raise ValueError(
            f"labelled must be 1 for a table that is read in blocks; got {settings.labelled}. Raise data.in_memory."
        )
    with prefix_errors(settings.source):
        return large_table.load_blocks(
            file, settings.table_options, schema, validation=settings.validation, test=settings.test, seed=settings.seed
        )


def _own_splits(settings: DataSettings, schema: Schema | None) -> tuple[Dataset, Dataset | None, Dataset | None]:
    """Load the training data and, where the source has them, the validation and test splits."""
    if settings.source in names():
        _refuse_unused(settings, table=False, size=True)
        train, test = (load_builtin(settings.source, settings.folder, p, settings.seed) for p in ("train", "test"))
        return train, None, test
    path = existing_path(settings.source)
    if path.is_dir() or images.is_image(path):
        _refuse_unused(settings, table=False)
        parts = images.split_folders(path)
        train = images.load_image_folder(parts.get("train", path), settings.size, path)
        validation, held = (
            images.read_image_folder(parts[part], train.schema, settings.size, path) if part in parts else None
            for part in ("validation", "test")
        )
        return train, validation, held
    _refuse_unused(settings, size=True)
    return _load_file(path, settings, schema), None, None


def _hold_out_validation(train: Dataset, settings: DataSettings) -> tuple[Dataset, Dataset]:
    n = split.held_out_count("validation", settings.validation, len(train))
    if settings.source in canonical.DATASETS:
        return split.hold_out_last(train, n)
    return split.hold_out(train, n, seeded_generator(settings.seed, "validation"))


def _load_file(path: Path, settings: DataSettings, schema: Schema | None) -> Dataset:
    options, label = settings.table_options, settings.label
    if path.suffix.lower() not in ARRAYS:
        known = (label, options.id, *options.columns, *options.drop, *options.context)
        read = _read_table(path, choice.choose_training_columns(options), *known)
        return conversion.training_dataset(read, options, schema, _test_rows(settings))
    content = arrays.read_arrays(path)
    if content.y is not None and label not in ("", "y"):
        raise ValueError(f"{path} has its labels in 'y'; got label = {quoted(label)}. Leave it empty.")
    if content.x.ndim == 4:
        return arrays.array_images(path, content, None)
    options = options if content.y is None else replace(options, label="")
    choose = choice.choose_training_columns(options)
    return conversion.training_dataset(arrays.array_table(path, content, choose), options, schema, _test_rows(settings))


def _test_rows(settings: DataSettings) -> conversion.RowChooser | None:
    """Return the function that finds the test rows among those of a file."""
    if not settings.test:
        return None
    return lambda y, rows: split.test_rows(y, len(rows), settings.test).numpy()


def _read_file(
    path: Path, schema: Schema, choose: choice.ColumnChooser, *, labels: bool, skip_missing: bool
) -> Dataset:
    if path.suffix.lower() not in ARRAYS:
        _check_kind(path, schema, images=False)
        read = _read_table(path, choose, *schema.names, schema.label, schema.id)
        return conversion.dataset_for_schema(read, schema, skip_missing=skip_missing)
    content = arrays.read_arrays(path, labels=labels, schema=schema)
    if schema.is_image and content.x.ndim == 2 and content.x.shape[1] == schema.dimension:
        raise ValueError(
            f"the model takes {schema}; {path} holds {content.x.dtype} {content.x.shape}. {_reshape_hint(schema)}"
        )
    _check_kind(path, schema, images=content.x.ndim == 4)
    if schema.is_image:
        return arrays.array_images(path, content, schema)
    return conversion.dataset_for_schema(arrays.array_table(path, content, choose), schema, skip_missing=skip_missing)


def _read_table(path: Path, choose: choice.ColumnChooser, *known: str) -> table.Table:
    if path.suffix.lower() in PARQUET:
        return arrays.read_parquet(path, choose)
    return delimited.read_delimited(path, choose, {*known} - {""})


def _with_schema(name: str, dataset: Dataset, schema: Schema) -> Dataset:
    """Give a built-in dataset the schema of a model that may have been trained on another one."""
    own = dataset.schema
    if (own.shape, own.levels, own.names) != (schema.shape, schema.levels, schema.names):
        raise ValueError(f"the model takes {schema}; {name} has {own}. Choose other data.")
    return replace(dataset, y=dataset.y if own.classes == schema.classes else None, schema=schema)


def _check_kind(path: Path, schema: Schema, *, images: bool) -> None:
    if schema.is_image != images:
        raise ValueError(
            f"the model takes {schema}; {path} holds {'images' if images else 'a table'}. Choose other data."
        )


def _reshape_hint(schema: Schema) -> str:
    shape = schema.shape[1:] if schema.shape[0] == 1 else schema.shape
    return f"Reshape to (N, {', '.join(map(str, shape))}), as uint8."


def existing_path(source: str | Path) -> Path:
    """Return the path of a file or folder that can be read; raise with a suggestion for another source."""
    path = Path(source).expanduser()
    if path.is_dir() or (
        path.is_file()
        and (images.is_image(path) or path.name.lower().endswith((*TEXT, *ARRAYS, *PARQUET, *COMPRESSED)))
    ):
        return path
    if str(source) == STDIN:
        raise ValueError("a run reads its data more than once, so they cannot come from -. Save them to a file.")
    if "://" in str(source):
        raise FileNotFoundError(
            f"data must be files on this machine; got the address {str(source)!r}. Download it first."
        )
    if path.exists():
        raise ValueError(f"{path} must be a folder of images or a table ({KINDS}). Convert it to one of these.")
    if is_placeholder(str(source)):
        raise FileNotFoundError(f"there is no file {PLACEHOLDER!r}; give your table: --data FILE ({KINDS}).")
    near = hint(str(source), names(), files_beside(source))
    raise FileNotFoundError(f"there is no dataset, file or folder {str(source)!r}. {near}")


def files_beside(source: str | Path) -> list[str]:
    """Return the paths of all files and folders beside one, which need not exist."""
    folder = Path(source).expanduser().parent
    return [str(path) for path in sorted(folder.iterdir())] if folder.is_dir() else []


def _refuse_unused(settings: DataSettings, *, table: bool = True, size: bool = False) -> None:
    if not table and settings.label:
        raise ValueError(
            f"label is a column of a table; got {quoted(settings.label)} for {settings.source}. Leave it empty."
        )
    options = (settings.columns, settings.drop, settings.context, settings.id, settings.kinds)
    given = next(filter(None, options), None)
    if not table and given:
        raise ValueError(
            f"columns, drop, context, id and kinds are for tables; got {quoted(given)} for {settings.source}. Leave "
            "them empty."
        )
    if size and settings.size:
        raise ValueError(f"size is for a folder of images; got {settings.size} for {settings.source}. Set size = 0.")
