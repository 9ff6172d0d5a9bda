"""Limit the time and the additional memory of one case in this process.

Time is CPU time, since other processes may use the machine too; the wall-clock limit is several times larger.
"""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from . import Violation

MIB = 2**20

#: Wall-clock seconds per second of CPU time.
WALL_CLOCK_FACTOR = 4


class Hang(BaseException):
    """A case took too long. A BaseException, so that no `except Exception` in the code under attack catches it."""


@contextlib.contextmanager
def limited(seconds: float = 10.0, memory: int = 256 * MIB) -> Iterator[None]:
    """Raise `Violation` if the body exceeds its time or memory; allocations far beyond the limit fail."""
    before = _reset_peak()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + 8 * memory, hard))
    earlier = {number: signal.signal(number, _too_long) for number in (signal.SIGALRM, signal.SIGPROF)}
    signal.setitimer(signal.ITIMER_REAL, WALL_CLOCK_FACTOR * seconds)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    except Hang as hang:
        raise Violation(f"it hangs: more than {seconds:g} s {hang}") from None
    finally:
        for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        for number, handler in earlier.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    grown = _status("VmHWM") - before
    if grown > memory:
        raise Violation(f"it takes {grown / MIB:.0f} MiB")


def _too_long(number: int, frame: FrameType | None) -> None:
    what = "of work" if number == signal.SIGPROF else "of waiting"
    where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "nowhere"
    raise Hang(f"{what} in {where}")


def _reset_peak() -> int:
    """Reset the peak memory of this process; return the memory in use, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    """A memory size of this process from /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
