"""Measure which of several implementations of the same computation is the fastest on this device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch

from .cuda_graph import capture, run_on_stream

T = TypeVar("T")


#: The measurements of this process: (what for, candidates, microseconds of each).
MEASURED: list[tuple[str, list[str], list[float]]] = []


#: A candidate must take less than this fraction of the first one's time to be preferred, so that noise does not decide.
CLEAR_WIN = 0.98


def can_measure(device: torch.device) -> bool:
    """Whether a measurement is possible now: on a GPU, and not while a CUDA graph is being captured."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def fastest(
    what: str, candidates: Sequence[T], call: Callable[[T], Any], repeats: int = 10, *, graph: bool = True
) -> T:
    """Return the fastest candidate; the first, if none is clearly faster.

    Each is launched as a CUDA graph, as training steps are; without `graph`, as on a CPU, it is called directly.
    """
    seconds = _graph_seconds if graph else _eager_seconds
    times = [seconds(lambda c=c: call(c), repeats) / repeats for c in candidates]  # type: ignore[misc]
    MEASURED.append((what, [str(c) for c in candidates], [1e6 * t for t in times]))
    best = min(times)
    return candidates[times.index(best)] if best < CLEAR_WIN * times[0] else candidates[0]


def _graph_seconds(function: Callable[[], Any], repeats: int) -> float:
    """Return the least time of a few launches: other GPU work can only add to it."""

    def repeated() -> None:
        for _ in range(repeats):
            function()

    def measured() -> float:
        with torch.no_grad():  # no autograd graph, as inside a torch.autograd.Function
            try:
                for _ in range(2):
                    function()
                graph, _ = capture(repeated, release=False)
            except Exception:  # a kernel that does not fit this GPU; its compiler may raise anything
                return math.inf
            return min(_time(graph.replay) for _ in range(4))

    return run_on_stream(_stream(), measured)


def _eager_seconds(function: Callable[[], Any], repeats: int) -> float:
    """Return the time without a CUDA graph."""
    try:
        function()
        return _time(lambda: [function() for _ in range(repeats)])
    except torch.cuda.OutOfMemoryError:
        return math.inf


def _time(function: Callable[[], Any]) -> float:
    _synchronize()
    start = time.perf_counter()
    function()
    _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
