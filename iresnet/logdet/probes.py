"""Hutchinson probes: random vectors v with mean 0 and covariance I, for which E[v' A v] = tr A."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Probe: TypeAlias = Literal["rademacher", "gaussian"]


def draw_probes(x: Tensor, probe: Probe, generator: torch.Generator | None) -> Tensor:
    """Draw one probe per sample, shaped like x."""
    return noise_to_probes(draw_probe_noise(x, probe, generator), x.dtype)


def draw_probe_noise(x: Tensor, probe: Probe, generator: torch.Generator | None) -> Tensor:
    """Draw the random numbers behind probes: Gaussian numbers, or one bit per sign."""
    if probe == "gaussian":
        return torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
    return torch.randint(0, 2, x.shape, dtype=torch.int8, device=x.device, generator=generator)


def noise_to_probes(noise: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn noise into probes: bits become signs, Gaussian numbers stay."""
    return noise if noise.is_floating_point() else noise.to(dtype) * 2 - 1
