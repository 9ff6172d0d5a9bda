"""Locks on files by the operating system: one holder at a time, and a process that is killed holds none any more.

Where a system or a file system has no locks, everything goes on without them.
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

#: The file in a folder that its holder locks; it is removed with the lock, and one that is left behind means nothing.
NAME = "lock"

#: What a system answers where another holds the lock; any other answer says that there are no locks.
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK)

#: A link that someone prepared is not followed.
FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW if os.name == "posix" else 0


def try_lock(descriptor: int) -> bool | None:
    """Lock an open file until it is closed: whether that was possible, or None where there are no locks."""
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
    """Keep a folder for this process while it writes there; a second one is refused, by a sentence."""
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
                path.unlink()  # while it is held: who opened it meanwhile finds another file, or none, and tries again
        os.close(descriptor)


def _acquire(path: Path) -> int:
    """The lock file, open and held. One that its last holder removed in between is made anew."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | FLAGS, 0o666)
        if try_lock(descriptor) is False:
            os.close(descriptor)
            raise ValueError(
                f"{path.parent} is in use: another process trains or tightens the run there. Wait until it ends, or "
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
