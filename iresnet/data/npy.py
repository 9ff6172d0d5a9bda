"""Arrays in NPY and NPZ files, read no further than their headers say. Nothing is unpickled.

An NPZ file is a zip archive of NPY files, and a thousand zeros pack into one byte. An array of more than `FREE` bytes
is unpacked only if it takes up at least a `RATIO`-th of that in the file; what `numpy.savez` writes is not packed at
all, and has no limit.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from .. import atomic
from ..spelling import first_line, shorten

Array: TypeAlias = NDArray[Any]

FREE, RATIO = 2**26, 100

HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def load(path: Path, choose: Callable[[list[str]], Iterable[str]]) -> dict[str, Array]:
    """Those arrays of a file that `choose` picks from their names, by name. In an NPY file the only one is called x."""
    try:
        with path.open("rb") as file:
            if _begins(file, b"PK"):
                with zipfile.ZipFile(file) as archive:
                    found = _members(archive)
                    return {name: _unpack(archive, found[name], path) for name in choose([*found])}
            return {name: _whole(file, path) for name in choose(["x"])}
    except Exception as error:  # zipfile, zlib and numpy raise what they like at a damaged file
        raise ValueError(f"{path} cannot be read as an array ({first_line(error)}). Save it anew.") from None


def load_one(path: Path) -> Array:
    """The array of an NPY file."""
    try:
        with path.open("rb") as file:
            return _whole(file, path)
    except Exception as error:
        raise ValueError(f"{path} is no .npy array of numbers ({first_line(error)}).") from None


def save(path: Path, **arrays: Any) -> Path:
    """Write arrays as an NPZ file, packed, whole or not at all."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return atomic.write(path, buffer.getvalue())


def _whole(file: IO[bytes], path: Path) -> Array:
    _check(file, path.stat().st_size)
    file.seek(0)
    array: Array = npy.read_array(file, allow_pickle=False)
    return array


def _begins(file: IO[bytes], mark: bytes) -> bool:
    found = file.read(len(mark)) == mark
    file.seek(0)
    return found


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The arrays of an archive; what else lies in it is not looked at."""
    found: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        if info.filename.endswith(".npy"):
            name = info.filename.removesuffix(".npy")
            if name in found:
                raise ValueError(f"it holds {shorten(name)} twice")
            found[name] = info
    return found


def _unpack(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> Array:
    size, packed = info.file_size, min(info.compress_size, path.stat().st_size)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{shorten(info.filename)} is not packed as numpy does it")
    if size > max(FREE, RATIO * packed):
        raise ValueError(
            f"{shorten(info.filename)} unpacks from {packed:,} to {size:,} bytes; above {FREE:,} it may grow {RATIO} "
            "times. numpy.savez does not pack it"
        )
    with archive.open(info) as stream:
        _check(stream, size)
    with archive.open(info) as stream:
        array: Array = npy.read_array(stream, allow_pickle=False)
    return array


def _check(stream: IO[bytes], size: int) -> None:
    """Refuse a header that says anything else than the size of the stream, or more than numbers and text."""
    if not size:
        raise ValueError("No data left in file")
    version = npy.read_magic(stream)
    if version not in HEADERS:
        raise ValueError(f"it has version {version[0]} of the format, for arrays with names")
    shape, _, dtype = HEADERS[version](stream)
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded without unpickling them")
    needed, held = math.prod(shape) * dtype.itemsize, size - stream.tell()
    if dtype.names or dtype.subdtype or any(n < 0 for n in shape):
        raise ValueError(f"it must hold numbers or text, of a shape; got {shorten(str(dtype))} {shorten(str(shape))}")
    if needed != held:
        raise ValueError(f"its header says {shorten(str(shape))} {dtype}, {needed:,} bytes; it holds {held:,}")
