"""How an inverse is computed: its precisions, and a CUDA graph of the whole. None of it changes what is proven."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from .convolution import CONVOLUTIONS

#: Working precisions by name, and the type that holds each.
WORKING = {
    "float16": torch.float16, "bfloat16": torch.bfloat16, "tf32": torch.float32, "float32": torch.float32
}  # fmt: skip

Run: TypeAlias = Callable[[Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Arithmetic:
    """How an inverse is computed.

    `working` is the precision of most evaluations: float16, bfloat16, tf32 or float32. `exact` is the way to convolve
    in float64: native, gathered, shifted, or auto, the fastest for each shape. `graph` captures everything as one CUDA
    graph, `compiled` lets torch.compile join the elementwise work.
    """

    working: str = "float16"
    exact: str = "auto"
    graph: bool = True
    compiled: bool = False

    def __post_init__(self) -> None:
        for name, known in (("working", [*WORKING]), ("exact", ["auto", *CONVOLUTIONS])):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}.")

    @classmethod
    def on(cls, device: torch.device) -> Arithmetic:
        """What is best on this kind of device."""
        return cls() if device.type == "cuda" else cls("float32", "native", graph=False)

    @property
    def dtype(self) -> torch.dtype:
        return WORKING[self.working]

    @contextmanager
    def precision(self, device: torch.device) -> Iterator[None]:
        """TF32 where it was asked for and only there, no autocast."""
        tf32 = self.working == "tf32"
        with torch.autocast(device_type=device.type, enabled=False):
            if device.type != "cuda":
                yield
                return
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            try:
                with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=tf32):
                    yield
            finally:
                torch.set_float32_matmul_precision(before)


def captured(function: Run, example: Tensor) -> Run:
    """The function as one CUDA graph, for inputs like the example; its results are copies."""
    buffer, stream = example.clone(), cast(Any, torch.cuda.Stream)(device=example.device)
    current = torch.cuda.current_stream(example.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):  # libraries choose their kernels and allocate outside of the capture
        for _ in range(2):
            function(buffer)
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function(buffer)

    def replay(x: Tensor) -> tuple[Tensor, ...]:
        buffer.copy_(x)
        graph.replay()
        return tuple(t.clone() for t in outputs)

    return replay
