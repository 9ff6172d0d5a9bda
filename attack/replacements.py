"""Replacements for a file: nothing, a folder, a link, a pipe, a device."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

#: Creates something at the path of a file that was deleted.
Replacement: TypeAlias = Callable[[random.Random, Path], None]


def nothing(r: random.Random, path: Path) -> None:
    """Leave the file deleted."""


def folder(r: random.Random, path: Path) -> None:
    """Create a folder of the same name."""
    path.mkdir()


def loop(r: random.Random, path: Path) -> None:
    """Create a link to itself."""
    path.symlink_to(path.name)


def dangling(r: random.Random, path: Path) -> None:
    """Create a link to a missing file, perhaps in a missing folder or with the longest possible name."""
    path.symlink_to(r.choice(("missing", "x" * 255, "nonexistent/é\n")))


def device(r: random.Random, path: Path) -> None:
    """Create a link to a device that never ends or is always empty."""
    path.symlink_to(r.choice(("/dev/zero", "/dev/null", "/proc/self/mem")))


def pipe(r: random.Random, path: Path) -> None:
    """Create a pipe that nothing writes to."""
    os.mkfifo(path)


def sibling(r: random.Random, path: Path) -> None:
    """Create a link to another file of the folder, or to the folder."""
    others = sorted(p.name for p in path.parent.iterdir())
    path.symlink_to(r.choice([".", *others]))


REPLACEMENTS: tuple[Replacement, ...] = (nothing, folder, loop, dangling, device, pipe, sibling)
