"""A file of text that is written chunk by chunk, and resumed by the same command if it was interrupted.

The text goes to PATH.part, and PATH.part.json says how much of it is complete and what it was made from. At the end
PATH.part replaces PATH, so PATH is never a part of the result. A pipe or a device is written to as it comes.

Under torchrun, rank r of n writes a part of its own: the parts in the order of their names are the file of one process.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import atomic, lock
from ..data.chunked import ChunkedSource
from ..data.source import STDIN
from ..run import Run
from ..train.distributed import rank, world_size
from .console import Screen


class ResumableFile:
    """A text file that grows by chunks; `identity` says what it is made from.

    `chunks` counts the chunks in it, `totals` sums what the caller counts in each. An error in the data removes it.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], screen: Screen) -> None:
        self.path, self.identity = path, json.loads(json.dumps(identity))
        self.chunks, self.bytes, self.totals = 0, 0, dict[str, int]()
        self.direct = atomic.is_special(path)
        target = Path(os.path.realpath(path))
        self.part, self.note = (target.with_name(target.name + suffix) for suffix in (".part", ".part.json"))
        with atomic.explaining(path):
            if not self.direct:
                target.parent.mkdir(parents=True, exist_ok=True)
            mode = 0o600 if target.exists() else 0o666  # less the umask; that of the old file may be private
            self._file = os.fdopen(os.open(path, os.O_WRONLY) if self.direct else self._acquire(mode), "wb")
        if not self.direct:
            self._restore(screen)
            self._file.truncate(self.bytes)
            self._file.seek(self.bytes)

    def __enter__(self) -> ResumableFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is not None and issubclass(kind, ValueError) and not self.direct:  # of other data, or none
            self.part.unlink(missing_ok=True)
            self.note.unlink(missing_ok=True)

    def append(self, text: str, **counts: int) -> None:
        """Append the text of a chunk, and wait until it is on disk; `counts` are added to the totals."""
        data = text.encode("utf-8")
        self.chunks, self.bytes = self.chunks + 1, self.bytes + len(data)
        self.totals = {name: self.totals.get(name, 0) + count for name, count in counts.items()}
        with atomic.explaining(self.path):
            self._file.write(data)
            self._file.flush()
            if not self.direct:
                os.fsync(self._file.fileno())
        if not self.direct:
            content = {"made_from": self.identity, "chunks": self.chunks, "bytes": self.bytes, "totals": self.totals}
            atomic.write(self.note, json.dumps(content, indent=1) + "\n")

    def finish(self, rest: str = "") -> Path:
        """Append the rest, and replace the old file by the new one."""
        with atomic.explaining(self.path):
            self._file.write(rest.encode("utf-8"))
            self._file.flush()
            if self.direct or os.name != "posix":  # where an open file cannot be renamed
                self._file.close()
            if not self.direct:  # while locked: a process that waits for the lock notices (`_acquire`)
                atomic.rename(self.part, self.path)
                self.note.unlink(missing_ok=True)
            self._file.close()
        return self.path

    def describe(self) -> str:
        """Say, after an interruption, how to go on."""
        if self.direct or not self.chunks:
            return ""
        return f"{self.totals.get('rows', 0):,} rows are done; the same command resumes after them."

    def _acquire(self, mode: int) -> int:
        """Open and lock the part. If another process finished and renamed it in between, create it again."""
        while True:
            descriptor = os.open(self.part, os.O_WRONLY | os.O_CREAT | lock.FLAGS, mode)
            if lock.try_lock(descriptor) is False:
                os.close(descriptor)
                raise ValueError(
                    f"{self.part} is being written by another process. Wait for it, or choose another --out."
                )
            if lock.is_same_file(self.part, descriptor):
                return descriptor
            os.close(descriptor)

    def _restore(self, screen: Screen) -> None:
        """Continue after the last complete chunk of an interrupted command, if it was the same one."""
        if not self.part.stat().st_size or not self.note.is_file():
            return
        try:
            known = json.loads(self.note.read_text(encoding="utf-8"))
            made_from, chunks, size, totals = (known[key] for key in ("made_from", "chunks", "bytes", "totals"))
            if type(chunks) is not int or type(size) is not int or size > self.part.stat().st_size:
                raise ValueError
        except (ValueError, KeyError, TypeError, OSError):
            screen.say(f"{self.part} is damaged; starting anew.")
            return
        if changed := [key for key in self.identity if made_from.get(key) != self.identity[key]]:
            screen.say(f"{self.part} was made from another {changed[0]}; starting anew.")
            return
        self.chunks, self.bytes, self.totals = chunks, size, totals
        screen.say(f"Resuming after {totals.get('rows', 0):,} rows, which are in {self.part}.")


def describe_source(run: Run, source: ChunkedSource) -> dict[str, Any]:
    """Return what scores are made from: the model and the data, which must not change in between."""
    data = describe_file(source.source) if source.is_file or source.source == STDIN else {"samples": source.digest()}
    return {"model": run.sha256(), "data": source.source, "chunk size": source.size} | data


def describe_file(path: str | None) -> dict[str, Any]:
    """Return the size of a file and when it was changed, which tell whether it is the same; no other input is."""
    if path is None:
        return {}
    if path == STDIN:
        return {"standard input": secrets.token_hex(8)}
    found = Path(path).expanduser().stat()
    return {"file size": found.st_size, "file time": found.st_mtime_ns}


def path_of_rank(path: Path) -> Path:
    """Return the path that this process writes: under torchrun a part, numbered from 0, such as a.part-000-of-002.csv.

    >>> path_of_rank(Path("scores.csv")).name
    'scores.csv'
    """
    if world_size() == 1:
        return path
    width = max(3, len(str(world_size())))
    return path.with_name(f"{path.stem}.part-{rank():0{width}}-of-{world_size():0{width}}{path.suffix}")


def describe_parts(path: Path) -> str:
    """Say how to join the parts of several processes; empty for one process."""
    if world_size() == 1 or rank() > 0:
        return ""
    digits = f"{rank():0{max(3, len(str(world_size())))}}"
    pattern = path_of_rank(path).name.replace(f".part-{digits}-", ".part-*-")
    return f"The parts of all {world_size()} processes make one table: cat {path.with_name(pattern)} > {path}"


def share_of_rank(chunks: int | ChunkedSource) -> tuple[int, int | None]:
    """Return the first chunk of this process, and the first that is not its own any more; None: all that there are."""
    r, n = rank(), world_size()
    if n == 1:
        return 0, None
    if isinstance(chunks, ChunkedSource):
        if not chunks.is_file:
            raise ValueError(f"under torchrun, every process reads the data; got {chunks.source!r}. Give a file.")
        chunks = chunks.count()
    return r * chunks // n, (r + 1) * chunks // n if r + 1 < n else None
