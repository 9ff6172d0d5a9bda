"""Run cases in worker processes, so that a case that hangs or ends its process is a violation and the run continues.

A worker receives blocks of cases, one after another. The number of its current case is in shared memory: if the worker
dies, by a signal or because a case exceeded its time limit, that case is a violation, and a new worker runs the rest of
the block.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from . import KINDS, Kind, Violation, case_random, load
from .count import Count

#: The largest number of cases in a block.
BLOCK = 200


@dataclass(frozen=True)
class Block:
    """Cases `start` to `stop` of a kind."""

    kind: str
    seed: int
    start: int
    stop: int


def split_cases(kind: Kind, cases: int, seed: int) -> Iterator[Block]:
    """Split the cases of a kind into blocks."""
    size = min(BLOCK, -(-cases // 16))  # so that a few long cases are distributed too
    for start in range(0, cases, size):
        yield Block(kind.name, seed, start, min(start + size, cases))


def run_case(kind: Kind, seed: int, number: int) -> str:
    """Run one case; exceptions propagate."""
    import torch

    r = case_random(kind.name, seed, number)
    torch.manual_seed(r.getrandbits(63))
    return kind.attack(random.Random(r.getrandbits(64)))


def run_block(block: Block, current: Any = None) -> Count:
    """Run the cases of a block in this process; `current` is shared memory for the number of the current case."""
    kind, count = KINDS[block.kind], Count(block.kind, block.seed)
    for number in range(block.start, block.stop):
        if current is not None:
            current.value = number
            faulthandler.dump_traceback_later(kind.limit, exit=True)
        begin = time.perf_counter()
        try:
            count.outcomes[run_case(kind, block.seed, number)] += 1
        except Violation as error:
            count.add_violation(number, str(error))
        except Exception as error:
            count.add_violation(number, f"{type(error).__name__}: {error} ({_place(error)})")
        count.cases += 1
        count.seconds += time.perf_counter() - begin
        if current is not None:
            faulthandler.cancel_dump_traceback_later()
    return count


def _place(error: Exception) -> str:
    """The file and line of an exception: the innermost one in the project."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "?"


def _work(orders: Connection, current: Any) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # warnings of a case are not violations
    load()
    while (block := orders.recv()) is not None:
        orders.send(run_block(block, current))


class Worker:
    """A process that runs blocks of cases."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.orders, theirs = context.Pipe()
        self.current: Any = context.Value("q", -1, lock=False)
        self.block: Block | None = None
        self.process = context.Process(target=_work, args=(theirs, self.current), daemon=True)
        self.process.start()
        theirs.close()

    def take(self, block: Block | None) -> None:
        """Start a block; None ends the process."""
        self.block, self.current.value = block, -1 if block is None else block.start
        self.orders.send(block)

    def result(self) -> tuple[Count, list[Block]]:
        """The counts of the block, and the blocks that remain if the process died."""
        assert self.block is not None
        try:
            return self.orders.recv(), []
        except (EOFError, ConnectionError):
            self.process.join()
        # The counts of this block died with the process, so its earlier cases run again.
        number, block = int(self.current.value), self.block
        count = Count(block.kind, block.seed, cases=1)
        code = self.process.exitcode
        count.add_violation(number, "hung" if code == 1 else f"ended the process with {code}")
        parts = ((block.start, number), (number + 1, block.stop))
        return count, [Block(block.kind, block.seed, start, stop) for start, stop in parts if start < stop]


def run_blocks(todo: list[Block], workers: int) -> Iterator[Count]:
    """Run all blocks in `workers` processes; yield the counts of each."""
    todo = todo[::-1]
    busy = {(w := Worker()).orders: w for _ in range(min(workers, len(todo)))}
    for worker in busy.values():
        worker.take(todo.pop())
    while busy:
        for connection in cast("list[Connection]", wait(list(busy))):
            worker = busy.pop(connection)
            count, left = worker.result()
            yield count
            todo += left
            if not worker.process.is_alive():
                worker = Worker()
            worker.take(todo.pop() if todo else None)
            if worker.block is not None:
                busy[worker.orders] = worker
