"""Packed files, read no further than what they may hold: gzip files and archives whose contents are known in advance.

A thousand zeros pack into one byte, so that a small file can fill any memory. The files of MNIST and CIFAR have known
sizes: no more than these is unpacked, and nothing is written to the disk.
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

#: Of an archive, beside the files that are known: bytes of headers and other files, and how many files there may be.
BESIDE, FILES = 2**20, 1_000


def read(path: Path, most: int) -> Content:
    """What a file holds, packed by gzip if it is called .gz; a `ValueError` if that is more than `most` bytes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            return _limited(cast(IO[bytes], stream), most)
    except Exception as error:  # gzip and zlib raise what they like at a damaged file
        _refuse(path, error)


def members(path: Path, wanted: Mapping[str, int], whole: int) -> dict[str, Content]:
    """Those of the wanted files that a .tar.gz holds, by name; `wanted` says how large each may be.

    The known files of the archive have `whole` bytes; a `ValueError` if it holds much more.
    """
    found: dict[str, Content] = {}
    try:
        with gzip.open(path) as stream, _archive(stream, whole + BESIDE) as archive:
            for i, member in enumerate(archive):
                if i == FILES or member.size < 0:
                    raise ValueError(f"it must hold at most {FILES:,} files of sizes from 0 on")
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
    return tarfile.open(fileobj=cast(IO[bytes], _Steps(stream, most)), mode="r:")


def _member(archive: tarfile.TarFile, member: tarfile.TarInfo, most: int) -> Content:
    file = archive.extractfile(member) if member.isreg() and not member.issparse() else None
    if file is None:
        raise ValueError(f"{member.name} must be a plain file, no link, folder or device")
    try:
        return _limited(file, most)
    except ValueError as error:
        raise ValueError(f"{member.name}: {error}") from None


def _limited(stream: IO[bytes], most: int) -> Content:
    """All of a stream, a chunk at a time, so that one without an end fills no memory."""
    content = bytearray()
    while block := stream.read(min(CHUNK, most + 1 - len(content))):
        content += block
        if len(content) > most:
            raise ValueError(f"it must hold at most {most:,} bytes, and holds more")
    return content


class _Steps:
    """A stream that ends after `most` bytes and gives a chunk at a time: no header of an archive may be longer."""

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
        raise error  # nothing is wrong with what it holds
    raise ValueError(f"{path} is damaged ({first_line(error)}).") from None
