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

#: Whole numbers up to here are integers: beyond, float32 has few digits left for the noise, and steps are tiny.
LARGEST_INTEGER = 2**16

#: The share of rows that may have one and the same value in a column of real numbers.
LARGEST_TIE = 0.05

#: A dependent column is explained by the others up to this part of its standard deviation (float32 has 6e-8).
EXPLAINED = 1e-5

#: The number of rows in which a dependence is looked for, before it is confirmed in all.
SOME_ROWS = 10_000


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
