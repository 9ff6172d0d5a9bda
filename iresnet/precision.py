"""How exactly a GPU multiplies float32: in full ("ieee"), or on its tensor cores with ten bits ("tf32").

Whatever way a user has set it, it is put back as it was. On a CPU nothing is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def full_precision(like: Tensor) -> Iterator[None]:
    """TF32 and autocast off: both stall an iteration near 1e-3."""
    with torch.autocast(device_type=like.device.type, enabled=False), float32_matmul_precision("ieee", like.device):
        yield


@contextmanager
def float32_matmul_precision(precision: str, device: torch.device) -> Iterator[None]:
    """Within this context products and convolutions of float32 are "ieee" or "tf32" on this device."""
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
    """Within this context cuDNN tries its algorithms for every new shape and takes the fastest."""
    cudnn: Any = torch.backends.cudnn
    before, cudnn.benchmark = cudnn.benchmark, True
    try:
        yield
    finally:
        cudnn.benchmark = before


@contextmanager
def float32_accumulation() -> Iterator[None]:
    """Within this context products of bfloat16 that are made in parts are added up in float32, parts and all."""
    matmul: Any = torch.backends.cuda.matmul
    before, matmul.allow_bf16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction, False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


def _switches() -> list[tuple[Any, str, dict[str, Any]]]:
    """(object, attribute, its values by name) of every switch: torch had others before 2.9, and does not mix them."""
    backends: Any = torch.backends
    if hasattr(backends.cuda.matmul, "fp32_precision"):
        same = {"ieee": "ieee", "tf32": "tf32"}
        return [(place, "fp32_precision", same) for place in (backends.cuda.matmul, backends.cudnn.conv)]
    switch = {"ieee": False, "tf32": True}
    return [(place, "allow_tf32", switch) for place in (backends.cuda.matmul, backends.cudnn)]
