"""Files that are written whole or not at all: a reader sees the old one or the new one, never a part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`, which takes its place when the block ends well and vanishes when it does not."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            f"cannot write {path}: {reason}. Make room or choose another folder; what was there is untouched."
        ) from error
    finally:
        with suppress(OSError):  # where it cannot even be looked for, the error above says why
            temporary.unlink()


def write(path: str | Path, content: str | bytes) -> Path:
    """Write text (UTF-8) or bytes to `path`, and wait until they are on the disk."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Path(path)
