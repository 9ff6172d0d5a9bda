"""Run commands in processes that may be killed, forked in milliseconds from one that has imported the library.

    python -m attack.forkserver

reads one request per line from stdin and answers each with a line: {"start": [words of a command], ...} with the
process id, {"wait": process id, "seconds": s} with the exit code, or null if the process still runs after that time.
`ForkServer` is the client. The faults that a command may suffer are in `attack.faults`.
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

from .faults import Fault, run_with_fault

#: Modules that commands import lazily; they are imported once, before any fork.
PRELOADED = (
    "iresnet.cli", "matplotlib.backends.backend_agg", "PIL.Image", "sklearn.datasets", "sklearn.model_selection",
    "torch._dynamo", "torch.utils.tensorboard",
)  # fmt: skip

#: The exit code of a command that hung and was killed.
HUNG = 1000


class Completed(NamedTuple):
    """A completed command: its exit code (negative for a signal) and its output."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Child:
    """A running command: its process id, and the file of its output (errors go to a second file beside it)."""

    server: ForkServer
    number: int
    printed: Path

    def signal(self, number: int) -> None:
        """Send a signal, if the process still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.number, number)

    def wait(self, seconds: float = 60.0) -> Completed:
        """Wait for the process to end; kill it if it hangs."""
        code = self.server.request(wait=self.number, seconds=seconds)
        if code is None:
            self.signal(9)
            self.server.request(wait=self.number, seconds=seconds)
            code = HUNG
        texts = [p.read_bytes().decode(errors="replace") for p in (self.printed, self.printed.with_suffix(".err"))]
        return Completed(int(code), *texts)


class ForkServer:
    """The process from which commands are forked."""

    def __init__(self) -> None:
        words = [sys.executable, "-m", "attack.forkserver"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "120"}
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        atexit.register(self.close)

    def request(self, **what: Any) -> Any:
        """Send a request and return the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, *words: str | Path, folder: Path, fault: Fault | None = None) -> Child:
        """Start `iresnet WORDS` in `folder`, with its output redirected to files there."""
        printed = folder / f".printed-{time.monotonic_ns()}.out"
        for path in (
            printed,
            printed.with_suffix(".err"),
        ):  # they must exist even if the process is killed before it opens them
            path.touch()
        number = self.request(start=[str(w) for w in words], printed=str(printed), fault=asdict(fault or Fault()))
        return Child(self, int(number), printed)

    def call(self, *words: str | Path, folder: Path, fault: Fault | None = None, seconds: float = 60.0) -> Completed:
        """Run `iresnet WORDS` and wait for it to end."""
        child = self.start(*words, folder=folder, fault=fault)
        ended = child.wait(seconds)
        for path in (child.printed, child.printed.with_suffix(".err")):
            path.unlink()
        return ended

    def close(self) -> None:
        """End the server; commands that still run are not ended."""
        self.process.kill()
        self.process.communicate()


@cache
def fork_server() -> ForkServer:
    """The fork server of this process, started on first use."""
    return ForkServer()


# ------------------------------------------------------------------------------------------------------- the server


def _serve() -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        answer = _start(request) if "start" in request else _wait(request["wait"], request["seconds"])
        print(json.dumps(answer), flush=True)


def _wait(number: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(number, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def _start(request: dict[str, Any]) -> int:
    number = os.fork()
    if not number:
        _run_child(request)
    return number


def _run_child(request: dict[str, Any]) -> None:
    """Run the command with its fault in the forked process, then exit."""
    code = 70
    try:
        printed = Path(request["printed"])
        for stream, path in ((0, Path(os.devnull)), (1, printed), (2, printed.with_suffix(".err"))):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), stream)
        os.chdir(printed.parent)
        code = run_with_fault(Fault(**request["fault"]), request["start"])
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
