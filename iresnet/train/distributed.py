"""Work of several processes that `torchrun` starts, one per GPU, or several on the cores of CPUs.

In a training, every process holds the whole model and takes its own rows of every batch (`shard`).
`DistributedDataParallel` averages the gradients, so that all of them take the same step. Rank 0 decides, prints and
writes; the others follow it. What torchrun tells a process is read here and nowhere else.
"""

from __future__ import annotations

import atexit
import copy
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from inspect import signature
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..lipschitz import refresh_
from ..shard import sharing
from ..spelling import quoted
from ..transforms.first_batch import DataInitialised, initialising, uninitialised
from .objective import Joint, Objective

#: What torchrun sets for every process that it starts.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

#: How long a process waits for the others, while rank 0 reads data, fits a mixture or validates.
TIMEOUT = timedelta(hours=2)

#: After so many seconds a process says that it waits for the others to start.
PATIENCE = 30.0

#: The norms of constrained layers are computed by every process, from the same numbers. Steps after which they are
#: copied from rank 0 all the same, as processors of different kinds round differently.
SYNCHRONISE_EVERY = 100

#: The option of DistributedDataParallel that copies all buffers before every step, by its name in this torch.
COPY_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)


class LostProcess(RuntimeError):
    """Another process has ended."""


def rank() -> int:
    """Return the number of this process among those that torchrun started; 0 without torchrun."""
    return _place()[0]


def world_size() -> int:
    """Return how many processes torchrun started, on all machines; 1 without torchrun."""
    return _place()[1]


def local_rank() -> int:
    """Return the number of this process among those on this machine."""
    return _place()[2]


def is_main() -> bool:
    """Whether this process is the one that prints and writes; also if the variables are not those of torchrun."""
    try:
        return rank() == 0
    except ValueError:
        return True


def _place() -> tuple[int, int, int]:
    """Return the number of this process, how many there are, and its number on this machine."""
    if not all(variable in os.environ for variable in VARIABLES):
        return 0, 1, 0
    values = {name: os.environ[name] for name in VARIABLES[:3]}
    if all(value.isdecimal() for value in values.values()):
        rank, ranks, local = map(int, values.values())
        if rank < ranks:
            return rank, ranks, local
    got = ", ".join(f"{name}={quoted(value)}" for name, value in values.items())
    raise ValueError(
        "RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers, as torchrun sets them, with 0 <= RANK < WORLD_SIZE; "
        f"got {got}. For a single process, unset one: env -u RANK iresnet ..."
    )


