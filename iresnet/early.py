"""Ctrl-C while the command is still being imported, which takes seconds: an end without a word, as nothing has begun.

The package imports this file before any other, and this file next to nothing, since an exception within torch's imports
may become any other. It does nothing where the package is used as a library, and nothing where Ctrl-C is ignored or
handled by someone else.
"""

from __future__ import annotations

import os
import signal
import sys

#: What a shell expects of a command that was interrupted.
INTERRUPTED = 130


def exit_silently(number: int, frame: object) -> None:
    """End the process at once; nothing was written, and nothing is to be said."""
    os._exit(INTERRUPTED)


def is_command() -> bool:
    """Whether this process is `iresnet` or `python -m iresnet`; in the latter argv[0] is "-m" until it is found."""
    program = sys.argv[0] if sys.argv else ""
    name = os.path.basename(program).removesuffix(".exe")
    return name == "iresnet" or (program == "-m" and sys.orig_argv[1:3] == ["-m", "iresnet"])


def install() -> None:
    """Let Ctrl-C end the process in silence, if it is the command."""
    if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        try:
            signal.signal(signal.SIGINT, exit_silently)
        except ValueError:  # imported by another thread than the main one
            return


def restore() -> None:
    """Let Ctrl-C be what it is in Python, once everything is imported."""
    if signal.getsignal(signal.SIGINT) is exit_silently:
        signal.signal(signal.SIGINT, signal.default_int_handler)


install()
