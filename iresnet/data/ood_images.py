"""Out-of-distribution images in the format of a model: scikit-learn's own, or any others, converted.

Images are resized. Colour images become greyscale by the mean of their channels; greyscale images get a random
foreground and background colour. All random choices come from a seed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .corruptions import random_colours
from .dataset import Dataset
from .sampling import seeded_generator
from .schema import Schema

#: The range of the side of a crop from a photograph, in pixels.
CROP = (64, 257)


def convert_images(x: Tensor, levels: int, schema: Schema, *, seed: int = 0) -> Dataset:
    """Convert integer images (N, C, H, W) with this many levels to another schema.

    >>> small = torch.randint(17, (5, 1, 8, 8))
    >>> print(convert_images(small, 17, Schema((3, 32, 32), 256)).schema)
    images of shape (3, 32, 32) with 256 levels
    """
    top = _levels(schema) - 1
    v = _resize(x.cpu().float() / (levels - 1), schema)
    if v.shape[1] != schema.shape[0]:
        v = _colourise(v.mean(1, keepdim=True), schema, seed)
    return Dataset((v * top).round().clamp(0, top).to(torch.uint8), None, schema)


def handwriting(count: int, schema: Schema, *, seed: int = 0) -> Dataset:
    """Return at most `count` of scikit-learn's 8x8 digits, converted."""
    from sklearn.datasets import load_digits

    x = torch.from_numpy(load_digits(return_X_y=True)[0]).view(-1, 1, 8, 8)
    return convert_images(
        x[torch.randperm(len(x), generator=seeded_generator(seed, "handwriting"))[:count]], 17, schema, seed=seed
    )


def photographs(count: int, schema: Schema, *, seed: int = 0) -> Dataset:
    """Return random square crops of scikit-learn's two photographs, a temple and a flower, converted."""
    from sklearn.datasets import load_sample_images

    photos = [torch.from_numpy(p.copy()).permute(2, 0, 1) for p in load_sample_images().images]
    generator, crops = seeded_generator(seed, "photographs"), []

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    for i in range(count):
        photo, side = photos[i % len(photos)], draw(*CROP)
        top, left = (draw(0, n - side + 1) for n in photo.shape[1:])
        crop = photo[None, :, top : top + side, left : left + side]
        crops.append(_resize(crop.float(), schema).round().to(torch.uint8))
    return convert_images(torch.cat(crops), 256, schema, seed=seed)


def _levels(schema: Schema) -> int:
    if schema.levels is None or not schema.is_image:
        raise ValueError(f"images can only be converted to images of integers; got {schema}. Give samples of your own.")
    return schema.levels


def _resize(v: Tensor, schema: Schema) -> Tensor:
    size = schema.shape[1:]
    return v if v.shape[2:] == size else F.interpolate(v, size, mode="bilinear", antialias=True)


def _colourise(v: Tensor, schema: Schema, seed: int) -> Tensor:
    """Give greyscale images in [0, 1] the channels of a schema; several channels get two random colours."""
    if schema.shape[0] == 1:
        return v
    generator = seeded_generator(seed, "colours")
    like = v.expand(-1, schema.shape[0], -1, -1)
    background, foreground = (random_colours(like, 256, generator) / 255 for _ in range(2))
    return background + (foreground - background) * v
