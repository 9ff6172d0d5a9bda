"""CUDA graphs: GPU work that is captured once and then launched as a whole, on tensors at fixed addresses.

capture         a function as a CUDA graph: the only place that captures
CudaGraphs      several graphs, one per key, in one memory pool, so never launched concurrently (training steps)
as_cuda_graph   a function of one tensor, which is copied to the address that the graph reads (inverses)

The memory of a graph (gradients, say) is valid until another graph of its pool is launched, which may overwrite it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")


def capture(
    function: Callable[[], T],
    *,
    stream: torch.cuda.Stream | None = None,
    pool: Any = None,
    generator: torch.Generator | None = None,
    release: bool = True,
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture a function in a CUDA graph without running it; return the graph and the outputs that a launch writes.

    `release` first frees cached memory, so that the graph can use it; for a small graph that takes longer than the
    capture. Without it the graph is captured on the current stream.
    """
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, pool=pool, stream=stream) if release else _capture_without_release(graph):
        outputs = function()
    return graph, outputs


@contextmanager
def _capture_without_release(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """As `torch.cuda.graph`, without freeing memory and collecting garbage first; none may be collected within."""
    was_enabled = gc.isenabled()
    torch.cuda.synchronize()
    gc.disable()
    try:
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()
    finally:
        if was_enabled:
            gc.enable()


def run_on_stream(stream: torch.cuda.Stream, function: Callable[[], T]) -> T:
    """Call a function on another stream, after everything launched so far and before everything launched next.

    Run a function there before it is captured: libraries choose kernels and allocate memory in the first call.
    """
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        result = function()
    current.wait_stream(stream)
    return result


class CudaGraphs(Generic[T]):
    """CUDA graphs of functions without arguments, by key, in one memory pool."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        self.captured: dict[int, tuple[torch.cuda.CUDAGraph, T]] = {}

    def __contains__(self, key: int) -> bool:
        return key in self.captured

    def run_on_stream(self, function: Callable[[], T]) -> T:
        """Call a function on the stream of the graphs: work that ran on the default stream cannot be captured."""
        return run_on_stream(self.stream, function)

    def capture(self, key: int, function: Callable[[], T]) -> str | None:
        """Capture a function. On failure, return the reason and discard all graphs."""
        before = torch.cuda.current_stream()
        states = [(generator, generator.clone_state()) for generator in self._generators()]
        try:
            self.captured[key] = capture(function, stream=self.stream, pool=self.pool, generator=self.generator)
        except RuntimeError as error:
            self._recover(before, states)
            cause = error.__context__ or error  # the first error has the reason, not the one raised at its end
            return str(cause).splitlines()[0]
        return None

    def _generators(self) -> list[torch.Generator]:
        """Return the generators that a capture changes: the default one takes part in every graph."""
        default = torch.cuda.default_generators[torch.cuda.current_device()]
        return [default] if self.generator is None else [default, self.generator]

    def _recover(self, stream: torch.cuda.Stream, states: list[tuple[torch.Generator, torch.Generator]]) -> None:
        """Undo the effects of a failed capture: its stream, its pool, and generators that are still capturing.

        Otherwise drawing the next random number and freeing memory would fail.
        """
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError):  # allocation to the pool has already ended
            cast(Any, torch._C)._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool)
        self.captured.clear()  # they draw from the generators' old states
        for generator, state in states:
            generator.graphsafe_set_state(state)

    def launch(self, key: int) -> T:
        """Launch a graph; its outputs are valid until the next launch."""
        graph, outputs = self.captured[key]
        graph.replay()
        return outputs


def as_cuda_graph(
    function: Callable[[Tensor], tuple[Tensor, ...]], example: Tensor
) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Return the function as one CUDA graph, for inputs like the example; its results are copies."""
    buffer, stream = example.clone(), cast(Any, torch.cuda.Stream)(device=example.device)
    run_on_stream(stream, lambda: [function(buffer) for _ in range(2)])
    graph, outputs = capture(lambda: function(buffer))

    def replay(x: Tensor) -> tuple[Tensor, ...]:
        buffer.copy_(x)
        graph.replay()
        return tuple(t.clone() for t in outputs)

    return replay
