"""The format of samples: images of integers, or rows of numbers with names and kinds of columns; saved with a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..spelling import hint, listed, quoted
from .columns import REAL, ColumnKind

#: The most numbers in a sample, and the most classes: the size of layers grows with both.
NUMBERS, CLASSES = 2**26, 2**16


@dataclass(frozen=True)
class Schema:
    """The format of one sample: an image of integers 0 .. levels - 1, shape (C, H, W), or numbers, shape (D,).

    The schema of a table names its `columns`, with a kind for each (`kinds`; empty if all are real numbers) and, where
    there are such, the column `label` that holds the labels and the column `id` that names the rows. `classes` are the
    names of the labels 0, 1, ...; it is empty for data without labels. `targets` are the columns whose density a model
    learns, given the other columns; it is empty for a density of all. The given columns in `one_hot` hold categories,
    for each of which a model gets an indicator. Columns in `constants` had one value in all training data; they are no
    part of the model. It is saved with the model.

    >>> print(Schema((1, 8, 8), levels=17))
    images of shape (1, 8, 8) with 17 levels
    >>> Schema.from_dict(Schema((2,)).to_dict()) == Schema((2,))
    True
    """

    shape: tuple[int, ...]
    levels: int | None = None
    columns: tuple[str, ...] = ()
    label: str = ""
    classes: tuple[str, ...] = ()
    kinds: tuple[ColumnKind, ...] = ()
    id: str = ""
    targets: tuple[str, ...] = ()
    one_hot: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.shape) not in (1, 3) or not all(type(n) is int and n > 0 for n in self.shape):
            raise ValueError(f"shape must be (C, H, W) or (D,), of positive integers; got {quoted(self.shape)}.")
        if self.dimension > NUMBERS:
            raise ValueError(
                f"a sample may hold at most {NUMBERS:,} numbers; got {quoted(self.shape)}. Use smaller samples."
            )
        if len(self.classes) > CLASSES:
            raise ValueError(f"there may be at most {CLASSES:,} classes; got {len(self.classes):,}. Use fewer.")
        if self.is_image and not (type(self.levels) is int and 2 <= self.levels <= 256):
            raise ValueError(f"levels of an image must lie in 2 .. 256; got {quoted(self.levels)}. Use 256 for bytes.")
        if not self.is_image and self.levels is not None:
            got = quoted(self.levels)
            raise ValueError(f"levels are for images; got {got} for samples of shape {self.shape}. Use None.")
        for name, column in (("label", self.label), ("id", self.id)):
            if not isinstance(column, str):
                raise ValueError(f"{name} must be a column's name or empty; got {quoted(column)}.")
        for name, words in (
            ("columns", self.columns),
            *((name, getattr(self, name)) for name in ("classes", "targets", "one_hot", "constants")),
        ):
            if not all(isinstance(w, str) for w in words) or len(set(words)) < len(words):
                raise ValueError(f"{name} must be different names; got {listed([*map(quoted, words)])}.")
        if self.columns and (self.is_image or len(self.columns) != self.shape[0]):
            raise ValueError(
                f"columns must name every number of a sample, {self.shape}; got {len(self.columns)} names."
            )
        if self.kinds and (self.is_image or len(self.kinds) != self.shape[0]):
            raise ValueError(f"there must be one kind per column, {self.shape}; got {len(self.kinds)} kinds.")
        if self.targets and not set(self.targets) < set(self.columns):
            raise ValueError(
                f"targets must be some of the columns, and not all; got {listed([*map(quoted, self.targets)])}."
            )

        wrong = [name for name in self.one_hot if name in self.targets or name not in self._categories]
        if wrong:
            raise ValueError(f"one_hot must be given columns that hold categories; got {quoted(wrong[0])}.")

    @property
    def is_image(self) -> bool:
        """Whether a sample is an image."""
        return len(self.shape) == 3

    @property
    def dimension(self) -> int:
        """The number of values in a sample."""
        return math.prod(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        """A name for every value of a sample: the columns, or x0, x1, ..."""
        return self.columns or tuple(f"x{i}" for i in range(self.dimension))

    @property
    def modelled(self) -> tuple[bool, ...]:
        """Whether each value of a sample has a density; the others are given, in a conditional density."""
        targets = set(self.targets or self.names)
        return tuple(name in targets for name in self.names)

    @property
    def _categories(self) -> tuple[str, ...]:
        """The columns that hold categories."""
        return tuple(name for name, kind in zip(self.names, self.kinds, strict=False) if kind.categories)

    def given_others(self, targets: Sequence[str]) -> Schema:
        """Return the schema of a density of these columns, given the others, their categories as indicators."""
        one_hot = [name for name in self._categories if name not in targets]
        return replace(self, targets=tuple(targets), one_hot=tuple(one_hot))

    def select(self, columns: Sequence[str]) -> Schema:
        """Return the schema of some of the columns."""
        known = dict(zip(self.columns, self.column_kinds, strict=True))
        kinds = [known[name] for name in columns]
        some = () if all(kind == REAL for kind in kinds) else tuple(kinds)
        one_hot = tuple(name for name in self.one_hot if name in columns)
        return Schema((len(columns),), columns=tuple(columns), kinds=some, one_hot=one_hot)

    @property
    def column_kinds(self) -> tuple[ColumnKind, ...]:
        """The kind of every column of a table."""
        return self.kinds or (REAL,) * self.dimension

    def allowed(self, x: Tensor) -> Tensor:
        """Whether each value of a sample is one that its column may have."""
        if not self.kinds:
            return torch.ones_like(x, dtype=torch.bool)
        columns = [
            torch.ones_like(x[:, i], dtype=torch.bool) if kind == REAL else kind.contains(x[:, i].double())
            for i, kind in enumerate(self.kinds)
        ]
        return torch.stack(columns, dim=1)

    def inside(self, x: Tensor) -> Tensor:
        """Whether each sample holds only values that its columns may have; outside, the density is 0."""
        return self.allowed(x).flatten(1).all(dim=1) if self.kinds else x.new_ones(len(x), dtype=torch.bool)

    def restore(self, x: Tensor) -> Tensor:
        """Return samples of a table as values that its columns may have: rounded where values have a step."""
        kinds = enumerate(self.kinds)
        columns = {i: kind.restore(x[:, i].cpu().double().numpy()) for i, kind in kinds if kind != REAL}
        x = x.clone()
        for i, column in columns.items():
            x[:, i] = torch.from_numpy(column).to(x)
        return x

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dictionary that JSON can hold; `from_dict` reads it back.

        What earlier versions did not know is omitted where it is empty, so that fingerprints stay the same.
        """
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        content = {name: list(v) if isinstance(v, tuple) else v for name, v in content.items()}
        content["kinds"] = [kind.to_dict() for kind in self.kinds]
        optional = ("kinds", "id", "targets", "one_hot", "constants")
        return {name: v for name, v in content.items() if v or name not in optional}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Schema:
        """Read a schema from what `to_dict` wrote; raise a `ValueError` that says what is wrong with other content."""
        known = [field.name for field in fields(cls)]
        if not isinstance(content, Mapping) or "shape" not in content:
            raise ValueError(f"a schema is an object with the keys {', '.join(known)}; got {quoted(content)}.")
        for key, value in content.items():
            if key not in known:
                raise ValueError(f"a schema has no key {quoted(key)}. {hint(key, known)}")
            lists = ("shape", "columns", "classes", "kinds", "targets", "one_hot", "constants")
            if isinstance(value, list) != (key in lists):
                raise ValueError(f"{key} of a schema cannot be {quoted(value)}. Write it with Schema.to_dict.")
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in content.items()}
        return cls(**{**values, "kinds": tuple(map(ColumnKind.from_dict, content.get("kinds", ())))})

    def __str__(self) -> str:
        if self.is_image:
            return f"images of shape {self.shape} with {self.levels} levels"
        names = f" ({listed(self.columns)})" if self.columns else ""
        return f"rows of {self.shape[0]} numbers{names}"
