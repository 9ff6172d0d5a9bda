"""Real images of another kind, in the form that a model takes: those inside scikit-learn, and any set, recast.

An image is recast by changing its size, by its mean where colours are not wanted, and by random colours for its ink and
its ground where they are. What is drawn at random comes from a seed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .corruptions import colours
from .dataset import Dataset, Schema, stream

#: The side of a piece that is cut from a photograph, in its pixels: from, to.
PIECE = (64, 257)


def recast(x: Tensor, levels: int, schema: Schema, *, seed: int = 0) -> Dataset:
    """Integer images (N, C, H, W) with so many levels, as rows of another schema.

    >>> small = torch.randint(17, (5, 1, 8, 8))
    >>> print(recast(small, 17, Schema((3, 32, 32), 256)).schema)
    images of shape (3, 32, 32) with 256 levels
    """
    top = _levels(schema) - 1
    v = _sized(x.cpu().float() / (levels - 1), schema)
    if v.shape[1] != schema.shape[0]:
        v = _coloured(v.mean(1, keepdim=True), schema, seed)
    return Dataset((v * top).round().clamp(0, top).to(torch.uint8), None, schema)


def handwriting(rows: int, schema: Schema, *, seed: int = 0) -> Dataset:
    """scikit-learn's 8x8 digits, at most `rows` of them, recast."""
    from sklearn.datasets import load_digits

    x = torch.from_numpy(load_digits(return_X_y=True)[0]).view(-1, 1, 8, 8)
    return recast(x[torch.randperm(len(x), generator=stream(seed, "handwriting"))[:rows]], 17, schema, seed=seed)


def photographs(rows: int, schema: Schema, *, seed: int = 0) -> Dataset:
    """Square pieces of scikit-learn's two photographs, a temple and a flower, of random places and sizes, recast."""
    from sklearn.datasets import load_sample_images

    whole = [torch.from_numpy(p.copy()).permute(2, 0, 1) for p in load_sample_images().images]
    generator, pieces = stream(seed, "photographs"), []

    def drawn(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    for i in range(rows):
        picture, side = whole[i % len(whole)], drawn(*PIECE)
        top, left = (drawn(0, n - side + 1) for n in picture.shape[1:])
        piece = picture[None, :, top : top + side, left : left + side]
        pieces.append(_sized(piece.float(), schema).round().to(torch.uint8))
    return recast(torch.cat(pieces), 256, schema, seed=seed)


def _levels(schema: Schema) -> int:
    if schema.levels is None or not schema.is_image:
        raise ValueError(f"images can be recast as images of integers; got {schema}. Give rows of your own.")
    return schema.levels


def _sized(v: Tensor, schema: Schema) -> Tensor:
    size = schema.shape[1:]
    return v if v.shape[2:] == size else F.interpolate(v, size, mode="bilinear", antialias=True)


def _coloured(v: Tensor, schema: Schema, seed: int) -> Tensor:
    """Grey images in [0, 1] with as many channels as are wanted; several: ink and ground of random colours."""
    if schema.shape[0] == 1:
        return v
    generator = stream(seed, "colours")
    like = v.expand(-1, schema.shape[0], -1, -1)
    ground, ink = (colours(like, 256, generator) / 255 for _ in range(2))
    return ground + (ink - ground) * v
