"""The settings of data: which to use, how to split them, and how to augment images."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from ..allowed import Rule, check_settings
from ..spelling import quoted
from . import columns, split
from .augment import Augment
from .builtin import names
from .choice import TableOptions

PLACEHOLDER = "table.csv"  # the source of presets for tables, which the user replaces by a file
PATH_LENGTH, SIDE = 4096, 4096  # most characters of a path; most pixels of the side that images are resized to
SIZE = Rule(lambda size: 0 <= size <= SIDE, "is that of an image, or 0 to keep it", f"Use up to {SIDE}.")
LABELLED = Rule(
    lambda n: 0 < n <= 1 or (n < math.inf and n == int(n) > 1),
    "must be a fraction of the labels in (0, 1], or their number from 2 on",
    "Use e.g. 0.1 or 100.",
)
IN_MEMORY = Rule(lambda size: 0 < size < math.inf, "must be positive, in GiB", "Use e.g. 1.")


@dataclass(frozen=True)
class DataSettings:
    """Which data to use, how to split them, and how to augment images.

    `validation` and `test` are fractions below 1, or numbers of samples; `test` may be 0.
    """

    #: A built-in dataset, a folder of images, or a table.
    source: str = "digits"
    #: The dataset directory, where downloads are stored.
    folder: str = "data"
    #: The label column of a table.
    label: str = ""
    #: The columns of a table that are data; empty: all but the label, the id and those to drop.
    columns: tuple[str, ...] = ()
    #: The columns of a table that are left out.
    drop: tuple[str, ...] = ()
    #: The columns of a table that are given: the density is that of the others, conditional on these.
    context: tuple[str, ...] = ()
    #: The column of a table that names its rows: it is not data, and `score` writes it beside the scores.
    id: str = ""
    #: Kinds of columns, as "COLUMN=KIND", in place of those that are detected: real, positive, bounded:LOWER:UPPER,
    #: integer[:LOWER[:UPPER]], rounded:STEP[:LOWER[:UPPER]] or category.
    kinds: tuple[str, ...] = ()
    #: Rows of a table with missing cells: "refuse" them with an error, or "drop" them.
    missing: Literal["refuse", "drop"] = "refuse"
    #: Held out from the training data if the source has no validation split.
    validation: int | float = 0.15
    #: Held out first if the source has no test split; 0: nothing, for users with a test file of their own.
    test: int | float = 0.2
    #: The training labels that are kept, drawn by `seed`: a fraction of them, or from 2 on their number, as many of
    #: every class; the others become -1.
    labelled: Annotated[int | float, LABELLED] = 1.0
    #: The largest table that is held in memory, in GiB of float32; of a larger NPY or Parquet file, training rows are
    #: read in blocks.
    in_memory: Annotated[float, IN_MEMORY] = 1.0
    #: Images of a folder are resized to size x size; 0: not resized, and all must have the same size.
    size: Annotated[int, SIZE] = 0
    #: Seed of the validation split, the kept labels and the toy points.
    seed: int = 0

    # Augmentation; `Augment` documents and checks these settings.
    #: Shift images by up to this many pixels.
    shift: int = 0
    #: The fraction of the images that is shifted.
    shifted: float = 1.0
    #: What fills the border of a shifted image: "mirror" or "blank".
    border: str = "mirror"
    #: Flip images left to right with probability 1/2.
    flip: bool = False
    #: The side of the square that is replaced by the image's mean.
    cutout: int = 0

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.source:
            raise ValueError(f"source must be a dataset or a path; got ''. Use one of {', '.join(names())}.")
        for name in ("source", "folder"):
            _check_path(name, getattr(self, name))
        if self.columns and self.drop:
            raise ValueError("columns and drop exclude each other: give the columns to keep, or those to leave out.")
        columns.parse_kinds(self.kinds)  # refuses what is no kind
        split.check_fraction("validation", self.validation)
        if self.test:
            split.check_fraction("test", self.test)
        _ = self.augment  # checks its settings

    @property
    def augment(self) -> Augment:
        """The augmentation that `Batches` applies to training images."""
        return Augment(self.shift, self.flip, self.shifted, self.border, self.cutout)

    @property
    def table_options(self) -> TableOptions:
        """The settings for a table."""
        skip = self.missing == "drop"
        return TableOptions(
            self.label, self.columns, self.drop, self.id, self.kinds, skip, self.context, skip_constants=True
        )

    def resolved(self) -> DataSettings:
        """Make paths absolute, so that they are valid in every working directory; built-in names stay.

        >>> DataSettings("digits", folder="/tmp").resolved() == DataSettings("digits", folder="/tmp")
        True
        """
        named = self.source in names() or is_placeholder(self.source)
        return replace(self, source=self.source if named else _absolute(self.source), folder=_absolute(self.folder))


def _check_path(name: str, path: str) -> None:
    """Refuse a path that no file system, or no config file, can hold."""
    if len(path) > PATH_LENGTH or re.search("[\\x00\\ud800-\\udfff]", path):
        raise ValueError(f"{name} must be a path of at most {PATH_LENGTH} characters, in UTF-8; got {quoted(path)}.")


def is_placeholder(source: str) -> bool:
    """Whether a source is the one of presets for tables, and no file."""
    return source == PLACEHOLDER and not Path(source).exists()


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
