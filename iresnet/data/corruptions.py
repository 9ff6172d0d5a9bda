"""Corrupted and synthetic images, to test whether a density detects them.

Some are harder to compress than the data and some easier. A density tends to give simple images a high likelihood, so
it is expected to miss the easier ones; they are included to show that, not to hide it.

`CORRUPTIONS` change every image. `SYNTHETIC` images contain none of the data: one colour, a pattern, a mean, noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Corruption = Callable[[Tensor, int, torch.Generator], Tensor]

#: The number of images in a mean: enough that no single one is recognisable.
AVERAGED = 100

#: The most entries of the averaging matrix in memory: above 11,585 images it is built in chunks.
WEIGHTS = 2**27


def pixel_noise(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Replace one pixel in five by a random level."""
    hit = torch.rand(x.shape, generator=generator) < 0.2
    return torch.where(hit, torch.randint(levels, x.shape, generator=generator).to(x.dtype), x)


def inverted(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Swap dark and bright."""
    return (levels - 1 - x.to(torch.int64)).to(x.dtype)


def rotated(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Rotate by 90 degrees, or by 180 degrees if the image is not square."""
    return x.rot90(1 if x.shape[-1] == x.shape[-2] else 2, (-2, -1)).contiguous()


def shuffled(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Permute the pixels, with one permutation for all images."""
    order = torch.randperm(x.shape[-1] * x.shape[-2], generator=generator)
    return x.flatten(-2)[..., order].reshape(x.shape)


def half_missing(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Set the lower half to 0."""
    kept = x.clone()
    kept[..., x.shape[-2] // 2 :, :] = 0
    return kept


def blurred(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Replace every pixel by the mean of the 3 x 3 pixels around it."""
    padded = F.pad(x.float(), (1, 1, 1, 1), mode="replicate")
    return F.avg_pool2d(padded, 3, stride=1).round().to(x.dtype)


def blank(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Return images that are 0 everywhere."""
    return torch.zeros_like(x)


def single_colour(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Return images of one random colour each; of one grey level if there is one channel."""
    return random_colours(x, levels, generator).expand_as(x).contiguous()


def gradient(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Return linear gradients between two random colours, in a random direction."""
    a, b = (random_colours(x, levels, generator).float() for _ in range(2))
    angle = 2 * math.pi * torch.rand((len(x), 1, 1, 1), generator=generator)
    down, across = (torch.linspace(-1, 1, n) for n in x.shape[-2:])
    far = angle.cos() * down[:, None] + angle.sin() * across
    t = (1 + far / (angle.cos().abs() + angle.sin().abs())) / 2
    return (a + (b - a) * t).round().to(x.dtype)


def two_colour_checkerboard(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Return checkerboards of two random colours, with squares up to a quarter of the image wide."""
    a, b = (random_colours(x, levels, generator) for _ in range(2))
    most = max(1, min(x.shape[-2:]) // 4)
    side = torch.randint(1, most + 1, (len(x), 1, 1, 1), generator=generator)
    down, across = (torch.arange(n) for n in x.shape[-2:])
    odd = (down[:, None] // side + across // side) % 2 == 1
    return torch.where(odd, a, b)


def mean_image(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Return means of a hundred random images: close to the mean of all, each a little different."""
    chosen = torch.randint(len(x), (len(x), AVERAGED), generator=generator)
    flat, means = x.flatten(1).float(), []
    for few in torch.split(chosen, max(1, WEIGHTS // len(x))):
        share = torch.zeros(len(few), len(x)).scatter_add_(1, few, torch.full(few.shape, 1 / AVERAGED))
        means.append((share @ flat).round().to(x.dtype))
    return torch.cat(means).reshape(x.shape)


def random_pixels(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Return images whose pixels are independent random levels."""
    return torch.randint(levels, x.shape, generator=generator).to(x.dtype)


def random_colours(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Draw a level for every channel of every image, shape (N, C, 1, 1)."""
    return torch.randint(levels, (*x.shape[:2], 1, 1), generator=generator).to(x.dtype)


CORRUPTIONS: dict[str, Corruption] = {
    "pixel noise": pixel_noise,
    "inverted": inverted,
    "shuffled": shuffled,
    "turned": rotated,
    "half missing": half_missing,
    "blurred": blurred,
}

#: Images that contain none of the data: blank, patterns, means of many, and noise.
SYNTHETIC: dict[str, Corruption] = {
    "blank": blank,
    "one colour": single_colour,
    "gradient": gradient,
    "checkerboard": two_colour_checkerboard,
    "mean image": mean_image,
    "noise": random_pixels,
}


def corrupt(name: str, x: Tensor, levels: int, seed: int = 0) -> Tensor:
    """Apply the corruption of this name to integer images (N, C, H, W), or replace them by synthetic ones."""
    return {**CORRUPTIONS, **SYNTHETIC}[name](x.cpu(), levels, torch.Generator().manual_seed(seed)).to(x.device)
