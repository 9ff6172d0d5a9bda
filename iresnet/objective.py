"""Objectives: a batch in, a loss and the figures to watch out. The one thing that DDP, compile and graphs wrap.

The figures logged are what they say (nats are nats), never a surrogate whose gradient happens to be right.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from .flow import Flow


class Objective(nn.Module, ABC):
    """A model with a loss. `forward` returns the loss to minimise and detached figures by name."""

    model: nn.Module

    @abstractmethod
    def forward(self, batch: Tensor, *, generator: torch.Generator | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss, figures) of a batch."""


class MaximumLikelihood(Objective):
    """-log p(x), averaged over the batch: density estimation. Figures: `nats`."""

    model: Flow

    def __init__(self, model: Flow) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensor, *, generator: torch.Generator | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -self.model(batch, generator=generator).mean()
        return loss, {"nats": loss.detach()}
