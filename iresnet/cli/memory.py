"""Memory that a tensor leaves behind, kept for the next one.

glibc returns every block of more than 32 MiB to the system as soon as it is free, and the system hands out the next one
page by page, each cleared and counted. Where a convolution on a CPU needs such a block for every batch, that can take
longer than the convolution. It is a setting of the whole process: the command makes it, and the library does not.
"""

from __future__ import annotations

import ctypes
import platform

#: The names of what is set, in glibc's malloc.h: what stays at the top of the heap, and blocks taken from the system.
TRIM_THRESHOLD, MMAP_MAX = -1, -4


def keep_memory() -> bool:
    """Let malloc keep what is freed; whether it does. Other systems than Linux with glibc are left as they are."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(MMAP_MAX, 0)) and bool(mallopt(TRIM_THRESHOLD, 2**31 - 1))
