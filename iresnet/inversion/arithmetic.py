"""How an inverse is computed: its precisions, and a CUDA graph of the whole. None of it changes what is proven."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from ..precision import chosen_convolutions, float32_products
from .convolution import CONVOLUTIONS

#: Working precisions by name, and the type that holds each.
WORKING = {
    "float16": torch.float16, "bfloat16": torch.bfloat16, "tf32": torch.float32, "float32": torch.float32
}  # fmt: skip

Run: TypeAlias = Callable[[Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Arithmetic:
    """How an inverse is computed.

    `working` is the precision of most evaluations: float16, bfloat16, tf32 or float32. `single` is how residuals of
    float32 are evaluated: float32, or split into numbers that tensor cores take. `exact` is the way to convolve in
    float64: native, gathered, banded, shifted, or auto, the fastest for each shape. `graph` captures everything as
    one CUDA graph, `compiled` lets torch.compile join the elementwise work. `code` is how the code residual is found:
    float64 evaluates the chain, linear carries the residuals of the blocks through their Jacobians in the working
    precision (three digits in half precision), none leaves it out (NaN). `proof` is how the blocks' solves are proven:
    residual evaluates each g once more in float64; forward proves a chain by the float64 evaluation that gives its code
    residual (`judgement`), and is as residual where there is none; product takes one product with the Jacobian in the
    working precision and adds what its rounding can amount to (`rounding`), which counts on how a GPU adds up products
    of half precision.
    """

    working: str = "float16"
    exact: str = "auto"
    graph: bool = True
    compiled: bool = False
    code: str = "float64"
    proof: str = "forward"
    single: str = "float32"

    def __post_init__(self) -> None:
        choices = {
            "working": [*WORKING], "exact": ["auto", *CONVOLUTIONS], "code": ["float64", "linear", "none"],
            "proof": ["forward", "residual", "product"], "single": ["float32", "split"],
        }  # fmt: skip
        for name, known in choices.items():
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
        """TF32 where it was asked for and only there, sums in float32, no autocast."""
        # Sums of half precision products are float32 throughout: a proof counts on it.
        matmul = cast(Any, torch.backends.cuda.matmul)
        kinds = ("fp16_accumulation", "fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction")
        names = [f"allow_{kind}" for kind in kinds if hasattr(matmul, f"allow_{kind}")]
        before = [getattr(matmul, name) for name in names]
        products = float32_products("tf32" if self.working == "tf32" else "ieee", device)
        with torch.autocast(device_type=device.type, enabled=False), products, chosen_convolutions():
            try:
                for name in names:
                    setattr(matmul, name, False)
                yield
            finally:
                for name, value in zip(names, before, strict=True):
                    setattr(matmul, name, value)


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
