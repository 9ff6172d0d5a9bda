"""Images that are wrong in a known way, to see whether a density notices.

Some of these are harder to compress than the data and some simpler; a density tends to give simple images a high
likelihood, so those are expected to be missed by it. They are here to show that, not to hide it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Corruption = Callable[[Tensor, int, torch.Generator], Tensor]


def pixel_noise(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """One pixel in five replaced by a random level."""
    hit = torch.rand(x.shape, generator=generator) < 0.2
    return torch.where(hit, torch.randint(levels, x.shape, generator=generator).to(x.dtype), x)


def inverted(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Dark for bright."""
    return (levels - 1 - x.to(torch.int64)).to(x.dtype)


def turned(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Turned by a quarter; upside down where the image is not square."""
    return x.rot90(1 if x.shape[-1] == x.shape[-2] else 2, (-2, -1)).contiguous()


def shuffled(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """The same pixels in another order, one order for all images."""
    order = torch.randperm(x.shape[-1] * x.shape[-2], generator=generator)
    return x.flatten(-2)[..., order].reshape(x.shape)


def half_missing(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """The lower half blank."""
    kept = x.clone()
    kept[..., x.shape[-2] // 2 :, :] = 0
    return kept


def blurred(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Every pixel the mean of its neighbours, three by three."""
    padded = F.pad(x.float(), (1, 1, 1, 1), mode="replicate")
    return F.avg_pool2d(padded, 3, stride=1).round().to(x.dtype)


CORRUPTIONS: dict[str, Corruption] = {
    "pixel noise": pixel_noise,
    "inverted": inverted,
    "shuffled": shuffled,
    "turned": turned,
    "half missing": half_missing,
    "blurred": blurred,
}


def corrupt(name: str, x: Tensor, levels: int, seed: int = 0) -> Tensor:
    """Integer images (N, C, H, W) corrupted in the way of this name."""
    return CORRUPTIONS[name](x.cpu(), levels, torch.Generator().manual_seed(seed)).to(x.device)
