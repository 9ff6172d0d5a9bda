"""Ctrl-C while the command is still being imported, which takes seconds: exit silently, since nothing has started.

The package imports this file first, and this file imports almost nothing: a KeyboardInterrupt inside torch's imports
may turn into any other exception. It has no effect if the package is used as a library, or if Ctrl-C is ignored or
already handled.
"""

from __future__ import annotations

import os
import signal
import sys

#: The exit code that shells expect of an interrupted command.
INTERRUPTED = 130


def exit_silently(number: int, frame: object) -> None:
    """Exit at once, without output: nothing has been written yet."""
    os._exit(INTERRUPTED)


def is_command() -> bool:
    """Whether this process is `iresnet` or `python -m iresnet`, where argv[0] is "-m" until the module is located."""
    program = sys.argv[0] if sys.argv else ""
    name = os.path.basename(program).removesuffix(".exe")
    return name == "iresnet" or (program == "-m" and sys.orig_argv[1:3] == ["-m", "iresnet"])


def install() -> None:
    """Make Ctrl-C exit silently, if this process is the command."""
    if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        try:
            signal.signal(signal.SIGINT, exit_silently)
        except ValueError:  # imported in a thread other than the main one
            return


def restore() -> None:
    """Restore Python's own handling of Ctrl-C, once everything is imported."""
    if signal.getsignal(signal.SIGINT) is exit_silently:
        signal.signal(signal.SIGINT, signal.default_int_handler)


install()
