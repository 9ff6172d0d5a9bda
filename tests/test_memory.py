"""The command keeps freed memory (`cli.memory`): large tensors are not paged in anew every time."""

import platform
import subprocess
import sys

import pytest

from iresnet.cli import memory

#: Large tensors, one after another; the pages that those after the fourth had to be given.
PAGES = """
import resource, sys, torch
from iresnet.cli.memory import keep_memory
kept = keep_memory() if sys.argv[1] == "kept" else None
def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for i in range(10):
    if i == 4:
        begun = pages()
    torch.ones(16 * 2**20)  # 64 MiB, 16,384 pages
print(kept, pages() - begun)
"""


def pages(how: str) -> tuple[str, int]:
    done = subprocess.run([sys.executable, "-c", PAGES, how], capture_output=True, text=True, check=True)
    kept, count = done.stdout.split()
    return kept, int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
def test_large_tensors_get_the_memory_that_the_last_one_left():
    kept, count = pages("kept")
    assert kept == "True"
    assert count < 20_000, "more than one of six was paged in"
    _, without = pages("returned")
    assert without > 50_000, "such blocks are kept without it: `cli.memory` can go"


def test_other_systems_are_left_as_they_are(monkeypatch):
    monkeypatch.setattr(memory.platform, "libc_ver", lambda: ("", ""))
    assert memory.keep_memory() is False
