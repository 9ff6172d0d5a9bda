"""File locks by the operating system: one holder at a time; a killed process releases its locks.

On a system or file system without locks, nothing is locked.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: The lock file in a locked folder. It is removed with the lock; one left behind by a killed process has no effect.
NAME = "lock"

#: Error codes that mean another process holds the lock; any other code means that locks are not supported.
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK)

#: Symbolic links are not followed, in case someone planted one.
FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW if os.name == "posix" else 0


def try_lock(descriptor: int) -> bool | None:
    """Try to lock an open file until it is closed. Return whether it succeeded, or None if locks are not supported."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
    except ImportError:
        return None
    except OSError as error:
        return False if error.errno in HELD else None
    return True


@contextmanager
def lock_folder(folder: str | Path) -> Iterator[None]:
    """Lock a folder while this process writes to it; raise if another process holds the lock."""
    path = Path(folder) / NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(path)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}. Choose another folder.") from error
    try:
        yield
    finally:
        if is_same_file(path, descriptor):
            with suppress(OSError):
                path.unlink()  # while held: a process that opened it meanwhile notices (`_acquire`) and tries again
        os.close(descriptor)


def _acquire(path: Path) -> int:
    """Open and lock the lock file. If its last holder removed it in between, create it again."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | FLAGS, 0o666)
        if try_lock(descriptor) is False:
            os.close(descriptor)
            raise ValueError(
                f"{path.parent} is in use: another process is training or tightening this run. Wait until it ends, or "
                "choose another folder."
            )
        if is_same_file(path, descriptor):
            return descriptor
        os.close(descriptor)


def is_same_file(path: Path, descriptor: int) -> bool:
    """Whether an open file is still the one at this path."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except OSError:
        return False
