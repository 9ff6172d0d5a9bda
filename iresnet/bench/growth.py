"""How times grow with the size of the network: slopes of ln time against ln size, one size varied at a time.

A slope of 1 is a time proportional to the size, 0 a time that does not depend on it. Small networks are dominated by
the calls themselves, not by their arithmetic, which lowers a slope.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..logdet import PowerSeries
from ..progress import each
from ..spelling import at_least
from .case import Case, Run
from .networks import build_flow, constrained, ready, training
from .ratios import milliseconds, time_in_turn

#: The tasks whose growth is measured.
GROWING = ("exact", "log-prob", "sample")

#: What is varied, and to which sizes; the rest is as in the base case.
SIZES: dict[str, tuple[int, ...]] = {
    "depth": (2, 4, 8, 16, 32),
    "width": (32, 64, 128, 256, 512),
    "batch": (128, 256, 512, 1024, 2048),
    "dimension": (4, 8, 16, 32, 64),
    "terms": (2, 4, 8, 16, 32),
}


@dataclass(frozen=True)
class Slope:
    """The exponent of a power law, and its standard error, None if there are only two sizes."""

    value: float
    standard_error: float | None


def fit_slope(sizes: Sequence[float], times: Sequence[float]) -> Slope:
    """Fit ln t = a + slope ln n by least squares.

    >>> fit_slope([1, 2, 4], [3.0, 12.0, 48.0])
    Slope(value=2.0, standard_error=0.0)
    """
    at_least(2, sizes=len(set(sizes)))
    x, y = ([math.log(v) for v in values] for values in (sizes, times))
    mx, my = sum(x) / len(x), sum(y) / len(y)
    square = sum((a - mx) ** 2 for a in x)
    slope = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / square
    rest = sum((b - my - slope * (a - mx)) ** 2 for a, b in zip(x, y, strict=True))
    error = round(math.sqrt(rest / (len(x) - 2) / square), 12) if len(x) > 2 else None
    return Slope(round(slope, 12), error)


def growth_rows(
    base: Case, sizes: dict[str, tuple[int, ...]], *, seconds: float, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for every task and every size that is varied: the times at all its sizes, and their slope."""
    limits: dict[str, Any] = {"seconds": seconds, "rounds": rounds, "cuda": base.device != "cpu"}
    works = [(varied, values, task) for varied, values in sizes.items() for task in _tasks(varied)]
    yield from each(lambda work: _growth_row(base, *work, limits), works)


def _tasks(varied: str) -> tuple[str, ...]:
    return ("series",) if varied == "terms" else GROWING


def _growth_row(base: Case, varied: str, values: tuple[int, ...], task: str, limits: dict[str, Any]) -> dict[str, Any]:
    runs = {str(value): _prepare(base, varied, value, task) for value in values}
    times = [milliseconds(t) for t in time_in_turn(runs, **limits).values()]
    slope = fit_slope(values, times)
    return {
        "table": "growth", "task": task, "varied": varied, "sizes": list(values), "ms": times,
        "slope": slope.value, "standard error": slope.standard_error, "dimension": base.dimension,
        "blocks": base.blocks, "batch": base.batch,
    }  # fmt: skip


def _prepare(base: Case, varied: str, value: int, task: str) -> Run:
    case = resized(base, varied, value)
    flow = build_flow(case)
    if varied == "terms":
        return ready(case, lambda: partial(training(case, flow, PowerSeries(value)).advance, case.data()))
    return constrained(case, flow).tasks[task]()


def resized(base: Case, varied: str, value: int) -> Case:
    """Return the case with one of its sizes changed; the number of terms is not one of its sizes.

    >>> resized(Case(2), "width", 8).hidden
    (8, 8, 8)
    """
    match varied:
        case "depth":
            return replace(base, blocks=value)
        case "width":
            return replace(base, hidden=(value,) * len(base.hidden))
        case "batch":
            return replace(base, batch=value)
        case "dimension":
            return replace(base, dimension=value)
        case _:
            return base
