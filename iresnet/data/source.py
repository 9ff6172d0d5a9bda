"""From a name or a path to data: `load` for training, in three parts; `read` for a model that knows its rows already.

A source is a built-in set (`names()`), a folder of images, or a table (.csv, .tsv, .npy, .npz, .parquet). Built-in
names come first: write ./digits for a folder of that name.

The test part is the set's own where it has one, else the same rows of the training part whatever the seed, so that
seeds can be compared and no choice among them sees it. Validation is the set's own where it has one (a folder of images
may), for MNIST and CIFAR the last rows of the training part, elsewhere rows drawn by the seed, every class in
proportion.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch

from ..allowed import Rule, check_settings, in_interval
from ..spelling import hint, quoted
from . import arrays, canonical, delimited, images, split, table, toy
from .augment import Augment
from .dataset import Dataset, Schema, Splits, naming, stream

TEXT, ARRAYS, PARQUET = (".csv", ".tsv"), (".npy", ".npz"), (".parquet",)
PARTS = ("train", "validation", "test")
KINDS = ", ".join((*TEXT, *ARRAYS, *PARQUET))
POINTS = {"train": 50_000, "test": 10_000}  # drawn from a toy density
PLACEHOLDER = "table.csv"  # the source of a preset for tables, where the user's own is to stand
PATH, SIDE = 4096, 4096  # characters of a path; pixels of the side that images are resized to
SIZE = Rule(lambda size: 0 <= size <= SIDE, "is that of an image, or 0 to keep it", f"Use up to {SIDE}.")
DIGITS = Schema((1, 8, 8), 17, classes=tuple("0123456789"))


@dataclass(frozen=True)
class DataSettings:
    """Which data, how they are split, and how images are augmented. Parts are below 1; from 1 on, numbers of rows."""

    #: A built-in set, a folder of images, or a table.
    source: str = "digits"
    #: Where downloads live.
    folder: str = "data"
    #: The label column of a table.
    label: str = ""
    #: Held out of the training part, where the source has no validation part.
    validation: float = 0.15
    #: Held out first, where the source has no test part.
    test: float = 0.2
    #: The part of the training labels that is kept; the others become -1.
    labelled: Annotated[float, in_interval("(0, 1]", "is the part of the labels that is kept,")] = 1.0
    #: Images of a folder are resized to size x size; 0: all must be equal.
    size: Annotated[int, SIZE] = 0
    #: Of validation rows, kept labels and toy points.
    seed: int = 0

    # Augmentation, which `Augment` explains and checks.
    #: Shifts of up to so many pixels.
    shift: int = 0
    #: The part of the images that is shifted.
    shifted: float = 1.0
    #: What moves in: the image mirrored, or blank.
    border: str = "mirror"
    #: Flips left to right.
    flip: bool = False
    #: The side of a square that is hidden behind the image's mean.
    cutout: int = 0

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.source:
            raise ValueError(f"source must be a data set or a path; got ''. Use one of {', '.join(names())}.")
        for name in ("source", "folder"):
            _check_path(name, getattr(self, name))
        split.check_part("validation", self.validation)
        split.check_part("test", self.test)
        _ = self.augment  # refuses what cannot be done

    @property
    def augment(self) -> Augment:
        """What `Batches` does to training images."""
        return Augment(self.shift, self.flip, self.shifted, self.border, self.cutout)

    def resolved(self) -> DataSettings:
        """The same settings with absolute paths, which hold wherever a command is run; built-in names stay.

        >>> DataSettings("digits", folder="/tmp").resolved() == DataSettings("digits", folder="/tmp")
        True
        """
        named = self.source in names() or _is_placeholder(self.source)
        return replace(self, source=self.source if named else _absolute(self.source), folder=_absolute(self.folder))


def names() -> list[str]:
    """The built-in sets."""
    return ["digits", *canonical.SETS, *toy.names()]


def schema_of(name: str) -> Schema:
    """What a row of a built-in set is."""
    if name in canonical.SETS:
        return canonical.SETS[name].schema
    return DIGITS if name == "digits" else Schema((2,), columns=("x0", "x1"))


def rows_of(name: str) -> dict[str, int]:
    """How many rows the parts of a built-in set have."""
    if name in canonical.SETS:
        return canonical.SETS[name].rows
    return {"train": 1437, "test": 360} if name == "digits" else POINTS


def load(settings: DataSettings) -> Splits:
    """The rows to train on, to choose by and to be judged by, on the CPU.

    >>> [len(part) for part in vars(load(DataSettings("digits"))).values()]
    [1221, 216, 360]
    """
    train, validation, test = _parts(settings)
    with naming(settings.source):
        if test is None:
            n = split.count("test", settings.test, len(train))
            train, test = split.hold_out(train, n, stream(0, "test"))
        if validation is None:
            train, validation = _hold_out_validation(train, settings)
        if not train.schema.is_image:
            table.refuse_constant(train)
        settings.augment.check(train.schema.shape)
        return Splits(split.keep_labels(train, settings.labelled, stream(settings.seed, "labels")), validation, test)


def read(
    source: str | Path,
    schema: Schema,
    *,
    folder: str = "data",
    part: str = "test",
    size: int = 0,
    labels: bool = True,
) -> Dataset:
    """Rows for a model of this schema, from a file, a folder, or one part of a built-in set or of a folder with parts.

    A table's columns are found by name, in any order; others are ignored, and labels may be absent. Labels of a set
    with other classes are left out; with `labels=False` all are, unread, so that a file may hold classes that the model
    does not know. `size` resizes the images of a folder, as in training.
    """
    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(PARTS)}; got {part!r}.")
    if str(source) in names():
        rows = _adopt(str(source), _builtin(str(source), folder, part), schema)
        return rows if labels else replace(rows, y=None)
    path = _path(source)
    if path.is_dir() or images.is_image(path):
        _expect(path, schema, images=True)
        parts = images.parts_of(path)
        if parts and part not in parts:
            raise ValueError(f"{path} has no sub-folder {part!r}. Name the folder that holds the images.")
        return images.read(parts.get(part, path), schema, size, path, labels=labels)
    return _read_file(path, schema, labels=labels)


def _parts(settings: DataSettings) -> tuple[Dataset, Dataset | None, Dataset | None]:
    """The rows to train on and, where the source has them, those to choose and to be judged by."""
    if settings.source in names():
        _refuse_unused(settings, label=True, size=True)
        train, test = (_builtin(settings.source, settings.folder, p, settings.seed) for p in ("train", "test"))
        return train, None, test
    path = _path(settings.source)
    if path.is_dir() or images.is_image(path):
        _refuse_unused(settings, label=True)
        parts = images.parts_of(path)
        train = images.load(parts.get("train", path), settings.size, path)
        validation, held = (
            images.read(parts[part], train.schema, settings.size, path) if part in parts else None
            for part in ("validation", "test")
        )
        return train, validation, held
    _refuse_unused(settings, size=True)
    return _load_file(path, settings.label), None, None


def _hold_out_validation(train: Dataset, settings: DataSettings) -> tuple[Dataset, Dataset]:
    n = split.count("validation", settings.validation, len(train))
    if settings.source in canonical.SETS:
        return split.hold_out_last(train, n)
    return split.hold_out(train, n, stream(settings.seed, "validation"))


def _load_file(path: Path, label: str) -> Dataset:
    if path.suffix.lower() in TEXT:
        return table.load(delimited.read(path, table.all_columns(label), {label} - {""}))
    if path.suffix.lower() in PARQUET:
        return table.load(arrays.parquet(path, table.all_columns(label)))
    content = arrays.open_arrays(path)
    if content.y is not None and label not in ("", "y"):
        raise ValueError(f"{path} has its labels in 'y'; got label = {quoted(label)}. Leave it empty.")
    if content.x.ndim == 4:
        return arrays.images(path, content, None)
    return table.load(arrays.table(path, content, table.all_columns("" if content.y is not None else label)))


def _read_file(path: Path, schema: Schema, *, labels: bool) -> Dataset:
    choose = table.columns_of(schema, labels=labels)
    if path.suffix.lower() in TEXT:
        _expect(path, schema, images=False)
        return table.read(delimited.read(path, choose, {*schema.names, schema.label} - {""}), schema)
    if path.suffix.lower() in PARQUET:
        _expect(path, schema, images=False)
        return table.read(arrays.parquet(path, choose), schema)
    content = arrays.open_arrays(path, labels=labels, schema=schema)
    if schema.is_image and content.x.ndim == 2 and content.x.shape[1] == schema.dimension:
        raise ValueError(
            f"the model takes {schema}; {path} holds {content.x.dtype} {content.x.shape}. {_unflattened(schema)}"
        )
    _expect(path, schema, images=content.x.ndim == 4)
    if schema.is_image:
        return arrays.images(path, content, schema)
    return table.read(arrays.table(path, content, choose), schema)


def _builtin(name: str, folder: str, part: str, seed: int = 0) -> Dataset:
    if part not in rows_of(name):
        raise ValueError(f"{name} has no {part} part of its own, only {' and '.join(rows_of(name))}. Choose one.")
    if name in canonical.SETS:
        return canonical.read(name, folder, part)
    if name == "digits":
        return _digits(part)
    generator = stream(seed if part == "train" else 0, name, part)
    return Dataset(toy.sample(name, POINTS[part], generator), None, schema_of(name))


def _digits(part: str) -> Dataset:
    """scikit-learn's 1,797 digits, of which 360 are for the test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    rows = dict(
        zip(("train", "test"), train_test_split(range(len(y)), test_size=360, random_state=0, stratify=y), strict=True)
    )
    pixels = torch.from_numpy(x.astype("uint8")).view(-1, *DIGITS.shape)
    return Dataset(pixels, torch.from_numpy(y.astype("int64")), DIGITS).take(rows[part])


