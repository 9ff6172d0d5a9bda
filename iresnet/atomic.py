"""Atomic file writes: a reader sees the old file or the new one, never a part.

A symbolic link stays one: its target is replaced. A pipe or a device is written to, never replaced. A replaced file
keeps its permissions. The temporary file beside it is created exclusively, under an unpredictable name, and is locked
while it is written; one left behind by a killed process is unlocked, and the next write removes it.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from . import lock


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, which replaces it when the block succeeds and is removed when it fails."""
    path = Path(path)
    with explaining(path):
        if is_special(path):
            yield path
            return
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        with _beside(target) as temporary:
            yield temporary


@contextmanager
def explaining(path: Path) -> Iterator[None]:
    """Turn an error of writing `path` into a sentence."""
    try:
        yield
    except OSError as error:
        if os.path.isdir(path):
            raise OSError(f"cannot write {path}: it is a folder. Name a file in it.") from error
        reason = error.strerror or str(error)
        raise OSError(
            f"cannot write {path}: {reason}. Free disk space or choose another folder; the old file is unchanged."
        ) from error


def write(path: str | Path, content: str | bytes) -> Path:
    """Write text (UTF-8) or bytes to `path` atomically, and wait until they are on disk."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(data)
    return Path(path)


def rename(temporary: Path, path: Path) -> None:
    """Replace `path` by a file that is complete and synced to disk, with the permissions of the old one."""
    target = Path(os.path.realpath(path))
    if target.exists():
        temporary.chmod(stat.S_IMODE(target.stat().st_mode))
    temporary.replace(target)
    _sync_folder(target.parent)


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """Yield a temporary file beside the target; then sync it to disk, rename it to the target, and sync the folder."""
    _sweep(target)
    temporary, descriptor = _reserve(target)
    try:
        yield temporary
        if temporary.stat().st_mtime_ns == 0:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        os.fsync(descriptor)
        if os.name != "posix":  # an open file cannot be renamed
            os.close(descriptor)
        rename(temporary, target)
    finally:
        with suppress(OSError):  # already renamed, or inaccessible, in which case another error is being raised
            temporary.unlink()
        with suppress(OSError):
            os.close(descriptor)


def _reserve(target: Path) -> tuple[Path, int]:
    """Create a locked file under an unpredictable name; private if the target exists, since that may be private."""
    mode = 0o600 if target.exists() else 0o666  # less the umask
    while True:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | lock.FLAGS, mode)
        lock.try_lock(descriptor)
        if lock.is_same_file(temporary, descriptor):  # otherwise another process removed it as a leftover
            os.utime(temporary, ns=(0, 0))  # marks a file that is never written to
            return temporary, descriptor
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk, if the system supports it; the file itself is already synced."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _sweep(target: Path) -> None:
    """Remove the temporary files that killed processes left beside this target: those that nobody has locked."""
    ours = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}")
    with suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if ours.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                _remove_unlocked(Path(entry.path))


def _remove_unlocked(path: Path) -> None:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | lock.FLAGS)
        try:
            if lock.try_lock(descriptor):
                path.unlink()
        finally:
            os.close(descriptor)


def is_special(path: Path) -> bool:
    """Whether the path is something other than a regular file: a pipe, a device, a folder. Inaccessible: absent."""
    return os.path.exists(path) and not os.path.isfile(path)
