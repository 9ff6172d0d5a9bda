"""Context managers for the precision of float32 products: without autocast; on a GPU full ("ieee") or TF32 ("tf32").

The user's settings are restored afterwards. On a CPU only autocast matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


@contextmanager
def full_precision(like: Tensor) -> Iterator[None]:
    """Turn TF32 and autocast off within this context: with either, fixed-point iterations stall near 1e-3."""
    with without_autocast(like), float32_matmul_precision("ieee", like.device):
        yield


def without_autocast(like: Tensor) -> AbstractContextManager[object]:
    """Turn autocast off within this context, for the device of this tensor; no context at all where it is off."""
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


@contextmanager
def float32_matmul_precision(precision: str, device: torch.device) -> Iterator[None]:
    """Within this context, float32 matrix products and convolutions on this device are "ieee" or "tf32"."""
    places = _switches() if device.type == "cuda" else []
    before = [getattr(place, name) for place, name, _ in places]
    try:
        for place, name, values in places:
            setattr(place, name, values[precision])
        yield
    finally:
        for (place, name, _), value in zip(places, before, strict=True):
            setattr(place, name, value)


@contextmanager
def cudnn_benchmark() -> Iterator[None]:
    """Within this context, cuDNN measures its algorithms for every new shape and uses the fastest."""
    cudnn: Any = torch.backends.cudnn
    before, cudnn.benchmark = cudnn.benchmark, True
    try:
        yield
    finally:
        cudnn.benchmark = before


@contextmanager
def float32_accumulation() -> Iterator[None]:
    """Within this context, partial sums of bfloat16 products are accumulated in float32 throughout."""
    matmul: Any = torch.backends.cuda.matmul
    before, matmul.allow_bf16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction, False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


def _switches() -> list[tuple[Any, str, dict[str, Any]]]:
    """Return (object, attribute, value by name) of every switch: torch 2.9 replaced the old ones and forbids mixing."""
    backends: Any = torch.backends
    if hasattr(backends.cuda.matmul, "fp32_precision"):
        same = {"ieee": "ieee", "tf32": "tf32"}
        return [(place, "fp32_precision", same) for place in (backends.cuda.matmul, backends.cudnn.conv)]
    switch = {"ieee": False, "tf32": True}
    return [(place, "allow_tf32", switch) for place in (backends.cuda.matmul, backends.cudnn)]
