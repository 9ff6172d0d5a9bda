"""Commands in processes that are meant to die: forked, each in milliseconds, from one that has imported the library.

    python -m attack.nursery

reads an order a line on stdin and answers each with a line: {"start": [words of a command], ...} with the number of
the process, {"wait": number, "seconds": s} with its exit code, or null where it is still running after that time.
`Nursery` is the other end. What may befall a command, `Fault`, is in `attack.faults`.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .faults import Fault, befall

#: What commands import late is imported once, before they are forked.
PRELOADED = (
    "iresnet.cli", "matplotlib.backends.backend_agg", "PIL.Image", "sklearn.datasets", "sklearn.model_selection",
    "torch._dynamo", "torch.utils.tensorboard",
)  # fmt: skip

#: The exit code of a command that hung and was killed.
HUNG = 1000


class Ended(NamedTuple):
    """How a command ended: its exit code (a signal's is negative) and what it printed."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Child:
    """A command that runs: its process, and the file that it prints to (its errors go beside it)."""

    nursery: Nursery
    number: int
    printed: Path

    def signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.number, number)

    def wait(self, seconds: float = 60.0) -> Ended:
        """Wait until it has ended; one that hangs is killed."""
        code = self.nursery.order(wait=self.number, seconds=seconds)
        if code is None:
            self.signal(9)
            self.nursery.order(wait=self.number, seconds=seconds)
            code = HUNG
        texts = [p.read_bytes().decode(errors="replace") for p in (self.printed, self.printed.with_suffix(".err"))]
        return Ended(int(code), *texts)


class Nursery:
    """The process from which commands are forked."""

    def __init__(self) -> None:
        words = [sys.executable, "-m", "attack.nursery"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "120"}
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        atexit.register(self.close)

    def order(self, **what: Any) -> Any:
        """Send an order and return the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, *words: str | Path, folder: Path, fault: Fault | None = None) -> Child:
        """Start `iresnet WORDS` with `folder`, in which it prints to files, as its working directory."""
        printed = folder / f".printed-{time.monotonic_ns()}.out"
        for path in (printed, printed.with_suffix(".err")):  # also where the process is killed before it opens them
            path.touch()
        number = self.order(start=[str(w) for w in words], printed=str(printed), fault=asdict(fault or Fault()))
        return Child(self, int(number), printed)

    def call(self, *words: str | Path, folder: Path, fault: Fault | None = None, seconds: float = 60.0) -> Ended:
        """Run `iresnet WORDS` to its end."""
        child = self.start(*words, folder=folder, fault=fault)
        ended = child.wait(seconds)
        for path in (child.printed, child.printed.with_suffix(".err")):
            path.unlink()
        return ended

    def close(self) -> None:
        """End the process; commands that still run are not its own to end."""
        self.process.kill()
        self.process.communicate()


@cache
def nursery() -> Nursery:
    """The nursery of this process."""
    return Nursery()


# ---------------------------------------------------------------------------------------------------- the other process


def _serve() -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    for line in sys.stdin:
        order = json.loads(line)
        answer = _start(order) if "start" in order else _wait(order["wait"], order["seconds"])
        print(json.dumps(answer), flush=True)


def _wait(number: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(number, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def _start(order: dict[str, Any]) -> int:
    number = os.fork()
    if not number:
        _live(order)
    return number


def _live(order: dict[str, Any]) -> None:
    """What a forked process does: the command, and its fate. It never returns."""
    code = 70
    try:
        printed = Path(order["printed"])
        for stream, path in ((0, Path(os.devnull)), (1, printed), (2, printed.with_suffix(".err"))):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), stream)
        os.chdir(printed.parent)
        code = befall(Fault(**order["fault"]), order["start"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for file in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                file.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
