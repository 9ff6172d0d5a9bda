"""Hutchinson probes: random vectors v with mean 0 and covariance I, for which E[v' A v] = tr A."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ..compiler import drawing_from
from ..shard import draw_rows

Probe: TypeAlias = Literal["rademacher", "gaussian"]


def draw_probes(x: Tensor, probe: Probe, generator: torch.Generator | None, *, shared: bool = False) -> Tensor:
    """Draw one probe per sample, shaped like x; with `shared`, the same for all samples."""
    return noise_to_probes(draw_probe_noise(x, probe, generator, shared=shared), x.dtype)


def draw_probe_noise(x: Tensor, probe: Probe, generator: torch.Generator | None, *, shared: bool = False) -> Tensor:
    """Draw the random numbers behind probes: Gaussian numbers, or one bit per sign."""

    def draw(shape: tuple[int, ...]) -> Tensor:
        if probe == "gaussian":
            return torch.randn(shape, dtype=x.dtype, device=x.device, **drawing_from(generator))
        return torch.randint(0, 2, shape, dtype=torch.int8, device=x.device, **drawing_from(generator))

    return draw((1, *x.shape[1:])).expand_as(x) if shared else draw_rows(draw, x.shape)


def noise_to_probes(noise: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn noise into probes: bits become signs, Gaussian numbers stay."""
    return noise if noise.is_floating_point() else noise.to(dtype) * 2 - 1
