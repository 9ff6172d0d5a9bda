"""Which device computes: the CPU, or a GPU that CUDA finds."""

from __future__ import annotations

import re

import torch
from torch import nn


def choose_device(name: str) -> str:
    """Return the name of an available device; `auto` prefers a GPU."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(
            f"device must be cpu, cuda, cuda:N or auto, since proofs need float64; got {name!r}. Use cpu, or auto."
        )
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):
        raise ValueError(f"device {name!r} is not available here. Use cpu, or auto.") from None
    return name


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's weights."""
    return next(module.parameters()).device
