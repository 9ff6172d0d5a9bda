"""Images as bytes and as PNG files.

A pixel is an integer v in 0 .. levels - 1, or a real number in the bin [v, v + 1) of that integer, as flows have it.
The integer, and the middle of its bin, get the brightness v / (levels - 1); values outside are clipped.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ..spelling import at_least

Bytes: TypeAlias = NDArray[np.uint8]

COLOURS = 128  # of a PNG file that is made smaller
GROUND = 225  # between the tiles of a grid: differs from white as well as from black


def pixels(images: Tensor, levels: int = 256, *, ink: bool = False, name: str = "images") -> Bytes:
    """Convert images (N, C, H, W) to bytes (N, H, W, C), C = 1 or 3. `ink` draws 0 white and the highest level black.

    >>> x = torch.tensor([0, 8, 16]).reshape(1, 1, 1, 3)
    >>> pixels(x, levels=17).flatten().tolist(), pixels(x + 0.5, levels=17).flatten().tolist()
    ([0, 128, 255], [0, 128, 255])
    """
    at_least(2, "Pixels are integers 0 .. levels - 1.", levels=levels)
    if images.dim() != 4 or images.shape[1] not in (1, 3) or images.numel() == 0:
        raise ValueError(
            f"{name} must have shape (N, C, H, W) with N at least 1 and C of 1 or 3; got {tuple(images.shape)}. "
            "Choose channels, or add the missing dimension."
        )
    values = centred(images)
    if not bool(values.isfinite().all()):
        raise ValueError(f"{name} must be finite; got NaN or infinity. Leave such images out.")
    return shades((values - 0.5) / (levels - 1), ink=ink)


def centred(images: Tensor) -> Tensor:
    """Convert images to float64: integers to the middle of their bins, real numbers unchanged."""
    values = images.detach().cpu()
    return values.double() if values.is_floating_point() else values.double() + 0.5


def shades(light: Tensor, *, ink: bool = False) -> Bytes:
    """Convert brightness (N, C, H, W), clipped to [0, 1], to bytes (N, H, W, C)."""
    levels = (255 * light.clamp(0, 1)).round().to(torch.uint8)
    levels = 255 - levels if ink else levels
    return np.asarray(levels.permute(0, 2, 3, 1).numpy())


def looks_handwritten(images: Tensor, levels: int) -> bool:
    """Whether grey images are mostly empty, like handwriting, which is best drawn dark on white."""
    if images.dim() != 4 or images.shape[1] != 1:
        return False
    return bool((images.double() < (levels - 1) / 4).double().mean() > 0.5)


def differences(originals: Tensor, rebuilt: Tensor) -> tuple[Tensor, float]:
    """Return |rebuilt - originals|, averaged over channels and divided by its largest value, and that value."""
    if originals.shape != rebuilt.shape:
        raise ValueError(
            f"originals and rebuilt must have the same shape; got {tuple(originals.shape)} and "
            f"{tuple(rebuilt.shape)}. Pass each image beside its reconstruction."
        )
    d = (rebuilt.detach().cpu().double() - originals.detach().cpu().double()).abs().mean(dim=1, keepdim=True)
    largest = float(d.max()) if d.numel() else 0.0
    return (d / largest if largest > 0 else d), largest


def tile(tiles: Bytes, columns: int, factor: int = 1, gap: int = 1) -> Bytes:
    """Arrange images (N, H, W, C) in rows, each enlarged by an integer factor, with a gap around each."""
    n, height, width, channels = tiles.shape
    height, width, rows = height * factor + gap, width * factor + gap, -(-n // columns)
    sheet = np.full((rows * height + gap, columns * width + gap, channels), GROUND, dtype=np.uint8)
    for i, image in enumerate(tiles.repeat(factor, axis=1).repeat(factor, axis=2)):
        top, left = gap + i // columns * height, gap + i % columns * width
        sheet[top : top + height - gap, left : left + width - gap] = image
    return sheet


def png(image: Bytes) -> bytes:
    """Encode one image (H, W, 1 or 3) as PNG."""
    return _encode(Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image))


def shrink_png(path: str | Path, width: int = 1400) -> tuple[bytes, tuple[int, int]]:
    """Read a PNG file and encode it again, at most `width` pixels wide and in few colours; return that and its size."""
    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path} must be an image file; it cannot be read. Write it again.") from error
    if image.width > width:
        image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    return _encode(image.quantize(COLOURS)), image.size


def _encode(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()
