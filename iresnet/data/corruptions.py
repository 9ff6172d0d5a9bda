"""Images that are wrong in a known way, to see whether a density notices.

Some of these are harder to compress than the data and some simpler; a density tends to give simple images a high
likelihood, so those are expected to be missed by it. They are here to show that, not to hide it.

`CORRUPTIONS` change every image; `INVENTED` ones show none of them: one colour, a pattern, the mean of many, noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Corruption = Callable[[Tensor, int, torch.Generator], Tensor]

#: Images whose mean is taken: so many that little is left of any one of them.
MANY = 100

#: Shares of images in means that are held at a time: for more images than 11,585, not all.
SHARES = 2**27


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


def blank(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Nothing at all: the lowest level everywhere."""
    return torch.zeros_like(x)


def one_colour(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Every image of one colour, drawn at random; of one grey level, where there is one channel."""
    return colours(x, levels, generator).expand_as(x).contiguous()


def gradient(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """From one colour to another, evenly along a line in a random direction."""
    a, b = (colours(x, levels, generator).float() for _ in range(2))
    angle = 2 * math.pi * torch.rand((len(x), 1, 1, 1), generator=generator)
    down, across = (torch.linspace(-1, 1, n) for n in x.shape[-2:])
    far = angle.cos() * down[:, None] + angle.sin() * across
    t = (1 + far / (angle.cos().abs() + angle.sin().abs())) / 2
    return (a + (b - a) * t).round().to(x.dtype)


def checkerboard(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Squares of two colours by turns, at most a quarter of the image wide."""
    a, b = (colours(x, levels, generator) for _ in range(2))
    most = max(1, min(x.shape[-2:]) // 4)
    side = torch.randint(1, most + 1, (len(x), 1, 1, 1), generator=generator)
    down, across = (torch.arange(n) for n in x.shape[-2:])
    odd = (down[:, None] // side + across // side) % 2 == 1
    return torch.where(odd, a, b)


def mean_image(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """The mean of a hundred of the images, drawn at random: close to that of all, each a little different."""
    chosen = torch.randint(len(x), (len(x), MANY), generator=generator)
    flat, means = x.flatten(1).float(), []
    for few in torch.split(chosen, max(1, SHARES // len(x))):
        share = torch.zeros(len(few), len(x)).scatter_add_(1, few, torch.full(few.shape, 1 / MANY))
        means.append((share @ flat).round().to(x.dtype))
    return torch.cat(means).reshape(x.shape)


def noise(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """Every pixel a random level."""
    return torch.randint(levels, x.shape, generator=generator).to(x.dtype)


def colours(x: Tensor, levels: int, generator: torch.Generator) -> Tensor:
    """A random level for every channel of every image, shape (N, C, 1, 1)."""
    return torch.randint(levels, (*x.shape[:2], 1, 1), generator=generator).to(x.dtype)


CORRUPTIONS: dict[str, Corruption] = {
    "pixel noise": pixel_noise,
    "inverted": inverted,
    "shuffled": shuffled,
    "turned": turned,
    "half missing": half_missing,
    "blurred": blurred,
}

#: What shows none of the images: nothing, patterns, the mean of many, and noise.
INVENTED: dict[str, Corruption] = {
    "blank": blank,
    "one colour": one_colour,
    "gradient": gradient,
    "checkerboard": checkerboard,
    "mean image": mean_image,
    "noise": noise,
}


def corrupt(name: str, x: Tensor, levels: int, seed: int = 0) -> Tensor:
    """As many integer images (N, C, H, W), corrupted or invented in the way of this name."""
    return {**CORRUPTIONS, **INVENTED}[name](x.cpu(), levels, torch.Generator().manual_seed(seed)).to(x.device)
