"""Which of several ways to the same numbers is the fastest on this GPU."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")


#: What was measured in this process: (what it is for, the ways, microseconds of each).
MEASURED: list[tuple[str, list[str], list[float]]] = []


#: How much of the first way's time another may take to be preferred: noise shall not decide.
CLEARLY = 0.98


def can_measure(device: torch.device) -> bool:
    """Whether something can be tried now: on a GPU, and not while a graph is recorded."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def fastest(what: str, ways: Sequence[T], call: Callable[[T], Any], repeats: int = 10) -> T:
    """The way that takes the least time, launched as a graph, as a step is; the first, where none is clearly faster."""
    times = [_seconds(lambda way=way: call(way), repeats) / repeats for way in ways]  # type: ignore[misc]
    MEASURED.append((what, [str(way) for way in ways], [1e6 * t for t in times]))
    best = min(times)
    return ways[times.index(best)] if best < CLEARLY * times[0] else ways[0]


def _seconds(function: Callable[[], Any], repeats: int) -> float:
    """The least time of a few launches: whatever else the GPU does meanwhile only adds to it."""
    stream = _stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():  # without a graph, as within a function with its own backward
        try:
            for _ in range(2):
                function()
            graph = _recorded(function, repeats)
        except Exception:  # a kernel that this GPU has no room for, whatever its compiler raises then
            return math.inf
        return min(_launched(graph) for _ in range(4))


def _launched(graph: torch.cuda.CUDAGraph) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _recorded(function: Callable[[], Any], repeats: int) -> torch.cuda.CUDAGraph:
    """The calls as a graph. `torch.cuda.graph` would give memory back first, which takes longer than all else."""
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    torch.cuda.synchronize()
    gc.disable()
    try:
        graph.capture_begin()
        try:
            for _ in range(repeats):
                function()
        finally:
            graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return graph


@cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
