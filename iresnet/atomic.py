"""Files that are written whole or not at all: a reader sees the old one or the new one, never a part.

A link stays a link: what it points to is replaced. A pipe or a device is written to and never replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`, which takes its place when the block ends well and vanishes when it does not."""
    path = Path(path)
    direct = _is_special(path)
    target = path if direct else Path(os.path.realpath(path))
    temporary = path if direct else target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if not direct:
            temporary.replace(target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            f"cannot write {path}: {reason}. Make room or choose another folder; what was there is untouched."
        ) from error
    finally:
        if not direct:
            with suppress(OSError):  # where it cannot even be looked for, the error above says why
                temporary.unlink()


def write(path: str | Path, content: str | bytes) -> Path:
    """Write text (UTF-8) or bytes to `path`, and wait until they are on the disk."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(data)
        file.flush()
        if not _is_special(temporary):  # a pipe has no disk to wait for
            os.fsync(file.fileno())
    return Path(path)


def _is_special(path: Path) -> bool:
    """Whether something is there that is no file: a pipe, a device, a folder. What cannot be looked at is not there."""
    return os.path.exists(path) and not os.path.isfile(path)
