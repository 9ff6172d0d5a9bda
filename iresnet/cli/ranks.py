"""A command that `torchrun` starts several times: rank 0 prints, the others only what they alone have to say."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress

from ..spelling import printable
from ..train.distributed import LostProcess, is_main, rank
from ..train.guard import TrainingError

#: How long a process that failed waits, in seconds, before it says why. If rank 0 fails as well, for the same reason,
#: torchrun ends this process meanwhile. Without the wait, torchrun might end rank 0 before its message is printed.
GRACE = 5.0

#: Errors that rank 0 reports, as they are raised by all processes or caused by another one.
REPORTED_BY_MAIN = (TrainingError, LostProcess)


@contextmanager
def one_voice() -> Iterator[None]:
    """Silence every process but rank 0; one that fails alone prints its error, with its rank."""
    if is_main():
        yield
        return
    said, stderr = io.StringIO(), sys.stderr
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(said):
            yield
    except SystemExit as end:
        if end.code:
            with suppress(KeyboardInterrupt):
                time.sleep(GRACE)
                for line in said.getvalue().splitlines():
                    print(f"rank {rank()}: {printable(line)}", file=stderr)
        raise


def reports(error: Exception) -> bool:
    """Whether this process reports an error."""
    return is_main() or not isinstance(error, REPORTED_BY_MAIN)
