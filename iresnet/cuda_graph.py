"""CUDA graphs: work on a GPU that is recorded once and then launched at once, on tensors that stay where they are.

record       a function as a graph: the one place that captures
Recordings   several, one for each key, in one pool of memory: they never run at once (training steps)
captured     a function of one tensor, which is copied to where the graph reads it (inverses)

What a graph leaves in its memory (gradients, say) holds until another one of its pool is launched, which may write
over it.
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
    """A function as a graph, which does not run it, and its outputs, which every launch writes.

    `release` gives memory that is free back first, so that the graph can have it; that takes longer than recording
    something small. Without it the graph is recorded on the current stream.
    """
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, pool=pool, stream=stream) if release else _at_once(graph):
        outputs = function()
    return graph, outputs


@contextmanager
def _at_once(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """As `torch.cuda.graph`, which first gives memory back and ends what garbage there is: none may be found within."""
    collects = gc.isenabled()
    torch.cuda.synchronize()
    gc.disable()
    try:
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()
    finally:
        if collects:
            gc.enable()


def run_on_stream(stream: torch.cuda.Stream, function: Callable[[], T]) -> T:
    """Call a function on another stream, after what was launched so far and before what is launched next.

    What is to be recorded runs there first, since libraries choose their kernels and allocate outside of a recording.
    """
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        result = function()
    current.wait_stream(stream)
    return result


class CudaGraphs(Generic[T]):
    """Functions without arguments, each recorded once and launched."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        self.captured: dict[int, tuple[torch.cuda.CUDAGraph, T]] = {}

    def __contains__(self, key: int) -> bool:
        return key in self.captured

    def run_on_stream(self, function: Callable[[], T]) -> T:
        """Call a function on the stream of the recordings: what ran on the default stream cannot be recorded."""
        return run_on_stream(self.stream, function)

    def capture(self, key: int, function: Callable[[], T]) -> str | None:
        """Record a function; where it fails, the reason, and no other recording is kept."""
        before = torch.cuda.current_stream()
        states = [(generator, generator.clone_state()) for generator in self._generators()]
        try:
            self.captured[key] = capture(function, stream=self.stream, pool=self.pool, generator=self.generator)
        except RuntimeError as error:
            self._recover(before, states)
            cause = error.__context__ or error  # the first error says why, not that of its end
            return str(cause).splitlines()[0]
        return None

    def _generators(self) -> list[torch.Generator]:
        """All that a recording changes: the default one takes part in every graph."""
        default = torch.cuda.default_generators[torch.cuda.current_device()]
        return [default] if self.generator is None else [default, self.generator]

    def _recover(self, stream: torch.cuda.Stream, states: list[tuple[torch.Generator, torch.Generator]]) -> None:
        """Undo what a recording that fails leaves behind: its stream, its pool, generators that wait for its end.

        Without that the next random number is refused, and so is giving memory back.
        """
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError):  # it has ended
            cast(Any, torch._C)._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool)
        self.captured.clear()  # they draw from the generators' old states
        for generator, state in states:
            generator.graphsafe_set_state(state)

    def launch(self, key: int) -> T:
        """Run a recording; its outputs hold until the next one is launched."""
        graph, outputs = self.captured[key]
        graph.replay()
        return outputs


def as_cuda_graph(
    function: Callable[[Tensor], tuple[Tensor, ...]], example: Tensor
) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The function as one CUDA graph, for inputs like the example; its results are copies."""
    buffer, stream = example.clone(), cast(Any, torch.cuda.Stream)(device=example.device)
    run_on_stream(stream, lambda: [function(buffer) for _ in range(2)])
    graph, outputs = capture(lambda: function(buffer))

    def replay(x: Tensor) -> tuple[Tensor, ...]:
        buffer.copy_(x)
        graph.replay()
        return tuple(t.clone() for t in outputs)

    return replay
