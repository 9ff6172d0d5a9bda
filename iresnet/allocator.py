"""The allocator of the C library, which decides how fast memory on a CPU is reused."""

from __future__ import annotations

from functools import cache

import torch


@cache
def keep_freed_memory() -> None:
    """Let glibc keep freed blocks of up to 32 MiB for reuse, from now on; with other libraries nothing happens.

    By default it returns them to the system, which clears every page that is handed out again: for activations, which
    are written and freed thousands of times, that takes longer than the arithmetic. The limit adapts to the largest
    block that was freed, so one is allocated and freed here; it is never touched.
    """
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")