@dataclass(frozen=True)
class Group:
    """The processes that train or evaluate a model together. All of them call the same methods in the same order."""

    rank: int = 0
    ranks: int = 1

    @property
    def is_shared(self) -> bool:
        """Whether there are several processes."""
        return self.ranks > 1

    def sharing(self) -> AbstractContextManager[None]:
        """Context in which an objective computes the loss of this process's rows."""
        return sharing(self.rank, self.ranks)

    def replicate(self, objective: Objective, x: Tensor, y: Tensor | None, options: Mapping[str, Any]) -> nn.Module:
        """Return the objective, wrapped so that gradients are averaged, with the weights of rank 0 everywhere.

        What the first batch initialises is initialised before, by rank 0 from the whole batch (x, y).
        """
        if not self.is_shared:
            return objective
        if self.rank == 0:
            _initialise_(objective, x, y, options)
        self._copy_buffers(objective)  # the parameters are copied by DistributedDataParallel
        options = {COPY_BUFFERS: False, "find_unused_parameters": _has_unused_base(objective)}
        return DistributedDataParallel(objective, **options)

    def average(self, loss: Tensor, metrics: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss and the metrics of the whole batch, given those of the own rows."""
        if not self.is_shared:
            return loss, metrics
        total = torch.stack([loss, *(value.to(loss.dtype) for value in metrics.values())])
        dist.all_reduce(total)
        first, *others = (total / self.ranks).unbind()
        return first, dict(zip(metrics, others, strict=True))

    def synchronise_(self, module: nn.Module, step: int) -> None:
        """Copy the buffers of rank 0 to all processes, every few steps."""
        if self.is_shared and step % SYNCHRONISE_EVERY == 0:
            self._copy_buffers(module)

    def _copy_buffers(self, module: nn.Module) -> None:
        for buffer in module.buffers():
            content = buffer.contiguous()  # the memory layout may be any
            dist.broadcast(content, 0)
            buffer.copy_(content)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        if not self.is_shared:
            return flag
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags)

    def decide(self, flag: bool) -> bool:
        """Return the flag of rank 0."""
        if not self.is_shared:
            return flag
        flags = torch.tensor(int(flag))
        dist.broadcast(flags, 0)
        return bool(flags)

    def share(self, content: Any = None, source: int = 0) -> Any:
        """Return the content that rank 0, or another, passes."""
        if not self.is_shared:
            return content
        contents = [content]
        dist.broadcast_object_list(contents, source, device=torch.device("cpu"))
        return contents[0]

    def gather(self, content: Any) -> list[Any]:
        """Return the contents of all processes, in the order of their ranks."""
        return [self.share(content, source) for source in range(self.ranks)]

    def leave(self) -> None:
        """End the communication with the other processes, at the same place in all of them."""
        if self.is_shared:
            _close()


ALONE = Group()


@contextmanager
def joined(device: str) -> Iterator[Group]:
    """Join the processes that torchrun started; without torchrun, yield a group of this process alone.

    If another process ends meanwhile, `LostProcess` is raised.
    """
    if world_size() == 1:
        yield ALONE
        return
    on_gpus = device.startswith("cuda")
    if on_gpus:
        _take_gpu(device)
    try:
        _meet("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
        atexit.register(_close)
        group = Group(rank(), world_size())
        yield group
        group.leave()
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise LostProcess("another process has ended; its message, if any, is above.") from error
        raise


def _meet(backend: str) -> None:
    """Start the communication with the other processes."""
    address = ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
    others = f"{world_size() - 1} of {world_size()} processes at {address}"
    remedy = "torchrun starts them; for a single process, unset WORLD_SIZE."
    waiting = Timer(PATIENCE, lambda: print(f"iresnet: waiting for {others}. {remedy}", file=sys.stderr))
    waiting.daemon = True
    waiting.start()
    try:
        dist.init_process_group(backend, timeout=TIMEOUT)
    except (ValueError, dist.DistNetworkError) as error:
        reason = " ".join(str(error).splitlines()[:1]).rstrip(".")
        raise OSError(
            f"the processes cannot meet at {address} ({reason}). Check --master-addr and --master-port; the port must "
            "be free on the first machine, and open to the others."
        ) from error
    finally:
        waiting.cancel()


def _close() -> None:
    """End the communication, if it has not ended: after an error, once its message is printed."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _take_gpu(device: str) -> None:
    """Make `cuda` a GPU of this process's own."""
    available = torch.cuda.device_count()
    if device != "cuda" or local_rank() >= available:
        raise ValueError(
            f"every process needs a GPU of its own; got --device {device} for process {local_rank()} of a machine with "
            f"{available}. Use --device cuda, with at most {available} processes per machine, or --device cpu."
        )
    torch.cuda.set_device(local_rank())


def _has_unused_base(objective: Objective) -> bool:
    """Whether the parameters of the base have no gradient: those of a hybrid that is trained for its classes alone."""
    if not isinstance(objective, Joint) or objective.needs_logdet:
        return False
    used = set(objective.model.head.parameters())  # a head by Bayes' rule uses the base
    return any(p.requires_grad and p not in used for p in objective.model.base.parameters())


def _initialise_(objective: Objective, x: Tensor, y: Tensor | None, options: Mapping[str, Any]) -> None:
    """Initialise what awaits a first batch, as a training step on the whole batch would; nothing else is changed."""
    if not uninitialised(objective):
        return
    trial, generator = copy.deepcopy(objective), options.get("generator")
    refresh_(trial)
    if generator is not None:
        options = {**options, "generator": generator.clone_state()}
    with torch.no_grad(), initialising(), torch.random.fork_rng([x.device] if x.is_cuda else []):
        trial(x, y, **options)
    for mine, other in zip(objective.modules(), trial.modules(), strict=True):
        if isinstance(mine, DataInitialised):
            mine.load_state_dict(other.state_dict())
