"""Compressed files, read up to a known size: gzip files, and archives whose contents are known in advance.

A thousand zeros compress to one byte, so a small file can fill any memory. The files of MNIST and CIFAR have known
sizes: no more than that is decompressed, and nothing is written to disk.
"""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NoReturn, TypeAlias, cast

from ..spelling import first_line, shorten, with_path

Content: TypeAlias = bytes | bytearray

CHUNK = 2**20

#: Limits of an archive: bytes beyond the known files (headers and other files), and the number of files.
EXTRA_BYTES, FILES = 2**20, 1_000


def read_limited(path: Path, most: int) -> Content:
    """Read a file, with gzip if it ends in .gz; raise a `ValueError` if it holds more than `most` bytes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            return _limited(cast(IO[bytes], stream), most)
    except Exception as error:  # gzip and zlib raise many kinds of errors for a damaged file
        _refuse(path, error)


def read_tar_members(path: Path, wanted: Mapping[str, int], whole: int) -> dict[str, Content]:
    """Read files from a .tar.gz by name; `wanted` maps names to the most bytes. Files that are missing are left out.

    The known files of the archive have `whole` bytes in all; raise a `ValueError` if it holds much more.
    """
    found: dict[str, Content] = {}
    try:
        with gzip.open(path) as stream, _archive(stream, whole + EXTRA_BYTES) as archive:
            for i, member in enumerate(archive):
                if i == FILES or member.size < 0:
                    raise ValueError(f"it must hold at most {FILES:,} files, of sizes of at least 0")
                if member.name in found:
                    raise ValueError(f"it holds {shorten(member.name)} twice")
                if member.name in wanted:
                    found[member.name] = _member(archive, member, wanted[member.name])
                if len(found) == len(wanted):
                    break
    except Exception as error:  # and so does tarfile
        _refuse(path, error)
    return found


def _archive(stream: gzip.GzipFile, most: int) -> tarfile.TarFile:
    return tarfile.open(fileobj=cast(IO[bytes], _BoundedStream(stream, most)), mode="r:")


def _member(archive: tarfile.TarFile, member: tarfile.TarInfo, most: int) -> Content:
    file = archive.extractfile(member) if member.isreg() and not member.issparse() else None
    if file is None:
        raise ValueError(f"{member.name} must be a regular file, not a link, folder or device")
    try:
        return _limited(file, most)
    except ValueError as error:
        raise ValueError(f"{member.name}: {error}") from None


def _limited(stream: IO[bytes], most: int) -> Content:
    """Read a stream to its end, a chunk at a time, so that an endless one cannot fill the memory."""
    content = bytearray()
    while block := stream.read(min(CHUNK, most + 1 - len(content))):
        content += block
        if len(content) > most:
            raise ValueError(f"it must hold at most {most:,} bytes, and holds more")
    return content


class _BoundedStream:
    """A stream limited to `most` bytes and to one chunk per read, so that no archive header can be longer."""

    def __init__(self, stream: gzip.GzipFile, most: int) -> None:
        self.stream, self.most = stream, most

    def tell(self) -> int:
        return self.stream.tell()

    def seek(self, position: int) -> int:
        self._check(position)
        return self.stream.seek(position)

    def read(self, size: int) -> bytes:
        if not 0 <= size <= CHUNK:
            raise ValueError("one of its headers is too long")
        self._check(self.tell() + size)
        return self.stream.read(size)

    def _check(self, position: int) -> None:
        if position > self.most:
            raise ValueError(f"it must hold at most {self.most:,} bytes, and holds more")


def _refuse(path: Path, error: Exception) -> NoReturn:
    if isinstance(error, OSError) and error.errno is not None:
        raise with_path(error, path) from None
    if isinstance(error, MemoryError):
        raise error  # the file itself may be fine
    raise ValueError(f"{path} is damaged ({first_line(error)}).") from None
