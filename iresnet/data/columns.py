"""Kinds of table columns: what values a column may have, and so how a density must treat it.

    real       any number                                     as it is
    positive   numbers above 0                                logarithm
    bounded    numbers in a closed interval                   logit
    integer    whole numbers, optionally bounded              noise within the cell; logarithm or logit at bounds
    rounded    multiples of a step, optionally bounded        the same, with cells as wide as the step
    category   one of several names, stored as 0, 1, ...      noise within the cell; logit

A density of real numbers has no upper bound on values that repeat: on a column of zeros and ones the loss would fall
for ever. So the columns with a step are `discrete`: the model adds noise from the cell (x - step/2, x + step/2) around
the value x, and ln p is a lower bound of the logarithm of the mean density in that cell, which for whole numbers is the
probability of x. Samples are rounded to the nearest value. A bound is part of the interval; the density extends a
thousandth of the width beyond it (a tenth of the step, if there is one), and samples from there are set to the bound.

`detection` chooses kinds from the values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..spelling import hint, listed, quoted

Values: TypeAlias = NDArray[np.float64]

#: Every kind with how it is written, as in --kind age=integer:0.
SPELLINGS = {
    "real": "real",
    "positive": "positive",
    "bounded": "bounded:LOWER:UPPER",
    "integer": "integer[:LOWER[:UPPER]]",
    "rounded": "rounded:STEP[:LOWER[:UPPER]]",
    "category": "category",
}

#: The part of the width, or of the step, by which the density extends beyond a bound. With less, noise that comes close
#: to the end would have extreme codes, which make training unstable.
WIDTH_MARGIN, STEP_MARGIN = 1e-3, 0.1


class Interval(NamedTuple):
    """The open interval that the density of a column lives on, and how close to its ends the data may come."""

    lower: float | None
    upper: float | None
    margin: float


@dataclass(frozen=True)
class ColumnKind:
    """The kind of a column: its name, its bounds, the step of its values, and the names of its categories.

    >>> str(ColumnKind("integer", lower=0.0, step=1.0)), ColumnKind("real").discrete
    ('integer:0', False)
    """

    name: str = "real"
    lower: float | None = None
    upper: float | None = None
    step: float | None = None
    categories: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in SPELLINGS:
            raise ValueError(f"a kind is one of {', '.join(SPELLINGS)}; got {quoted(self.name)}.")
        numbers = [value for value in (self.lower, self.upper, self.step) if value is not None]
        if not all(isinstance(value, float) and math.isfinite(value) for value in numbers):
            raise ValueError(f"bounds and step of a column must be finite numbers; got {quoted(numbers)}.")
        single = len(self.categories) == 1  # of a given column, which may be constant
        if None not in (self.lower, self.upper) and not (single or self.lower < self.upper):  # type: ignore[operator]
            raise ValueError(f"the lower bound must be below the upper one; got {self.lower:g} and {self.upper:g}.")
        if self.discrete != (self.name in ("integer", "rounded", "category")) or (self.discrete and self.step <= 0):  # type: ignore[operator]
            raise ValueError(f"a positive step belongs to integer, rounded and category; got {self.step} for {self}.")
        if (len(self.categories) > 0) != (self.name == "category"):
            raise ValueError(f"categories belong to the kind category; got {len(self.categories)} for {self.name}.")

    @classmethod
    def category(cls, names: Sequence[str]) -> ColumnKind:
        """Return the kind of a column that holds one of these names."""
        return cls("category", 0.0, float(len(names) - 1), 1.0, tuple(names))

    @property
    def discrete(self) -> bool:
        """Whether values repeat, so that noise is added to them."""
        return self.step is not None

    @property
    def interval(self) -> Interval:
        """The open interval of the density: the bounds, moved outwards by half a step and a margin."""
        if self.name == "positive":
            return Interval(0.0, None, 0.0)
        width = (self.upper or 0.0) - (self.lower or 0.0)
        margin = STEP_MARGIN * self.step if self.step is not None else WIDTH_MARGIN * width
        ends = [abs(end) for end in (self.lower, self.upper) if end is not None]
        if not ends:
            return Interval(None, None, 0.0)
        margin = max(margin, max(ends) * 2.0**-21)  # float32 has to tell the end from the bound
        out = margin + (self.step or 0.0) / 2
        lower, upper = (None if end is None else end + sign * out for end, sign in ((self.lower, -1), (self.upper, 1)))
        return Interval(lower, upper, margin)

    def contains(self, x: Any) -> Any:
        """Whether each value is one that the column may have; numbers as precise as float32.

        The values are an array or a tensor in float64, and so are the answers: both have these operators.
        """
        inside = abs(x) < math.inf
        if self.name == "positive":
            return inside & (x > 0)
        lower = -math.inf if self.lower is None else self.lower
        upper = math.inf if self.upper is None else self.upper
        slack = max(abs(end) for end in (lower, upper, 0.0) if math.isfinite(end)) * 2.0**-22
        if self.step is not None:
            inside = inside & (abs(x - self.step * (x / self.step).round()) <= 1e-3 * self.step + 1e-6 * abs(x))
            slack += 1e-3 * self.step
        return inside & (x >= lower - slack) & (x <= upper + slack)

    def restore(self, x: Values) -> Values:
        """Return samples as values of the column: rounded to a multiple of the step, and within the bounds."""
        if self.step is not None:
            x = self.step * np.round(x / self.step)
        if self.name == "positive":
            return np.maximum(x, np.finfo(np.float32).tiny)
        return np.clip(x, self.lower, self.upper) if (self.lower, self.upper) != (None, None) else x

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dictionary that JSON can hold; `from_dict` reads it back."""
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        content["categories"] = list(self.categories)
        return {name: value for name, value in content.items() if value not in (None, [])}

    @classmethod
    def from_dict(cls, content: Any) -> ColumnKind:
        """Read a kind from what `to_dict` wrote."""
        known = [field.name for field in fields(cls)]
        if not isinstance(content, Mapping) or not set(content) <= set(known) or "name" not in content:
            raise ValueError(f"a kind is an object with the keys {', '.join(known)}; got {quoted(content)}.")
        names = content.get("categories", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"categories must be a list of names; got {quoted(names)}.")
        return cls(**{**content, "categories": tuple(names)})

    def __str__(self) -> str:
        """Return the kind as it is written after --kind COLUMN=."""
        if self.name in ("real", "positive", "category"):
            return self.name
        ends = ["" if end is None else f"{end:.9g}" for end in (self.lower, self.upper)]
        return ":".join([self.name, *([f"{self.step:.9g}"] if self.name == "rounded" else []), *ends]).rstrip(":")

    def describe(self) -> str:
        """Describe the kind in words."""
        if self.name == "category":
            return f"category: {listed(self.categories)}"
        words = f"multiples of {self.step:g}" if self.name == "rounded" else self.name
        if self.lower is None:
            return words if self.upper is None else f"{words}, up to {self.upper:g}"
        return f"{words}, from {self.lower:g} {'on' if self.upper is None else f'to {self.upper:g}'}"


