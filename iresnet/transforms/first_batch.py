"""Transforms that data initialise: the first batch seen in training sets their parameters.

`initialise_` does so explicitly. What is saved or copied is never initialised again. Before `torch.compile` with a full
graph, a CUDA graph or `torch.distributed` (where each rank would see a batch of its own, which is refused), pass one
batch through the plain model first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .closed_form import ClosedForm


class FirstBatch(ClosedForm):
    """A transform whose `initialise_` is called with the first batch in train mode, gradients enabled."""

    initialised: Tensor

    def __init__(self) -> None:
        super().__init__()
        # The buffer is saved; its twin, a plain bool, is what the code branches on, so that no step waits for the
        # device and a compiled graph has no branch on a tensor.
        self.register_buffer("initialised", torch.tensor(False))
        self._ready = False

    @abstractmethod
    def initialise_(self, x: Tensor) -> FirstBatch:
        """Set the parameters by this batch, then `_is_initialised`; gives itself."""

    @property
    def waits(self) -> bool:
        """Whether the next batch will set the parameters."""
        return self.training and not self._ready and torch.is_grad_enabled()

    def _is_initialised(self) -> None:
        self.initialised.fill_(True)
        self._ready = True

    def _prepare(self, x: Tensor) -> None:
        if self.waits:
            # Decorated here, as importing the compiler for a decorator would double the time to import this package.
            torch.compiler.disable(self._first_batch)(x)  # type: ignore[no-untyped-call]

    def _first_batch(self, x: Tensor) -> None:
        # The buffer may know more than the bool: an averaged copy of a model gets its buffers copied from the original.
        if bool(self.initialised):
            self._ready = True
        else:
            _refuse_ranks(self)
            self.initialise_(x)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._ready = bool(state_dict.get(f"{prefix}initialised", self._ready))


def _refuse_ranks(part: nn.Module) -> None:
    """Replicas that are initialised by a batch each would be different models from then on, and nothing would show."""
    ranks = torch.distributed.get_world_size() if _is_distributed() else 1
    if ranks > 1:
        raise RuntimeError(
            f"the first batch initialises {type(part).__name__}, and must be the same on all ranks; here are {ranks}, "
            "each with a batch of its own. Pass one batch through the plain model in training mode before "
            "init_process_group, or load weights that have seen one: DistributedDataParallel then gives every rank "
            "those of rank 0."
        )


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def uninitialised(model: nn.Module) -> list[str]:
    """The names of all parts that have not seen data."""
    return [name for name, m in model.named_modules() if isinstance(m, FirstBatch) and not bool(m.initialised)]
