"""Random vectors v with mean 0 and covariance I, for which E[v' A v] is the trace of A."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Probe: TypeAlias = Literal["rademacher", "gaussian"]


def draw_probes(x: Tensor, probe: Probe, generator: torch.Generator | None) -> Tensor:
    """Random vectors like x with mean 0 and covariance I."""
    return noise_to_probes(draw_probe_noise(x, probe, generator), x.dtype)


def draw_probe_noise(x: Tensor, probe: Probe, generator: torch.Generator | None) -> Tensor:
    """What `draw_probes` draws: Gaussian numbers, or a bit for every sign."""
    if probe == "gaussian":
        return torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
    return torch.randint(0, 2, x.shape, dtype=torch.int8, device=x.device, generator=generator)


def noise_to_probes(noise: Tensor, dtype: torch.dtype) -> Tensor:
    """Noise as probes: bits as signs, other numbers as they are."""
    return noise if noise.is_floating_point() else noise.to(dtype) * 2 - 1
