"""Images in files: a folder whose sub-folders are classes, a folder of unlabelled images, or a single image.

Sub-folders `train`, `test` and `val` (also called `valid` or `validation`) are no classes but hold the parts, where
`train` is among them and there are no others. Rows are in the order of the sorted paths, which are their names. The
images are grey (one channel) where every pixel of every file is grey, and must agree in size unless a size is asked
for: then each is cropped to a square about its centre and resized. Transparency is dropped.

An image has at most `PIL.Image.MAX_IMAGE_PIXELS` pixels, and all together fit the memory of the machine.
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

from .dataset import Dataset, Schema, naming
from .labels import MISSING, class_names, encode

#: What is decoded, whatever a file is called: Pillow would hand PostScript to a program that runs it.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
EIGHT_BIT = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
VALIDATION = ("val", "valid", "validation")


def is_image(path: Path) -> bool:
    """Whether a file is called like an image that can be read."""
    return path.is_file() and path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def parts_of(folder: Path) -> dict[str, Path]:
    """The sub-folders of the parts that there are, of train, validation and test; {} where a folder has no parts."""
    names = [path.name for path in _folders(folder)]
    if "train" not in names or not {*names} <= {"train", "test", *VALIDATION}:
        return {}
    held = [name for name in names if name in VALIDATION]
    if len(held) > 1:
        raise ValueError(f"{folder} must have one sub-folder for validation; got {' and '.join(held)}. Keep one.")
    return {"validation" if name in VALIDATION else name: folder / name for name in names}


def find(folder: Path, *, labels: bool = True) -> tuple[list[Path], list[str]]:
    """The images of a folder (or the one that `folder` is), and the class of each, "" without sub-folders or labels."""
    if folder.is_file():
        return [folder], [MISSING]
    flat, files = _inside(folder, deep=False), {path.name: _inside(path, deep=True) for path in _folders(folder)}
    if not labels:
        flat, files = sorted(chain(flat, *files.values())), {}
    empty = [name for name, inside in files.items() if not inside]
    if flat and any(files.values()):
        raise ValueError(f"{folder} holds {flat[0].name} beside sub-folders of images. Move it into one, or them out.")
    if not flat and (empty or not files):
        where = folder / empty[0] if empty and len(empty) < len(files) else folder
        raise ValueError(f"{where} holds no image ({', '.join(s[1:] for s in SUFFIXES)}). Name a folder that does.")
    if flat:
        return flat, [MISSING] * len(flat)
    return [f for inside in files.values() for f in inside], [name for name, inside in files.items() for _ in inside]


def load(folder: Path, size: int, root: Path) -> Dataset:
    """A folder of images to train on; its sub-folders are its classes. Rows are named by their path below `root`."""
    files, labels = find(folder)
    x = _stack(files, size)
    if bool((x == x[:, :1]).all()):
        x = x[:, :1]
    classes = class_names(labels)
    y = encode(labels, classes, lambda i: str(files[i])) if classes else None
    c, h, w = x.shape[1:]
    with naming(folder):
        schema = Schema((c, h, w), 256, classes=classes)
    return Dataset(torch.from_numpy(np.ascontiguousarray(x)), y, schema, _names(files, root))


def read(folder: Path, schema: Schema, size: int, root: Path, *, labels: bool = True) -> Dataset:
    """A folder of images for a model of this schema; its sub-folders must be classes that it knows, or are ignored."""
    files, found = find(folder, labels=labels)
    x = _stack(files, size)
    c, h, w = schema.shape
    if x.shape[2:] != (h, w):
        raise ValueError(f"{files[0]} is {x.shape[2]} x {x.shape[3]}; the model takes {h} x {w}. Resize the images.")
    if c == 1:
        colour = (x != x[:, :1]).any(axis=(1, 2, 3))
        if colour.any():
            raise ValueError(f"{files[int(colour.argmax())]} is in colour; the model takes grey images. Convert it.")
        x = x[:, :1]
    labelled = schema.classes and any(found)
    y = encode(found, schema.classes, lambda i: str(files[i])) if labelled else None
    return Dataset(torch.from_numpy(np.ascontiguousarray(x)), y, schema, _names(files, root))


def _names(files: Sequence[Path], root: Path) -> tuple[str, ...]:
    base = root if root.is_dir() else root.parent
    return tuple(file.relative_to(base).as_posix() for file in files)


def _folders(folder: Path) -> list[Path]:
    inside = folder.iterdir() if folder.is_dir() else ()
    found = sorted(path for path in inside if path.is_dir() and not path.name.startswith("."))
    for path in found:
        if path.is_symlink() and folder.resolve().is_relative_to(path.resolve()):
            raise ValueError(f"{path} is a link to a folder that it lies in. Remove the link.")
    return found


def _inside(folder: Path, *, deep: bool) -> list[Path]:
    try:
        return sorted(path for path in (folder.rglob("*") if deep else folder.iterdir()) if is_image(path))
    except RecursionError:
        raise ValueError(f"{folder} holds folders in folders, too deep to be read. Move the images up.") from None


def _stack(files: Sequence[Path], size: int) -> NDArray[np.uint8]:
    """All images as (N, 3, H, W)."""
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
    """Bytes of memory of this machine; infinity where it does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # on Windows there is no such call
        return math.inf


def _decode(path: Path, size: int) -> NDArray[np.uint8]:
    """One image as (H, W, 3)."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as opened:
                image = ImageOps.exif_transpose(opened)
                image.load()
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise ValueError(
            f"{path} must have at most {Image.MAX_IMAGE_PIXELS:,} pixels, and has more. Make it smaller."
        ) from None
    except Exception as error:  # the decoders raise what they like at a damaged file
        raise ValueError(f"{path} cannot be read as an image ({type(error).__name__}). Replace or remove it.") from None
    if image.mode not in EIGHT_BIT:
        raise ValueError(f"{path} has pixels of the kind {image.mode}; images must have 8 bits a channel. Convert it.")
    image = image.convert("RGB")
    if size:
        image = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
    return np.asarray(image)
