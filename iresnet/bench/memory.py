"""The peak memory of a training step beyond what the network itself takes.

On a GPU, torch counts what is allocated, the state of the optimiser included. On a CPU, every method runs in a process
of its own, where a first step of a small batch loads what is loaded once: reported is how far the resident memory of
the process rises above its level before the step of the whole batch. Its allocator returns large blocks at once, so
that none is left over to reuse.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from .case import Case, Method
from .libraries import other
from .networks import build_flow, constrained, plain

#: The small batch that comes first.
FEW = 2

#: Settings of the C library's allocator: blocks from 64 KiB are the system's own, and go back to it when freed.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

#: What the process of one method runs; the case and the name of the method are its standard input.
PROGRAM = "from iresnet.bench.memory import child; child()"


def peak_memory(case: Case, name: str, task: str) -> float | None:
    """Return the MiB that a training step of a method takes at its peak; None if it has no such step."""
    return _on_gpu(case, name, task) if case.device != "cpu" else _in_a_process(case, name, task)


def _method(case: Case, name: str) -> Method:
    if name == "plain":
        return plain(case)
    flow = build_flow(case)
    return constrained(case, flow) if name == "iresnet" else other(case, flow, name)


def _on_gpu(case: Case, name: str, task: str) -> float | None:
    prepare = _method(case, name).tasks.get(task)
    if prepare is None:
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    prepare()()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _in_a_process(case: Case, name: str, task: str) -> float | None:
    request = json.dumps({"case": asdict(case), "name": name, "task": task, "threads": torch.get_num_threads()})
    environment = {**os.environ, **ALLOCATOR, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = subprocess.run([sys.executable, "-c", PROGRAM], input=request, capture_output=True, text=True,
                         env=environment)  # fmt: skip
    if run.returncode:
        raise RuntimeError(f"the memory of {name} could not be measured: {run.stderr.strip().splitlines()[-1:]}")
    found: float | None = json.loads(run.stdout)
    return found


def child() -> None:
    """Measure in this process what its standard input asks for, and print it."""
    request = json.load(sys.stdin)
    torch.set_num_threads(request["threads"])
    case = Case(**{**request["case"], "hidden": tuple(request["case"]["hidden"])})
    print(json.dumps(_growth_of_memory(case, request["name"], request["task"])))


def _growth_of_memory(case: Case, name: str, task: str) -> float | None:
    small = _method(replace(case, batch=FEW), name).tasks.get(task)
    if small is None:
        return None
    whole = _method(case, name).tasks[task]()
    small()()
    before = _restart_peak()
    whole()
    return (_peak() - before) / 2**20


def _restart_peak() -> int:
    """Forget the largest resident memory so far, where the system can, and return what it is now."""
    if (reset := Path("/proc/self/clear_refs")).exists():
        reset.write_text("5")
    return _peak()


def _peak() -> int:
    """Return the largest resident memory of this process, in bytes."""
    if (status := Path("/proc/self/status")).exists():
        kilobytes = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1]
        return 1024 * int(kilobytes)
    import resource  # not on Windows

    return (1 if sys.platform == "darwin" else 1024) * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
