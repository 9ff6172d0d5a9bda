"""Files that are written whole or not at all: a reader sees the old one or the new one, never a part.

A link stays a link: what it points to is replaced. A pipe or a device is written to and never replaced. A file that is
replaced keeps its permissions. The temporary file beside it is made exclusively, under a name that cannot be foreseen,
and is locked while it is written: what a killed process left behind is not, and goes with the next write.
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
    """A temporary path beside `path`, which takes its place when the block ends well and vanishes when it does not."""
    path = Path(path)
    try:
        if _is_special(path):
            yield path
            return
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        with _beside(target) as temporary:
            yield temporary
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            f"cannot write {path}: {reason}. Make room or choose another folder; what was there is untouched."
        ) from error


def write(path: str | Path, content: str | bytes) -> Path:
    """Write text (UTF-8) or bytes to `path`, and wait until they are on the disk."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(data)
    return Path(path)


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A temporary file beside the target: on the disk first, then in its place, and then the folder on the disk."""
    _sweep(target)
    temporary, descriptor = _reserve(target)
    try:
        yield temporary
        if temporary.stat().st_mtime_ns == 0:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        os.fsync(descriptor)
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        if os.name != "posix":  # there an open file cannot be renamed
            os.close(descriptor)
        temporary.replace(target)
        _sync_folder(target.parent)
    finally:
        with suppress(OSError):  # it took the target's place, or cannot even be looked for: an error says why
            temporary.unlink()
        with suppress(OSError):
            os.close(descriptor)


def _reserve(target: Path) -> tuple[Path, int]:
    """A new file under a name that cannot be foreseen, locked; private where the target may be."""
    mode = 0o600 if target.exists() else 0o666  # less the umask
    while True:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | lock.FLAGS, mode)
        lock.try_lock(descriptor)
        if lock.is_same_file(temporary, descriptor):  # else another process took it for one that was left behind
            os.utime(temporary, ns=(0, 0))  # a file that is never written to is known by this time
            return temporary, descriptor
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where a system can wait for that: the file itself is."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _sweep(target: Path) -> None:
    """Remove what killed processes left of writes to this target: files of our naming that nobody has locked."""
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


def _is_special(path: Path) -> bool:
    """Whether something is there that is no file: a pipe, a device, a folder. What cannot be looked at is not there."""
    return os.path.exists(path) and not os.path.isfile(path)