def _adopt(name: str, dataset: Dataset, schema: Schema) -> Dataset:
    """A built-in set as the data of a model that may have been trained on another."""
    mine = dataset.schema
    if (mine.shape, mine.levels, mine.names) != (schema.shape, schema.levels, schema.names):
        raise ValueError(f"the model takes {schema}; {name} has {mine}. Choose other data.")
    return replace(dataset, y=dataset.y if mine.classes == schema.classes else None, schema=schema)


def _expect(path: Path, schema: Schema, *, images: bool) -> None:
    if schema.is_image != images:
        raise ValueError(
            f"the model takes {schema}; {path} holds {'images' if images else 'a table'}. Choose other data."
        )


def _unflattened(schema: Schema) -> str:
    shape = schema.shape[1:] if schema.shape[0] == 1 else schema.shape
    return f"Reshape to (N, {', '.join(map(str, shape))}), as bytes."


def _path(source: str | Path) -> Path:
    path = Path(source).expanduser()
    if path.is_dir() or (
        path.is_file() and (images.is_image(path) or path.suffix.lower() in (*TEXT, *ARRAYS, *PARQUET))
    ):
        return path
    if "://" in str(source):
        raise FileNotFoundError(f"data are read from this machine; got the address {str(source)!r}. Download it first.")
    if path.exists():
        raise ValueError(f"{path} must be a folder of images or a table ({KINDS}). Convert it to one of these.")
    if _is_placeholder(str(source)):
        raise FileNotFoundError(f"there is no file {PLACEHOLDER!r}; give your table: --data FILE ({KINDS}).")
    beside = [str(p) for p in sorted(path.parent.iterdir())] if path.parent.is_dir() else []
    raise FileNotFoundError(
        f"there is no data set, file or folder {str(source)!r}. {hint(str(source), names(), beside)}"
    )


def _check_path(name: str, path: str) -> None:
    """Refuse what no file system has, or no file of settings could hold."""
    if len(path) > PATH or re.search("[\\x00\\ud800-\\udfff]", path):
        raise ValueError(f"{name} must be a path of at most {PATH} characters, in UTF-8; got {quoted(path)}.")


def _is_placeholder(source: str) -> bool:
    return source == PLACEHOLDER and not Path(source).exists()


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _refuse_unused(settings: DataSettings, *, label: bool = False, size: bool = False) -> None:
    if label and settings.label:
        raise ValueError(
            f"label names a table's column; got {quoted(settings.label)} for {settings.source}. Leave it empty."
        )
    if size and settings.size:
        raise ValueError(f"size is for a folder of images; got {settings.size} for {settings.source}. Set size = 0.")
