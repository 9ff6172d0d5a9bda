"""The number of CPU threads that a model of tables or small images is fastest with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: Up to this dimension one thread is fastest: more would wait for each other.
SMALL = 256


@contextmanager
def suitable_threads(dimension: int) -> Iterator[None]:
    """Compute with one thread if samples have few dimensions; the number of threads is restored afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if dimension <= SMALL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
