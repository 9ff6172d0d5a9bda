"""Everything that `iresnet bench` measures, as rows of a results file.

table=ratios      a task at one size: our milliseconds, and the time of every other method as a multiple of ours
table=memory      the same for the peak memory of a training step, in MiB
table=growth      slopes of our times
table=networks    the number of parameters of every method
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import Any

import torch

from ..progress import each
from ..results import Results, provenance
from ..spelling import hint
from .case import INVERSES, ROULETTE_STEPS, TASKS, TIMED, Case, Method
from .floor import floor
from .growth import SIZES, growth_rows
from .libraries import LIBRARIES, ZUKO, installed, others
from .memory import peak_memory
from .networks import build_flow, constrained, plain
from .ratios import Ratio, milliseconds, ratio, time_in_turn

Row = dict[str, Any]

#: What ours is compared with: the columns of the table.
METHODS = ("normflows", *ZUKO, "plain", "floor")

#: The tasks whose memory is measured.
REMEMBERED = ("exact", "series")


@dataclass(frozen=True)
class Sizes:
    """What is measured: the sizes of the networks, and how long each method is timed for each task."""

    dimensions: tuple[int, ...] = (2, 16, 64)
    blocks: tuple[int, ...] = (16, 100)
    hidden: tuple[int, ...] = (64, 64, 64)
    batch: int = 512
    #: Also sampled: so many rows in these dimensions, with the first number of blocks.
    sampled: tuple[int, ...] = (30, 60)
    samples: int = 1000
    #: The memory is measured in these dimensions, with the first number of blocks.
    remembered: tuple[int, ...] = (2, 16, 64)
    growth: dict[str, tuple[int, ...]] = field(default_factory=lambda: SIZES)
    growth_base: tuple[int, int] = (8, 8)
    seconds: float = 0.7
    rounds: int = 15


FULL = Sizes()
#: The same on a GPU, whose times vary less and whose captures take longer.
GPU = replace(FULL, seconds=0.25, rounds=10)
QUICK = Sizes(
    dimensions=(2, 16), blocks=(4,), batch=256, sampled=(), remembered=(16,), seconds=0.15, rounds=5,
    growth={name: values[:3] for name, values in SIZES.items()}, growth_base=(4, 2),
)  # fmt: skip


def title_of(row: Row) -> str:
    """Return what a row of the tables of times and memory is about.

    >>> title_of({"task": "inverse", "weights": "random"}), title_of({"task": "inverse", "weights": "trained"})
    ('inverse, proven', 'inverse, trained')
    """
    title = TASKS[row["task"]]
    return f"{title.split(',')[0]}, trained" if row.get("weights") == "trained" else title


def check_tasks(names: Sequence[str]) -> tuple[str, ...]:
    """Return the tasks with these names, all if none is given; raise for an unknown one."""
    for name in names:
        if name not in TASKS:
            raise ValueError(f"--task must be one of {', '.join(TASKS)}; got {name!r}. {hint(name, TASKS)}")
    return tuple(dict.fromkeys(names)) or tuple(TASKS)


def bench(name: str, tasks: Sequence[str] = (), *, device: str = "cpu", sizes: Sizes = FULL) -> Results:
    """Measure the tasks, all if none is given, and return their rows as the results file NAME."""
    begin, chosen = time.perf_counter(), check_tasks(tasks)
    parts = [lambda: _ratio_rows(chosen, device, sizes)] if set(chosen) & set(TIMED) else []
    parts += [lambda: _memory_rows(device, sizes)] if "memory" in chosen else []
    parts += [lambda: _growth_rows(device, sizes)] if "growth" in chosen else []
    with nullcontext() if device == "cpu" else torch.cuda.device(device):
        rows = [row for found in each(lambda part: list(part()), parts) for row in found]
    run = provenance(seeds=[0], seconds=time.perf_counter() - begin)
    run["versions"] |= _versions()
    return Results(name, [{**row, "run": 0} for row in rows], [run])


def _versions() -> dict[str, str | None]:
    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {name: installed(name) for name in LIBRARIES}


# ------------------------------------------------------------------------------------------------- times


def _ratio_rows(tasks: Sequence[str], device: str, sizes: Sizes) -> Iterator[Row]:
    timed = [task for task in tasks if task in TIMED]
    works = [
        (Case(d, blocks, sizes.hidden, sizes.batch, device), timed)
        for blocks, d in product(sizes.blocks, sizes.dimensions)
    ]
    if "sample" in timed:
        works += [(Case(d, sizes.blocks[0], sizes.hidden, sizes.samples, device), ["sample"]) for d in sizes.sampled]
    if inverses := [task for task in timed if task in INVERSES]:
        few = sizes.blocks[0]
        works += [(Case(d, few, sizes.hidden, sizes.batch, device, trained=True), inverses) for d in sizes.dimensions]
    rows = [row for found in each(lambda work: list(_case_rows(*work, sizes)), works) for row in found]
    yield from sorted(rows, key=lambda row: [*TIMED, None].index(row.get("task")))


def _case_rows(case: Case, tasks: Iterable[str], sizes: Sizes) -> Iterator[Row]:
    """Yield the rows of one case, and one with the numbers of parameters."""
    flow = build_flow(case)
    ours = constrained(case, flow)
    facts = ours.facts()
    methods = {"iresnet": ours, **others(case, flow), "plain": plain(case)}
    methods["floor"] = floor(case, facts["evaluations"])
    size: Row = {"dimension": case.dimension, "blocks": case.blocks, "batch": case.batch, "weights": case.weights}
    yield from each(lambda task: _timed_row(task, case, methods, facts, sizes) | size, tasks)
    if not case.trained:
        yield {"table": "networks", **size} | {name: m.parameters for name, m in methods.items() if m.parameters}


def _timed_row(task: str, case: Case, methods: dict[str, Method], facts: dict[str, float], sizes: Sizes) -> Row:
    runs = {name: method.tasks[task]() for name, method in methods.items() if task in method.tasks}
    times = time_in_turn(runs, seconds=sizes.seconds, rounds=sizes.rounds, cuda=case.device != "cpu")
    ours = times.pop("iresnet")
    calls = ROULETTE_STEPS if task == "roulette" else 1
    row: Row = {"table": "ratios", "task": task, "ms": milliseconds(ours, calls), "rounds": len(ours)}
    row |= _columns({name: ratio(found, ours) for name, found in times.items()})
    if task == "inverse":
        row |= facts | (methods["normflows"].facts() if "normflows" in methods else {})
    return row


def _columns(ratios: dict[str, Ratio]) -> Row:
    """Return a ratio and its quartiles for every method that can be compared with, None for the others."""
    row: Row = {}
    for name in METHODS:
        found = ratios.get(name)
        row |= {name: found and found.value, f"{name}, quartiles": found and [found.low, found.high]}
    spreads = [r.spread for r in ratios.values() if r.spread is not None]
    return row | {"spread": max(spreads, default=None)}


# ------------------------------------------------------------------------------------------------- memory, growth


def _memory_rows(device: str, sizes: Sizes) -> Iterator[Row]:
    cases = [Case(d, sizes.blocks[0], sizes.hidden, sizes.batch, device) for d in sizes.remembered]
    yield from each(lambda work: _memory_row(*work), list(product(cases, REMEMBERED)))


def _memory_row(case: Case, task: str) -> Row:
    names = ("iresnet", *installed(), "plain")
    found = dict(zip(names, each(lambda name: peak_memory(case, name, task), names), strict=True))
    ours = found.pop("iresnet")
    assert ours is not None  # both tasks are ours
    row: Row = {"table": "memory", "task": task, "MiB": ours}
    row |= {name: None if mib is None or not ours else mib / ours for name, mib in found.items()}
    return row | {"dimension": case.dimension, "blocks": case.blocks, "batch": case.batch}


def _growth_rows(device: str, sizes: Sizes) -> Iterator[Row]:
    dimension, blocks = sizes.growth_base
    base = Case(dimension, blocks, sizes.hidden, sizes.batch, device)
    return growth_rows(base, sizes.growth, seconds=sizes.seconds / 2, rounds=sizes.rounds)
