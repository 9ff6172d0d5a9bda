"""What may stand in the place of a file: nothing, a folder, a link, a pipe, a device."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

#: Puts something in the place of a file, which is gone already.
Place: TypeAlias = Callable[[random.Random, Path], None]


def nothing(r: random.Random, path: Path) -> None:
    """The file is gone."""


def folder(r: random.Random, path: Path) -> None:
    """A folder of the same name."""
    path.mkdir()


def loop(r: random.Random, path: Path) -> None:
    """A link to itself."""
    path.symlink_to(path.name)


def dangling(r: random.Random, path: Path) -> None:
    """A link to what is not there, with a name that is as long as can be."""
    path.symlink_to(r.choice(("missing", "x" * 255, "/nonexistent/é\n")))


def device(r: random.Random, path: Path) -> None:
    """A link to a device that never ends, or is always empty."""
    path.symlink_to(r.choice(("/dev/zero", "/dev/null", "/proc/self/mem")))


def pipe(r: random.Random, path: Path) -> None:
    """A pipe that nobody writes to."""
    os.mkfifo(path)


def sibling(r: random.Random, path: Path) -> None:
    """A link to another file of the folder, or to the folder."""
    others = sorted(p.name for p in path.parent.iterdir())
    path.symlink_to(r.choice([".", *others]))


PLACES: tuple[Place, ...] = (nothing, folder, loop, dangling, device, pipe, sibling)
