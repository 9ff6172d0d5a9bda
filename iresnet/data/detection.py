"""Which kind a column has, judging by its values, and what no density can fit. `columns` has the kinds.

The rules are few and conservative: a column is real unless one of them applies, since a bound that does not exist would
give the likelihood 0 to a value beyond it.

    category   exactly two different values
    integer    all values are whole, and not large
    rounded    a value is frequent, and all are multiples of a power of ten: the density has to know the step
    bounded    all values are in [0, 1] or [0, 100] and come close to both ends
    positive   all values are, they are skewed, and their logarithms less so

Integers and rounded numbers are bounded by 0 if none is negative and some are near.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

import numpy as np

from ..spelling import listed, quoted
from .columns import POSITIVE, REAL, ColumnKind, Values

#: Fewer rows than this say too little about a column: it is taken as real.
DETECT_FROM = 50

#: A column with at most so many different values may hold codes.
FEW_CODES = 20

#: Whole numbers up to here are integers: beyond, float32 has few digits left for the noise, and steps are tiny.
LARGEST_INTEGER = 2**16

#: The share of rows that may have one and the same value in a column of real numbers.
LARGEST_TIE = 0.05

#: The same among the training rows of a rounded column. It is real if the share in training and validation rows is at
#: most LARGEST_TIE, and a training part of at least half of them can only double that.
LARGEST_ROUNDED_TIE = 2 * LARGEST_TIE

#: A dependent column is explained by the others up to this part of its standard deviation (float32 has 6e-8).
EXPLAINED = 1e-5

#: The number of rows in which ties and dependences are looked for, before they are confirmed in all.
SOME_ROWS = 10_000


def numbers_rows(x: Values) -> bool:
    """Whether a column numbers the rows: it holds as many consecutive whole numbers as there are rows, in any order."""
    if len(x) < DETECT_FROM or np.ptp(x) != len(x) - 1:
        return False
    return bool((x == np.round(x)).all()) and len(np.unique(x)) == len(x)


def detect(x: Values) -> ColumnKind | None:
    """Return the kind of a column by its values; None for a category. Constant columns and short ones are real."""
    if len(x) < DETECT_FROM or (x == x[0]).all():
        return REAL
    if len(np.unique(_some(x))) <= 2 and len(np.unique(x)) == 2:
        return None
    if np.abs(x).max() <= LARGEST_INTEGER and bool((x == np.round(x)).all()):
        return ColumnKind("integer", _natural_lower(x), None, 1.0)
    if _tie(x) is not None and (step := _step(x)) is not None:
        return ColumnKind("rounded", _natural_lower(x), None, step)
    return next((ColumnKind("bounded", 0.0, top) for top in (1.0, 100.0) if _fills(x, top)), _unbounded(x))


def _some(x: Values, rows: int = SOME_ROWS) -> Values:
    """Every k-th row, so that there are at most `rows`."""
    return x[:: -(-len(x) // rows)]


def _tie(x: Values) -> tuple[float, int] | None:
    """A value that fills too many rows for a column of real numbers, and their number; None if there is none."""
    values, counts = np.unique(_some(x), return_counts=True)
    value = float(values[counts.argmax()])
    count = int((x == value).sum())
    return (value, count) if count > LARGEST_TIE * len(x) else None


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


def _step(x: Values) -> float | None:
    """The largest power of ten of which all values are multiples, up to float32's precision, if it is not tiny.

    >>> _step(np.array([0.0, 0.5, 1.25])), _step(np.array([0.0, math.pi, math.e]))
    (0.01, None)
    """
    size, spread = float(np.abs(x).max()), float(x.std())
    for power in range(math.floor(math.log10(size)), math.floor(math.log10(spread)) - 4, -1):
        step, lost = float(f"1e{power}"), 1e-7 * size
        if lost > 0.05 * step:
            return None
        if bool((np.abs(x - step * np.round(x / step)) <= lost).all()):
            return step
    return None


# ---------------------------------------------------------------------------------------------- what has no density


def degenerate(x: Values, names: Sequence[str], kinds: Sequence[ColumnKind]) -> str:
    """Return why no density fits the rows, with the remedy; empty if nothing is wrong.

    Only columns without noise can be at fault: one that often has the same value, and one that follows from the others.
    """
    for i, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        if not kind.discrete and len(x) >= DETECT_FROM and (reason := _repetition(x[:, i], name, kind)):
            return reason
    return _dependence(x, names, kinds)


def _repetition(x: Values, name: str, kind: ColumnKind) -> str:
    """Say which value fills too many rows of a column without noise, and how finely the column is rounded, if it is."""
    tie = _tie(x)
    if tie is None or tie[1] == len(x):
        return ""
    (value, most), step = tie, _step(x)
    if step is not None and most <= LARGEST_ROUNDED_TIE * len(x):
        return ""
    column = shlex.quote(name)
    few = f"If its values are codes, --kind {column}=category; else say" if len(np.unique(x)) <= FEW_CODES else "Say"
    return (
        f"column {quoted(name)} is {value:g} in {most} of {len(x)} training rows, so its density as {kind} has no "
        f"upper bound. {few} how finely it is rounded, --kind {column}=rounded:{step or 'STEP'}, or leave it out: "
        f"--drop {column}."
    )


def _dependence(x: Values, names: Sequence[str], kinds: Sequence[ColumnKind]) -> str:
    """Find a column without noise that is a linear combination of others: R_ii of a QR decomposition, its residual."""
    if len(x) <= len(names) + 1:
        return ""
    z = x - x.mean(0)
    z = z / np.maximum(z.std(0), np.finfo(np.float64).tiny)
    # Columns with noise first: they explain others, and need no explanation themselves.
    order = sorted(range(len(names)), key=lambda i: not kinds[i].discrete)
    some = _some(z, 2 * len(names) + 1000)[:, order]
    left = np.abs(np.diagonal(np.linalg.qr(some, mode="r"))) / math.sqrt(len(some))
    for place, i in enumerate(order):
        if place and left[place] <= EXPLAINED and not kinds[i].discrete:
            weights = np.linalg.lstsq(some[:, :place], some[:, place], rcond=None)[0]
            others = order[:place]
            used = [names[k] for k, weight in zip(others, weights, strict=True) if abs(weight) > 1e-4]
            if used and (z[:, i] - z[:, others] @ weights).std() <= EXPLAINED:
                return _say_dependence(names[i], used, len(z))
    return ""


def _say_dependence(name: str, used: Sequence[str], rows: int) -> str:
    words = [quoted(other) for other in used]
    what = f"follows from {words[0]}" if len(words) == 1 else f"is a linear combination of {listed(words)}"
    return (
        f"column {quoted(name)} {what} in all {rows} training rows, so the density has no upper bound. "
        f"Leave it out: --drop {shlex.quote(name)}."
    )
