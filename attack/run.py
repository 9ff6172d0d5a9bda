"""Cases in processes of their own, so that a case that hangs or ends its process is a violation and not the end.

A worker takes blocks of cases from a list, one after the other. The number of the case it is at lies in shared memory:
where a worker dies, by a signal or because a case passed its limit, that case is the violation and a new worker takes
the rest of the block.
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

from . import KINDS, Kind, Violation, drawn, load
from .count import Count

#: Cases that a worker takes at a time.
BLOCK = 200


@dataclass(frozen=True)
class Block:
    """Cases `start` to `stop` of a kind."""

    kind: str
    seed: int
    start: int
    stop: int


def blocks(kind: Kind, cases: int, seed: int) -> Iterator[Block]:
    """The cases of a kind, block by block."""
    size = min(BLOCK, -(-cases // 16))  # few and long cases are shared out too
    for start in range(0, cases, size):
        yield Block(kind.name, seed, start, min(start + size, cases))


def one(kind: Kind, seed: int, number: int) -> str:
    """Attack one case; raises what it raises."""
    import torch

    r = drawn(kind.name, seed, number)
    torch.manual_seed(r.getrandbits(63))
    return kind.attack(random.Random(r.getrandbits(64)))


def attack(block: Block, at: Any = None) -> Count:
    """Attack the cases of a block in this process; `at` is where the number of the current one is noted."""
    kind, count = KINDS[block.kind], Count(block.kind, block.seed)
    for number in range(block.start, block.stop):
        if at is not None:
            at.value = number
            faulthandler.dump_traceback_later(kind.limit, exit=True)
        begin = time.perf_counter()
        try:
            count.outcomes[one(kind, block.seed, number)] += 1
        except Violation as error:
            count.violated(number, str(error))
        except Exception as error:
            count.violated(number, f"{type(error).__name__}: {error} ({_place(error)})")
        count.cases += 1
        count.seconds += time.perf_counter() - begin
        if at is not None:
            faulthandler.cancel_dump_traceback_later()
    return count


def _place(error: Exception) -> str:
    """Where an exception came from, the innermost line of the project."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "?"


def _work(orders: Connection, at: Any) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # what a case warns of is not what is attacked
    load()
    while (block := orders.recv()) is not None:
        orders.send(attack(block, at))


class Worker:
    """A process that attacks blocks."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.orders, theirs = context.Pipe()
        self.at: Any = context.Value("q", -1, lock=False)
        self.block: Block | None = None
        self.process = context.Process(target=_work, args=(theirs, self.at), daemon=True)
        self.process.start()
        theirs.close()

    def take(self, block: Block | None) -> None:
        """Begin with a block, or end."""
        self.block, self.at.value = block, -1 if block is None else block.start
        self.orders.send(block)

    def result(self) -> tuple[Count, list[Block]]:
        """What the block came to, and what is left of it where the process died."""
        assert self.block is not None
        try:
            return self.orders.recv(), []
        except (EOFError, ConnectionError):
            self.process.join()
        # What was counted before in this block is lost with the process: its cases are attacked again.
        number, block = int(self.at.value), self.block
        count = Count(block.kind, block.seed, cases=1)
        code = self.process.exitcode
        count.violated(number, "hung" if code == 1 else f"ended the process with {code}")
        parts = ((block.start, number), (number + 1, block.stop))
        return count, [Block(block.kind, block.seed, start, stop) for start, stop in parts if start < stop]


def attack_all(todo: list[Block], workers: int) -> Iterator[Count]:
    """Attack all blocks with so many processes; yields what each came to."""
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
