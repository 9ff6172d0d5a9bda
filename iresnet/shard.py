"""Batches that several processes share: each computes the loss of its own rows, a contiguous part of the batch.

Every process knows the whole batch. Random numbers per sample are drawn for all of its rows, from generators in the
same state everywhere, and those of the own rows are kept. A mean divides by the size of the whole batch and is
multiplied by the number of processes, so that the average over the processes is the mean over the batch. The loss is
then the same, up to rounding, for any number of processes. For one process all of this does nothing.

>>> x = torch.arange(5.0)
>>> with sharing(1, 2), own_rows(x) as rows:
...     rows.tolist(), round(batch_mean(rows).item(), 6)
([2.0, 3.0, 4.0], 3.6)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Shard:
    """The part `rank` of `ranks` of a batch of `total` rows; 0 rows: no batch is being computed."""

    rank: int
    ranks: int
    total: int = 0

    def rows(self, total: int) -> tuple[int, int]:
        return total * self.rank // self.ranks, total * (self.rank + 1) // self.ranks


_SHARD: ContextVar[_Shard | None] = ContextVar("shard", default=None)


def _current() -> _Shard | None:
    return None if torch.compiler.is_compiling() else _SHARD.get()  # which a compiler cannot trace


def is_shared() -> bool:
    """Whether the batch that is being computed is shared by several processes."""
    shard = _current()
    return shard is not None and shard.total > 0


@contextmanager
def sharing(rank: int, ranks: int) -> Iterator[None]:
    """Context in which batches are shared by `ranks` processes, of which this one is number `rank`."""
    with _set(_Shard(rank, ranks) if ranks > 1 else None):
        yield


@contextmanager
def own_rows(batch: Tensor) -> Iterator[Tensor]:
    """Yield this process's rows of a batch; random numbers drawn in this context are those of these rows."""
    shard = _current()
    if shard is None:
        yield batch
        return
    with _set(replace(shard, total=len(batch))):
        yield take_own(batch)


def take_own(batch: Tensor) -> Tensor:
    """Return this process's rows of a batch."""
    shard = _current()
    if shard is None:
        return batch
    begin, end = shard.rows(len(batch))
    return batch[begin:end]


def batch_mean(values: Tensor) -> Tensor:
    """Return the mean over a batch, given one value per own row; exact on average over the processes."""
    shard = _current()
    return values.mean() if shard is None else values.sum() * (shard.ranks / shard.total)


def batch_count(count: Tensor) -> Tensor:
    """Return what a sum over own rows is divided by, if `count` rows of the whole batch take part."""
    shard = _current()
    return count if shard is None else count / shard.ranks


def draw_rows(draw: Callable[[tuple[int, ...]], Tensor], shape: Sequence[int], axis: int = 0) -> Tensor:
    """Draw random numbers of a shape whose `axis` counts own rows: for the whole batch, and keep the own rows."""
    shard = _current()
    if shard is None or not shard.total:
        return draw(tuple(shape))
    begin, end = shard.rows(shard.total)
    if shape[axis] != end - begin:  # the generators of the processes would no longer be in the same state
        raise RuntimeError(f"random numbers must be drawn for the {end - begin} rows of a part; got {shape[axis]}.")
    return draw((*shape[:axis], shard.total, *shape[axis + 1 :])).narrow(axis, begin, end - begin)


@contextmanager
def _set(shard: _Shard | None) -> Iterator[None]:
    token = _SHARD.set(shard)
    try:
        yield
    finally:
        _SHARD.reset(token)
