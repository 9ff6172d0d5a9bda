"""Data-dependent initialisation: the first batch in training sets the parameters of a transform.

`initialise_` does so explicitly. A model that was saved or copied after it is never initialised again. Pass one batch
through the plain model before `torch.compile` with a full graph, before a CUDA graph, and before `init_process_group`:
in a group of several ranks a first batch is refused, since ranks may have different ones.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from .closed_form import ClosedForm

_INITIALISING: ContextVar[bool] = ContextVar("initialising", default=False)


@contextmanager
def initialising() -> Iterator[None]:
    """Context in which a batch initialises a model in train mode also without gradients, and on one rank of several."""
    token = _INITIALISING.set(True)
    try:
        yield
    finally:
        _INITIALISING.reset(token)


def _is_initialising() -> bool:
    return not torch.compiler.is_compiling() and _INITIALISING.get()


class DataInitialised(ClosedForm):
    """A transform that calls `initialise_` on the first batch in train mode with gradients enabled."""

    initialised: Tensor

    def __init__(self) -> None:
        super().__init__()
        # The buffer is saved with the model. The code branches on a plain bool instead, so that no step waits for the
        # device and a compiled graph has no branch on a tensor.
        self.register_buffer("initialised", torch.tensor(False))
        self._ready = False

    @abstractmethod
    def initialise_(self, x: Tensor) -> DataInitialised:
        """Set the parameters from this batch, call `_mark_initialised`, and return self."""

    @property
    def awaits_data(self) -> bool:
        """Whether the next batch will initialise the parameters."""
        return self.training and not self._ready and (torch.is_grad_enabled() or _is_initialising())

    def _mark_initialised(self) -> None:
        self.initialised.fill_(True)
        self._ready = True

    def _initialise_if_first(self, x: Tensor) -> None:
        if self.awaits_data:
            # Not as a decorator: importing the compiler for it would double the time to import this package.
            torch.compiler.disable(self._first_batch)(x)  # type: ignore[no-untyped-call]

    def _first_batch(self, x: Tensor) -> None:
        # The buffer may be newer than the bool: an averaged copy of a model gets its buffers copied from the original.
        if bool(self.initialised):
            self._ready = True
        else:
            if not _is_initialising():
                _check_single_rank(self)
            self.initialise_(x)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._ready = bool(state_dict.get(f"{prefix}initialised", self._ready))


def _check_single_rank(part: nn.Module) -> None:
    """Refuse a first batch in a group: replicas initialised from different batches would silently become different."""
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = torch.distributed.get_world_size() if is_distributed else 1
    if ranks > 1:
        raise RuntimeError(
            f"the first batch, which initialises {type(part).__name__}, must pass through the plain model in training "
            "mode before init_process_group, since ranks may have different batches; got it in a group of "
            f"{ranks} ranks. Move that call up, or load initialised weights: DistributedDataParallel copies those of "
            "rank 0 to every rank."
        )


def uninitialised(model: nn.Module) -> list[str]:
    """Return the names of all parts that still await their first batch."""
    return [name for name, m in model.named_modules() if isinstance(m, DataInitialised) and not bool(m.initialised)]


def check_initialised(model: nn.Module) -> None:
    """Refuse to sample a model in training that still awaits its first batch."""
    if model.training and uninitialised(model):
        raise ValueError(
            "the first batch in training initialises ActNorms and principal axes, and must not be samples; "
            "call the flow on data first, or flow.eval() to sample it as it is. (Without data, as in variational "
            "inference, call it on noise first.)"
        )