REAL, POSITIVE = ColumnKind(), ColumnKind("positive")


def parse_kind(text: str) -> ColumnKind | None:
    """Return the kind that a text such as bounded:0:1 describes; None for category, whose names the data tell.

    >>> parse_kind("rounded:0.5:0").interval.lower
    -0.3
    """
    name, *numbers = text.split(":")
    if name not in SPELLINGS:
        raise ValueError(f"there is no kind {quoted(name)}. {hint(name, list(SPELLINGS))}")
    least, most = SPELLINGS[name].partition("[")[0].count(":"), SPELLINGS[name].count(":")
    try:
        values = [None if not n and i >= (name == "rounded") else float(n) for i, n in enumerate(numbers)]
    except ValueError:
        values = [math.nan]
    if not least <= len(values) <= most or not all(value is None or math.isfinite(value) for value in values):
        raise ValueError(f"the kind {name} is written {SPELLINGS[name]}; got {quoted(text)}.")
    if name == "category":
        return None
    step = values.pop(0) if name == "rounded" else 1.0 if name == "integer" else None
    lower, upper = (*values, None, None)[:2]
    if name == "bounded" and (lower is None or upper is None):
        raise ValueError(f"the kind {name} is written {SPELLINGS[name]}; got {quoted(text)}.")
    return ColumnKind(name, lower, upper, step)


def parse_kinds(assignments: Sequence[str]) -> dict[str, ColumnKind | None]:
    """Return the kind of every column in assignments such as "age=integer:0"; None for a category."""
    kinds: dict[str, ColumnKind | None] = {}
    for assignment in assignments:
        column, equals, text = assignment.rpartition("=")
        if not equals or not column:
            raise ValueError(f"a kind must be given as COLUMN=KIND; got {quoted(assignment)}. Example: age=integer.")
        kinds[column] = parse_kind(text)
    return kinds
