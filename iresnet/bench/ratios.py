"""Times of several methods in one process, in turn, and their ratios.

One round calls every method once, so that whatever else the machine does meets all of them; a ratio is that of two
times of one round. Reported is the median of the ratios, with their quartiles. On one thread of a CPU, the time is that
of the processor, which other programs do not lengthen.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import torch

from ..spelling import at_least
from .case import Run

#: The least number of rounds, and how many times its seconds a call may take to be repeated.
LEAST, SLOW = 3, 5


@dataclass(frozen=True)
class Ratio:
    """The median of some ratios, and their quartiles."""

    value: float
    low: float
    high: float
    rounds: int

    @property
    def spread(self) -> float | None:
        """Half the distance between the quartiles, relative to the median; None for a single round."""
        return None if self.rounds == 1 else (self.high - self.low) / (2 * self.value)


def ratio(times: Sequence[float], ours: Sequence[float]) -> Ratio:
    """Return how many times longer than ours the times of the same rounds are.

    >>> ratio([2.0, 6.0, 8.0], [1.0, 2.0, 2.0])
    Ratio(value=3.0, low=2.5, high=3.5, rounds=3)
    """
    at_least(1, rounds=min(len(times), len(ours)))
    found = [t / o for t, o in zip(times, ours, strict=False)]
    low, value, high = quantiles(found, method="inclusive") if len(found) > 1 else 3 * found
    return Ratio(value, low, high, len(found))


def time_in_turn(runs: Mapping[str, Run], *, seconds: float, rounds: int, cuda: bool = False) -> dict[str, list[float]]:
    """Return the seconds of every round of each function, after a first call that is not counted.

    A function is called until it has taken `seconds`, at least three times and at most in every round. If its first
    call takes five times as long, only one more is timed. On a GPU there is another call before all: it loads kernels.
    """
    if cuda:
        for run in runs.values():
            run()
    first = {name: _time(run, cuda) for name, run in runs.items()}
    once = {name: [_time(runs[name], cuda)] for name, t in first.items() if t > SLOW * seconds}
    times: dict[str, list[float]] = {name: [] for name in runs if name not in once}
    for i in range(rounds):
        for name in _rotated(list(times), i):
            if len(times[name]) < LEAST or sum(times[name]) <= seconds:
                times[name].append(_time(runs[name], cuda))
    return {name: once.get(name) or times[name] for name in runs}


def milliseconds(times: Sequence[float], calls: int = 1) -> float:
    """Return the median time of one of the calls that were timed together, in milliseconds."""
    return 1e3 * median(times) / calls


def _rotated(names: list[str], by: int) -> list[str]:
    """Return the names in another order in every round: what runs first meets cold caches."""
    at = by % max(1, len(names))
    return names[at:] + names[:at]


def _time(run: Run, cuda: bool) -> float:
    clock = time.perf_counter if cuda or torch.get_num_threads() > 1 else time.process_time
    begin = clock()
    run()
    if cuda:
        torch.cuda.synchronize()
    return clock() - begin
