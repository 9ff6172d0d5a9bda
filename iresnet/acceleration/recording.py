"""Steps recorded as CUDA graphs, one for each key, all of them in one pool of memory: they never run at once.

What one recording leaves in that memory (gradients, say) holds until another is launched, which may write over it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

import torch

T = TypeVar("T")


class Recordings(Generic[T]):
    """Functions without arguments that work on tensors which stay where they are, each recorded once and launched."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        self.made: dict[int, tuple[torch.cuda.CUDAGraph, T]] = {}

    def __contains__(self, key: int) -> bool:
        return key in self.made

    def aside(self, function: Callable[[], T]) -> T:
        """Call a function on the stream of the recordings: what ran on the default stream cannot be recorded."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = function()
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def record(self, key: int, function: Callable[[], T]) -> str | None:
        """Record a function, which is not run by that; where it fails, the reason, and no other recording is kept."""
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        states = [(generator, generator.clone_state()) for generator in self._generators()]
        if self.generator is not None:
            graph.register_generator_state(self.generator)
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                outputs = function()
        except RuntimeError as error:
            self._recover(before, states)
            cause = error.__context__ or error  # the first error says why, not that of its end
            return str(cause).splitlines()[0]
        self.made[key] = graph, outputs
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
        self.made.clear()  # they draw from the generators' old states
        for generator, state in states:
            generator.graphsafe_set_state(state)

    def launch(self, key: int) -> T:
        """Run a recording; its outputs hold until the next one is launched."""
        graph, outputs = self.made[key]
        graph.replay()
        return outputs
