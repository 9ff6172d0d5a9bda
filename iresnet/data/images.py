"""Image files: a folder whose sub-folders are classes, a folder of unlabelled images, or a single image.

Sub-folders `train`, `test` and `val` (or `valid`, `validation`) are splits, not classes, if `train` is among them and
there are no others. Images are sorted by path, which is also their name. They are greyscale (one channel) if every
pixel of every file is grey. All must have the same size, unless `size` is set: then each is cropped to a square around
its centre and resized. Transparency is dropped.

An image may have at most `PIL.Image.MAX_IMAGE_PIXELS` pixels, and all together must fit into memory.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..spelling import prefix_errors
from .dataset import Dataset
from .labels import EMPTY, class_names, encode_labels
from .schema import Schema

#: The formats that are decoded, whatever the file is called: Pillow would pass PostScript to an interpreter.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
EIGHT_BIT = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
HIDDEN = (".", "__MACOSX")  # where macOS keeps what is no image
VALIDATION = ("val", "valid", "validation")


def is_image(path: Path) -> bool:
    """Whether a path is a file with the suffix of a readable image format."""
    return path.is_file() and path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def split_folders(folder: Path) -> dict[str, Path]:
    """Map train, validation and test to their sub-folders; empty where a folder is not divided into splits."""
    names = [path.name for path in _folders(folder)]
    if "train" not in names or not {*names} <= {"train", "test", *VALIDATION}:
        return {}
    held = [name for name in names if name in VALIDATION]
    if len(held) > 1:
        raise ValueError(f"{folder} must have one sub-folder for validation; got {' and '.join(held)}. Keep one.")
    return {"validation" if name in VALIDATION else name: folder / name for name in names}


def find_images(folder: Path, *, labels: bool = True) -> tuple[list[Path], list[str]]:
    """List the images of a folder (or the one image) and the class of each, "" without sub-folders or labels."""
    if folder.is_file():
        return [folder], [EMPTY]
    flat = _inside(folder, deep=False)
    files = {path.name: _inside(path, deep=True) for path in _folders(folder)}
    if not labels:
        flat, files = sorted(chain(flat, *files.values())), {}
    empty = [name for name, inside in files.items() if not inside]
    if flat and any(files.values()):
        raise ValueError(
            f"{folder} holds both {flat[0].name} and sub-folders of images. Move it into one of them, or remove it."
        )
    if not flat and (empty or not files):
        where = folder / empty[0] if empty and len(empty) < len(files) else folder
        raise ValueError(f"{where} holds no image ({', '.join(s[1:] for s in SUFFIXES)}). Name a folder that does.")
    if flat:
        return flat, [EMPTY] * len(flat)
    return [f for inside in files.values() for f in inside], [name for name, inside in files.items() for _ in inside]


def load_image_folder(folder: Path, size: int, root: Path) -> Dataset:
    """Load a folder of images to train on; sub-folders are classes. Images are named by their path below `root`."""
    files, labels = find_images(folder)
    x = _stack(files, size)
    if bool((x == x[:, :1]).all()):
        x = x[:, :1]
    classes = class_names(labels)
    y = encode_labels(labels, classes, lambda i: str(files[i]))
    c, h, w = x.shape[1:]
    with prefix_errors(folder):
        schema = Schema((c, h, w), 256, classes=classes)
    return Dataset(torch.from_numpy(np.ascontiguousarray(x)), y, schema, _names(files, root))


def read_image_folder(folder: Path, schema: Schema, size: int, root: Path, *, labels: bool = True) -> Dataset:
    """Read a folder of images for a model of this schema; sub-folders must be its classes, unless `labels=False`."""
    files, found = find_images(folder, labels=labels)
    x = _stack(files, size)
    c, h, w = schema.shape
    if x.shape[2:] != (h, w):
        raise ValueError(f"{files[0]} is {x.shape[2]} x {x.shape[3]}; the model takes {h} x {w}. Resize the images.")
    if c == 1:
        colour = (x != x[:, :1]).any(axis=(1, 2, 3))
        if colour.any():
            raise ValueError(
                f"{files[int(colour.argmax())]} is in colour; the model takes greyscale images. Convert it."
            )
        x = x[:, :1]
    y = encode_labels(found if any(found) else None, schema.classes, lambda i: str(files[i]))
    return Dataset(torch.from_numpy(np.ascontiguousarray(x)), y, schema, _names(files, root))


def _names(files: Sequence[Path], root: Path) -> tuple[str, ...]:
    base = root if root.is_dir() else root.parent
    return tuple(file.relative_to(base).as_posix() for file in files)


def _folders(folder: Path) -> list[Path]:
    inside = folder.iterdir() if folder.is_dir() else ()
    found = sorted(path for path in inside if path.is_dir() and not path.name.startswith(HIDDEN))
    for path in found:
        if path.is_symlink() and folder.resolve().is_relative_to(path.resolve()):
            raise ValueError(f"{path} is a link to a folder that contains it. Remove the link.")
    return found


def _inside(folder: Path, *, deep: bool) -> list[Path]:
    try:
        return sorted(path for path in (folder.rglob("*") if deep else folder.iterdir()) if is_image(path))
    except RecursionError:
        raise ValueError(f"{folder} has sub-folders nested too deeply to be read. Move the images up.") from None


def _stack(files: Sequence[Path], size: int) -> NDArray[np.uint8]:
    """Decode all images into one array (N, 3, H, W)."""
    first = _decode(files[0], size)
    _check_memory(files, first)
    x = np.empty((len(files), *first.shape), np.uint8)
    for i, file in enumerate(files):
        image = _decode(file, size)
        if image.shape != first.shape:
            a, b = ("{} x {}".format(*shape[:2]) for shape in (first.shape, image.shape))
            raise ValueError(
                f"{file} is {b}, but {files[0].name} is {a}. Set size = {min(first.shape[:2])}, or resize."
            )
        x[i] = image
    return x.transpose(0, 3, 1, 2)


def _check_memory(files: Sequence[Path], first: NDArray[np.uint8]) -> None:
    needed, memory = len(files) * first.nbytes, _memory()
    if needed > memory:
        h, w = first.shape[:2]
        raise ValueError(
            f"{len(files):,} images like {files[0]}, {h} x {w}, take {needed / 1e9:,.0f} GB; this machine has "
            f"{memory / 1e9:,.0f} GB. Set size to make them smaller."
        )


def _memory() -> float:
    """The memory of this machine in bytes; infinity where it is unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # on Windows there is no such call
        return math.inf


def _decode(path: Path, size: int) -> NDArray[np.uint8]:
    """Decode one image to (H, W, 3)."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as opened:
                image = ImageOps.exif_transpose(opened)
                image.load()
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise ValueError(
            f"{path} must have at most {Image.MAX_IMAGE_PIXELS:,} pixels; it has more. Make it smaller."
        ) from None
    except Exception as error:  # the decoders raise many kinds of errors for a damaged file
        raise ValueError(f"{path} cannot be read as an image ({type(error).__name__}). Replace or remove it.") from None
    if image.mode not in EIGHT_BIT:
        raise ValueError(f"{path} must have 8 bits per channel; got pixels of mode {image.mode}. Convert it.")
    image = image.convert("RGB")
    if size:
        image = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
    return np.asarray(image)
