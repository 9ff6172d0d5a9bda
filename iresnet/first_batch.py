"""Transforms that data initialise: the first batch seen in training sets their parameters.

`initialise_` does so explicitly. What is saved or copied is never initialised again. Before `torch.compile` with a full
graph, a CUDA graph or DistributedDataParallel (where each rank would see a batch of its own), pass one batch through
the plain model first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .transform import Transform


class FirstBatch(Transform):
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
            self.initialise_(x)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._ready = bool(state_dict.get(f"{prefix}initialised", self._ready))


def uninitialised(model: nn.Module) -> list[str]:
    """The names of all parts that have not seen data."""
    return [name for name, m in model.named_modules() if isinstance(m, FirstBatch) and not bool(m.initialised)]
