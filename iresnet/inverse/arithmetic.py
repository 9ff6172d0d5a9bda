"""Settings of the accelerated inverse: precisions and CUDA graph. None of them changes what is proven."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from ..branch.convolution import CONVOLUTIONS
from ..precision import cudnn_benchmark, float32_matmul_precision

#: Working precisions by name.
WORKING = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

Run: TypeAlias = Callable[[Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Arithmetic:
    """How an accelerated inverse is computed."""

    #: The precision of most evaluations: float16, bfloat16 or float32.
    working: str = "float16"
    #: The float64 convolution: native, im2col, im2col_by_row, shift_and_add, or auto for the fastest for each shape.
    exact: str = "auto"
    #: Whether everything is captured as one CUDA graph.
    graph: bool = True
    #: How the code residual is computed: float64 evaluates the chain, none leaves it out (NaN).
    code: str = "float64"
    #: How the blocks' solves are proven. residual: evaluate each g once more in float64. forward: prove a chain by the
    #: float64 evaluation that gives its code residual (`verification`); the same as residual if code is none.
    proof: str = "forward"

    def __post_init__(self) -> None:
        choices = {
            "working": [*WORKING], "exact": ["auto", *CONVOLUTIONS], "code": ["float64", "none"],
            "proof": ["forward", "residual"],
        }  # fmt: skip
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}.")

    @classmethod
    def on(cls, device: torch.device) -> Arithmetic:
        """Return the best settings for this kind of device."""
        return cls() if device.type == "cuda" else cls("float32", "native", graph=False)

    @property
    def dtype(self) -> torch.dtype:
        return WORKING[self.working]

    @contextmanager
    def precision(self, device: torch.device) -> Iterator[None]:
        """Disable TF32 and autocast, sum in float32, and let cuDNN choose the fastest convolutions."""
        matmul = cast(Any, torch.backends.cuda.matmul)
        kinds = ("fp16_accumulation", "fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction")
        names = [f"allow_{kind}" for kind in kinds if hasattr(matmul, f"allow_{kind}")]
        before = [getattr(matmul, name) for name in names]
        with (
            torch.autocast(device_type=device.type, enabled=False),
            float32_matmul_precision("ieee", device),
            cudnn_benchmark(),
        ):
            try:
                for name in names:
                    setattr(matmul, name, False)
                yield
            finally:
                for name, value in zip(names, before, strict=True):
                    setattr(matmul, name, value)
