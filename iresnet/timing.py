"""Which of several ways to the same numbers is the fastest on this device, measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch

from .cuda_graph import capture, run_on_stream

T = TypeVar("T")


#: What was measured in this process: (what it is for, the ways, microseconds of each).
MEASURED: list[tuple[str, list[str], list[float]]] = []


#: How much of the first way's time another may take to be preferred: noise shall not decide.
CLEAR_WIN = 0.98


def can_measure(device: torch.device) -> bool:
    """Whether something can be tried now: on a GPU, and not while a graph is recorded."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def fastest(what: str, ways: Sequence[T], call: Callable[[T], Any], repeats: int = 10, *, graph: bool = True) -> T:
    """The way that takes the least time; the first, where none is clearly faster.

    Each is launched as a CUDA graph, as a step is; without `graph`, as on a CPU, it is called.
    """
    seconds = _seconds if graph else _seconds_called
    times = [seconds(lambda way=way: call(way), repeats) / repeats for way in ways]  # type: ignore[misc]
    MEASURED.append((what, [str(way) for way in ways], [1e6 * t for t in times]))
    best = min(times)
    return ways[times.index(best)] if best < CLEAR_WIN * times[0] else ways[0]


def _seconds(function: Callable[[], Any], repeats: int) -> float:
    """The least time of a few launches: whatever else the GPU does meanwhile only adds to it."""

    def repeated() -> None:
        for _ in range(repeats):
            function()

    def measured() -> float:
        with torch.no_grad():  # without a graph, as within a function with its own backward
            try:
                for _ in range(2):
                    function()
                graph, _ = capture(repeated, release=False)
            except Exception:  # a kernel that this GPU has no room for, whatever its compiler raises then
                return math.inf
            return min(_clocked(graph.replay) for _ in range(4))

    return run_on_stream(_stream(), measured)


def _seconds_called(function: Callable[[], Any], repeats: int) -> float:
    """The same without a graph."""
    try:
        function()
        return _clocked(lambda: [function() for _ in range(repeats)])
    except torch.cuda.OutOfMemoryError:
        return math.inf


def _clocked(function: Callable[[], Any]) -> float:
    _wait()
    start = time.perf_counter()
    function()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
