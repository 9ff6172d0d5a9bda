"""The largest memory of a process."""

import os
import subprocess
import sys

import pytest

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

#: `ru_maxrss` of a new process is at least the memory of the one that started it; this is not.
PRINT = """
import sys
with open("/proc/self/status") as status:
    sys.stderr.write("\\n" + status.read().split("VmHWM:")[1].split()[0])
"""


def peak_memory(program, *words, **options):
    """Run a Python program with these words as its arguments; return its peak memory in MiB."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program + PRINT, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, **options)
    return int(done.stderr.split()[-1]) / 1024
