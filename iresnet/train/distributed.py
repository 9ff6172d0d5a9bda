"""Training by several processes that `torchrun` starts, one per GPU or group of CPU cores.

Rank 0 is the main process. What torchrun tells each process is read here and nowhere else.
"""

from __future__ import annotations

import os

#: What torchrun sets for every process that it starts.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def rank() -> int:
    """Return the number of this process among those that torchrun started; 0 without torchrun."""
    return _read("RANK", 0)


def world_size() -> int:
    """Return how many processes torchrun started, on all machines; 1 without torchrun."""
    return _read("WORLD_SIZE", 1)


def local_rank() -> int:
    """Return the number of this process among those on this machine."""
    return _read("LOCAL_RANK", 0)


def is_main() -> bool:
    """Whether this process is the one that prints and writes."""
    return rank() == 0


def _read(name: str, default: int) -> int:
    return int(os.environ[name]) if all(variable in os.environ for variable in VARIABLES) else default
