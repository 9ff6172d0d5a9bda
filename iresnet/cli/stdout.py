"""Standard output whose failure does not end a command: printed text may be lost, computed and saved results are not.

If the disk is full or the reader has closed the pipe, printing stops, and the failure is reported at the end. A
terminal whose encoding lacks ± gets +/-.
"""

from __future__ import annotations

import codecs
import errno
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import typer

from ..spelling import printable

#: Replacements for characters that a terminal's encoding lacks; any other becomes a question mark.
PLAIN = {"±": "+/-", "≤": "<=", "≥": ">=", "…": "...", "×": "x", "–": "-", "−": "-", "’": "'"}


def to_ascii(error: UnicodeError) -> tuple[str, int]:
    """Handle encoding errors by replacing characters with plain ASCII."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(c, "?") for c in error.object[error.start : error.end]), error.end


codecs.register_error("iresnet.plain", to_ascii)


class Steady:
    """A stream that ignores writes after its first failure, which `error` holds."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Write, unless the stream has failed."""
        if self.error is None:
            try:
                return self.stream.write(text)
            except OSError as error:
                self.error = error
        return len(text)

    def flush(self) -> None:
        """Flush, unless the stream has failed."""
        if self.error is None:
            try:
                self.stream.flush()
            except OSError as error:
                self.error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def steady() -> Iterator[None]:
    """Make standard output `Steady` within this context; report a failure after it, with an exit code other than 0."""
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
        raise SystemExit((ended.code if ended else 0) or _report_failure(out, out.error))
    if ended is not None:
        raise ended


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print a warning in this context as a sentence, like an error, without the line of code that it came from."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_: f"iresnet: {printable(str(message))}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


def _tolerant(stream: TextIO | None) -> TextIO:
    """Return the stream, able to print every character; a closed one is replaced by the null device."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="iresnet.plain")
    return stream


def _report_failure(out: Steady, error: OSError) -> int:
    """Report that printing failed, unless the reader closed the pipe; return the exit code."""
    with suppress(OSError, ValueError):  # discard what is left in the buffer, so that closing it raises no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
    if error.errno == errno.EPIPE:
        return 1
    typer.echo(f"iresnet: cannot print: {error.strerror}. Saved files are complete.", err=True)
    return 2
