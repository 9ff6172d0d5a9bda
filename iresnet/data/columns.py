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

`detect` chooses kinds from the values, by few and conservative rules; `degenerate` finds what no density can fit.
"""

from __future__ import annotations

import math
import shlex
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

#: Fewer rows than this say too little about a column: it is taken as real.
DETECT_FROM = 50

#: Whole numbers up to here are integers: beyond, float32 has few digits left for the noise, and steps are tiny.
LARGEST_INTEGER = 2**16

#: The share of rows that may have one and the same value in a column of real numbers.
LARGEST_TIE = 0.05

#: A dependent column is explained by the others up to this part of its standard deviation (float32 has 6e-8).
EXPLAINED = 1e-5

#: The number of rows in which a dependence is looked for, before it is confirmed in all.
SOME_ROWS = 10_000


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
        if None not in (self.lower, self.upper) and not self.lower < self.upper:  # type: ignore[operator]
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

    def contains(self, x: Values) -> NDArray[np.bool_]:
        """Whether each value is one that the column may have; numbers as precise as float32."""
        inside = np.isfinite(x)
        if self.name == "positive":
            return inside & (x > 0)
        slack = 0.0 if self.lower is None and self.upper is None else self.interval.margin / 2
        inside &= (x >= (-math.inf if self.lower is None else self.lower - slack)) & (
            x <= (math.inf if self.upper is None else self.upper + slack)
        )
        if self.step is not None:
            inside &= np.abs(x - self.step * np.round(x / self.step)) <= 1e-3 * self.step + 1e-6 * np.abs(x)
        return inside

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


# ---------------------------------------------------------------------------------------------- detection


def detect(x: Values) -> ColumnKind | None:
    """Return the kind of a column by its values; None for a category. Constant columns and short ones are real."""
    distinct, counts = np.unique(x, return_counts=True)
    if len(x) < DETECT_FROM or len(distinct) == 1:
        return REAL
    if len(distinct) == 2:
        return None
    if np.abs(x).max() <= LARGEST_INTEGER and bool((x == np.round(x)).all()):
        return ColumnKind("integer", _natural_lower(x), None, 1.0)
    if counts.max() > LARGEST_TIE * len(x) and (step := _step(distinct)) is not None:
        return ColumnKind("rounded", _natural_lower(x), None, step)
    return next((ColumnKind("bounded", 0.0, top) for top in (1.0, 100.0) if _fills(x, top)), _unbounded(x))


def _natural_lower(x: Values) -> float | None:
    """0 if no value is below, and values come near to it: within a standard deviation."""
    return 0.0 if 0 <= x.min() < x.std() else None


def _fills(x: Values, top: float) -> bool:
    """Whether all values lie in [0, top], with 3 rows and 1 % of them in the last 2 % at either end.

    For the interval [0, 1], which few other quantities have, values within 5 % of both ends are enough.
    """
    if x.min() < 0 or x.max() > top:
        return False
    if top == 1:
        return bool(x.min() < 0.05 and x.max() > 0.95)
    at_ends = min(int(np.sum(x < 0.02 * top)), int(np.sum(x > 0.98 * top)))
    return at_ends >= max(3, 0.01 * len(x))


def _unbounded(x: Values) -> ColumnKind:
    """Positive if all values are, and their logarithm is less skewed; else real."""
    if x.min() <= 0 or (skewed := _skewness(x)) <= 1:
        return REAL
    return POSITIVE if abs(_skewness(np.log(x))) < skewed else REAL


def _skewness(x: Values) -> float:
    return float((((x - x.mean()) / x.std()) ** 3).mean())


def _step(distinct: Values) -> float | None:
    """The largest power of ten of which all values are multiples, up to float32's precision, if it is not tiny.

    >>> _step(np.array([0.0, 0.5, 1.25])), _step(np.array([0.0, math.pi, math.e]))
    (0.01, None)
    """
    size, spread = float(np.abs(distinct).max()), float(distinct.std())
    for power in range(math.floor(math.log10(size)), math.floor(math.log10(spread)) - 4, -1):
        step, lost = float(f"1e{power}"), 1e-7 * size
        if lost > 0.05 * step:
            return None
        if bool((np.abs(distinct - step * np.round(distinct / step)) <= lost).all()):
            return step
    return None


# ---------------------------------------------------------------------------------------------- what has no density


def degenerate(x: Values, names: Sequence[str], kinds: Sequence[ColumnKind]) -> str:
    """Return why no density fits the rows, with the remedy; empty if nothing is wrong.

    Only columns without noise can be at fault: one that often has the same value, and one that follows from the others.
    """
    for i, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        if kind.discrete or len(x) < DETECT_FROM:
            continue
        values, counts = np.unique(x[:, i], return_counts=True)
        if len(values) > 1 and (most := int(counts.max())) > LARGEST_TIE * len(x):
            value = float(values[counts.argmax()])
            return (
                f"column {quoted(name)} is {value:g} in {most} of {len(x)} training rows, so its density as {kind} has "
                f"no upper bound. Say how finely it is rounded, e.g. --kind {shlex.quote(name)}=rounded:0.01, or "
                f"leave it out: --drop {shlex.quote(name)}."
            )
    return _dependence(x, names, kinds)


def _dependence(x: Values, names: Sequence[str], kinds: Sequence[ColumnKind]) -> str:
    """Find a column without noise that is a linear combination of the others, by orthogonalising one after another."""
    if len(x) <= len(names) + 1:
        return ""
    z = x - x.mean(0)
    z = z / np.maximum(z.std(0), np.finfo(np.float64).tiny)
    some = z[:: -(-len(z) // SOME_ROWS)]
    # Columns with noise first: they explain others, and need no explanation themselves.
    order, basis = sorted(range(len(names)), key=lambda i: not kinds[i].discrete), np.empty((0, len(some)))
    for place, i in enumerate(order):
        left = some[:, i] - basis.T @ (basis @ some[:, i])
        left = left - basis.T @ (basis @ left)  # once more, for what rounding left
        size = float(np.linalg.norm(left))
        if size > EXPLAINED * math.sqrt(len(some)):
            basis = np.concatenate([basis, left[None] / size])
        elif not kinds[i].discrete and (words := _say_dependence(z, i, order[:place], names)):
            return words
    return ""


def _say_dependence(z: Values, i: int, others: Sequence[int], names: Sequence[str]) -> str:
    """Say what column i follows from; empty if it does not in all rows."""
    weights = np.linalg.lstsq(z[:, others], z[:, i], rcond=None)[0]
    if (z[:, i] - z[:, others] @ weights).std() > EXPLAINED:
        return ""
    used = [quoted(names[k]) for k, weight in zip(others, weights, strict=True) if abs(weight) > 1e-4]
    what = f"follows from {used[0]}" if len(used) == 1 else f"is a linear combination of {listed(used)}"
    name = names[i]
    return (
        f"column {quoted(name)} {what} in all {len(z)} training rows, so the density has no upper bound. "
        f"Leave it out: --drop {shlex.quote(name)}."
    )
