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


def can_measure(device: torch.device) -> bool:
    """Whether something can be tried now: on a GPU, and not while a graph is recorded."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def fastest(what: str, ways: Sequence[T], call: Callable[[T], Any], repeats: int = 5) -> T:
    """The way that takes the least time, launched as a graph, as a step is; the first, if none can be taken."""
    times = [_seconds(lambda way=way: call(way), repeats) / repeats for way in ways]  # type: ignore[misc]
    MEASURED.append((what, [str(way) for way in ways], [1e6 * t for t in times]))
    return ways[times.index(min(times))]


def _seconds(function: Callable[[], Any], repeats: int) -> float:
    stream = _stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():  # without a graph, as within a function with its own backward
        try:
            for _ in range(2):
                function()
        except Exception:  # a kernel that this GPU has no room for, whatever its compiler raises then
            return math.inf
        graph = _recorded(function, repeats)
        graph.replay()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / 3


def _recorded(function: Callable[[], Any], repeats: int) -> torch.cuda.CUDAGraph:
    """The calls as a graph. `torch.cuda.graph` would collect garbage first, which takes longer than all else."""
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    torch.cuda.synchronize()
    gc.disable()
    try:
        graph.capture_begin()
        for _ in range(repeats):
            function()
        graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return graph


@cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
