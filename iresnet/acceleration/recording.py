"""Steps recorded as CUDA graphs, one for each key, all of them in one pool of memory: they never run at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

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
        """Record a function, which is not run by that; where it fails, the reason."""
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        if self.generator is not None:
            graph.register_generator_state(self.generator)
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                outputs = function()
        except RuntimeError as error:
            torch.cuda.set_stream(before)  # a recording that fails leaves its own behind
            cause = error.__context__ or error  # the first error says why, not that of its end
            return str(cause).splitlines()[0]
        self.made[key] = graph, outputs
        return None

    def launch(self, key: int) -> T:
        """Run a recording; its outputs hold until the next one is launched."""
        graph, outputs = self.made[key]
        graph.replay()
        return outputs
