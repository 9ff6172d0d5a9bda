"""Inject faults at the n-th write of a command: a kill before, after or during it, a full disk, a folder that moves.

A write is any change of the folder: a file opened for writing, a rename, a removal, a new folder, an fsync. Python
reports most of them to audit hooks before they happen; fsync is wrapped. The library itself is not patched.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Audit events whose first argument is the path that changes.
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod")

#: Errors of a full disk, on which files can still be removed.
FULL = ("ENOSPC", "EDQUOT")

#: The exit code of a command that writes outside the folder it is confined to.
OUTSIDE = 71


@dataclass(frozen=True)
class Fault:
    """A fault to inject into a command.

    `what` is "" (nothing), kill, deny (every write from then on fails with `error`), move (the folder is renamed) or
    confine (a write outside `folder` ends the process, and there is no network). It happens at write number `at` in
    `folder`. `largest` limits the size of a file: exceeding it kills the process if `what` is kill, and fails if it is
    deny. `memory` limits the address space in bytes, `seconds` the CPU time.
    """

    what: str = ""
    at: int = 0
    folder: str = ""
    error: str = "ENOSPC"
    largest: int = 0
    memory: int = 0
    seconds: int = 0


def run_with_fault(fault: Fault, words: list[str]) -> int:
    """Run the command with its fault; return the exit code. The number of writes goes to FOLDER.writes."""
    from iresnet import cli

    if fault.largest:
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.largest, fault.largest))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if fault.what == "kill" else signal.SIG_IGN)
    if fault.memory:
        resource.setrlimit(resource.RLIMIT_AS, (fault.memory, fault.memory))
    if fault.seconds:
        resource.setrlimit(resource.RLIMIT_CPU, (fault.seconds, fault.seconds))
    if fault.what == "confine":
        tempfile.tempdir = os.environ["TORCHINDUCTOR_CACHE_DIR"] = fault.folder
    writes = Writes(fault) if fault.folder else None
    if writes is not None:
        sys.addaudithook(writes.audit_hook)
        os.fsync = writes.wrap(os.fsync)  # type: ignore[assignment]
    try:
        cli.main(words)
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    finally:
        if writes is not None and fault.what == "":
            writes.count, count = -(10**9), writes.count
            Path(f"{fault.folder}.writes").write_text(str(count))
    return 0


class Writes:
    """Counts the writes to the folder, and injects the fault."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.count = fault, 0
        self.folder = os.path.realpath(fault.folder)

    def audit_hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """The audit hook."""
        if self.fault.what == "confine" and event in ("socket.getaddrinfo", "socket.connect"):
            raise OSError(errno.ENETUNREACH, "the network is unreachable")
        allowed = self.fault.what == "deny" and self.fault.error in FULL and event == "os.remove"
        opened = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if opened or (event in CHANGES and not allowed):
            self.count_write(arguments[0])

    def wrap(self, function: Callable[[int], None]) -> Callable[[int], None]:
        """Wrap a function of a file descriptor so that it counts one write before and one after."""

        def wrapped(file: int) -> None:
            path = os.readlink(f"/proc/self/fd/{file}")
            self.count_write(path)
            function(file)
            self.count_write(path)

        return wrapped

    def count_write(self, path: object) -> None:
        """Count one write, and inject the fault if it is due."""
        inside = self._inside(path)
        if self.fault.what == "confine" and inside is False:
            os.write(2, f"\nwrites to {path!r}\n".encode())
            os._exit(OUTSIDE)
        if not inside:
            return
        self.count += 1
        if self.fault.what == "deny" and self.count >= self.fault.at > 0:
            number = getattr(errno, self.fault.error)
            raise OSError(number, os.strerror(number), os.fspath(path))  # type: ignore[call-overload]
        if self.count == self.fault.at and self.fault.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.count == self.fault.at and self.fault.what == "move":
            self.count += 1  # the rename below is not one of the command's writes
            os.rename(self.folder, f"{self.folder}.moved")

    def _inside(self, path: object) -> bool | None:
        """Whether a path lies in the folder; None for a descriptor or a device."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        found = os.path.realpath(os.fsdecode(path))
        if found.startswith(("/proc/", "pipe:", "socket:")) or (os.path.exists(found) and not _is_plain(found)):
            return None
        return found == self.folder or found.startswith(self.folder + os.sep)


def _is_plain(path: str) -> bool:
    """Whether a path is a file or a folder, not a device."""
    return os.path.isfile(path) or os.path.isdir(path)
