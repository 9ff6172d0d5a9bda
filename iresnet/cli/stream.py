"""Standard output that cannot end a command: what is printed may be lost, what is computed and saved is not.

A full disk or a reader that has gone ends the printing, and is said at the end; a terminal that knows no ± gets +/-.
"""

from __future__ import annotations

import codecs
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import typer

#: What stands for a character that a terminal's encoding lacks; any other becomes a question mark.
PLAIN = {"±": "+/-", "≤": "<=", "≥": ">=", "…": "...", "×": "x", "–": "-", "−": "-", "’": "'"}


def plain(error: UnicodeError) -> tuple[str, int]:
    """A handler of encoding errors: characters in plain ASCII."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(c, "?") for c in error.object[error.start : error.end]), error.end


codecs.register_error("iresnet.plain", plain)


class Steady:
    """A stream that is written to until it fails for the first time; `error` says how."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Write, or do as if."""
        if self.error is None:
            try:
                return self.stream.write(text)
            except OSError as error:
                self.error = error
        return len(text)

    def flush(self) -> None:
        """Flush, or do as if."""
        if self.error is None:
            try:
                self.stream.flush()
            except OSError as error:
                self.error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def steady() -> Iterator[None]:
    """Within this context standard output is steady; a failure is said after it, and the exit code is not 0."""
    before, ended = sys.stdout, None
    out = Steady(_tolerant(before))
    sys.stdout = out
    try:
        yield
    except SystemExit as stop:
        ended = stop
    finally:
        out.flush()
        sys.stdout = before
        if before is None:
            out.close()
    if out.error is not None:
        raise SystemExit((ended.code if ended else 0) or _gone(out, out.error))
    if ended is not None:
        raise ended


def _tolerant(stream: TextIO | None) -> TextIO:
    """The stream, with every character printable on it; one that was closed is a hole."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="iresnet.plain")
    return stream


def _gone(out: Steady, error: OSError) -> int:
    """Say that nothing more could be printed, except to a reader that has gone; the exit code."""
    with suppress(OSError, ValueError):  # what is left in the buffer goes nowhere, without another error at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
    if error.errno == errno.EPIPE:
        return 1
    typer.echo(f"iresnet: cannot print: {error.strerror}. What the command saves is saved.", err=True)
    return 2
