"""Arrays in NPY and NPZ files, checked by their headers before they are read. Nothing is unpickled.

An NPZ file is a zip archive of NPY files, and a thousand zeros compress to one byte. An array of more than `FREE` bytes
is unpacked only if it is at most `RATIO` times as large as in the file. `numpy.savez` does not compress, so its files
have no limit.
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


def load_arrays(path: Path, choose: Callable[[list[str]], Iterable[str]]) -> dict[str, Array]:
    """Load the arrays whose names `choose` picks from those in the file. The array of an NPY file is called x."""
    try:
        with path.open("rb") as file:
            if _begins(file, b"PK"):
                with zipfile.ZipFile(file) as archive:
                    members = _members(archive)
                    return {name: _read_member(archive, members[name], path) for name in choose([*members])}
            return {name: _read_npy(file, path) for name in choose(["x"])}
    except Exception as error:  # zipfile, zlib and numpy raise many kinds of errors for a damaged file
        raise ValueError(f"{path} cannot be read as an array ({first_line(error)}). Save it again.") from None


class ArrayFile:
    """The array of an NPY file, of which some rows are read at a time; nothing else is kept in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.shape, self.fortran, self.dtype = _check_header(file, path.stat().st_size)
                self._offset = file.tell()
        except Exception as error:
            raise ValueError(f"{path} cannot be read as an array ({first_line(error)}). Save it again.") from None

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, start: int, stop: int) -> Array:
        """Read the rows start, ..., stop - 1."""
        stop = min(stop, len(self))
        shape, width = (stop - start, *self.shape[1:]), math.prod(self.shape[1:])
        with self.path.open("rb") as file:
            if not self.fortran:
                return self._numbers(file, start * width, shape)
            columns = [self._numbers(file, k * len(self) + start, shape[:1]) for k in range(width)]
        return np.stack(columns, axis=1).reshape(shape, order="F")

    def _numbers(self, file: IO[bytes], first: int, shape: tuple[int, ...]) -> Array:
        file.seek(self._offset + first * self.dtype.itemsize)
        return np.fromfile(file, self.dtype, math.prod(shape)).reshape(shape)


def load_array(path: Path) -> Array:
    """Load the array of an NPY file."""
    try:
        with path.open("rb") as file:
            return _read_npy(file, path)
    except Exception as error:
        raise ValueError(f"{path} must be a .npy file with an array of numbers ({first_line(error)}).") from None


def save_npz(path: Path, **arrays: Any) -> Path:
    """Write arrays to a compressed NPZ file, atomically."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return atomic.write(path, buffer.getvalue())


def save_npz_chunks(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], chunks: Iterable[Array]) -> Path:
    """Write the array x of an NPZ file, compressed, chunk by chunk, and atomically."""
    with (
        atomic.replacing(path) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("x.npy", "w", force_zip64=True) as stream,
    ):
        header = {"shape": shape, "fortran_order": False, "descr": npy.dtype_to_descr(dtype)}
        npy.write_array_header_1_0(stream, header)
        for chunk in chunks:
            stream.write(np.ascontiguousarray(chunk, dtype=dtype).data)
    return path


def is_overpacked(size: int, packed: int) -> bool:
    """Whether `packed` bytes of a file unpack to more than the limit: `FREE` bytes, or `RATIO` times as many."""
    return size > max(FREE, RATIO * packed)


def _read_npy(file: IO[bytes], path: Path) -> Array:
    _check_header(file, path.stat().st_size)
    file.seek(0)
    array: Array = npy.read_array(file, allow_pickle=False)
    return array


def is_archive(path: Path) -> bool:
    """Whether a file is an NPZ file, whatever it is called."""
    with path.open("rb") as file:
        return _begins(file, b"PK")


def _begins(file: IO[bytes], mark: bytes) -> bool:
    found = file.read(len(mark)) == mark
    file.seek(0)
    return found


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The NPY files of an archive; other files are ignored."""
    members: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        if info.filename.endswith(".npy"):
            name = info.filename.removesuffix(".npy")
            if name in members:
                raise ValueError(f"it holds {shorten(name)} twice")
            members[name] = info
    return members


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> Array:
    size, packed = info.file_size, min(info.compress_size, path.stat().st_size)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{shorten(info.filename)} has a compression that numpy does not write")
    if is_overpacked(size, packed):
        raise ValueError(
            f"{shorten(info.filename)} unpacks from {packed:,} to {size:,} bytes; above {FREE:,} bytes it may unpack "
            f"to {RATIO} times its size. Use numpy.savez, which does not compress"
        )
    with archive.open(info) as stream:
        _check_header(stream, size)
    with archive.open(info) as stream:
        array: Array = npy.read_array(stream, allow_pickle=False)
    return array


def _check_header(stream: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape, whether it is stored column by column, and the type that a header says.

    Refuse one that does not match the size of the stream, or an array of anything but numbers and text.
    """
    if not size:
        raise ValueError("No data left in file")
    version = npy.read_magic(stream)
    if version not in HEADERS:
        raise ValueError(f"it has version {version[0]} of the format, for structured arrays")
    shape, fortran, dtype = HEADERS[version](stream)
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded without unpickling them")
    needed, held = math.prod(shape) * dtype.itemsize, size - stream.tell()
    if dtype.names or dtype.subdtype or any(n < 0 for n in shape):
        raise ValueError(f"it must hold an array of numbers or text; got {shorten(str(dtype))} {shorten(str(shape))}")
    if needed != held:
        raise ValueError(f"its header says {shorten(str(shape))} {dtype}, {needed:,} bytes; it holds {held:,}")
    return shape, fortran, dtype
