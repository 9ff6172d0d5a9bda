"""Exponential moving average of a model's weights: the weights that a run evaluates and releases."""

from __future__ import annotations

import copy
from typing import Generic, TypeVar

import torch
from torch import nn

from ..lipschitz import defer_norms, refresh_
from ..tree import parameters_of

M = TypeVar("M", bound=nn.Module)


class Average(Generic[M]):
    """Exponential moving average (EMA) of a model's parameters.

    In the first steps the decay is step / (step + 10), so that the initial weights are soon forgotten.
    """

    def __init__(self, model: M, decay: float) -> None:
        self.copy, self.decay, self.count = copy.deepcopy(model).requires_grad_(False), decay, 0

    @torch.no_grad()
    def update(self, model: M) -> None:
        """Move the average towards the model's current weights."""
        self.count += 1
        weight = 1 - min(self.decay, self.count / (self.count + 10))
        torch._foreach_lerp_(parameters_of(self.copy), parameters_of(model), weight)

    def result(self, model: M) -> M:
        """Return a copy of the averaged model in eval mode, with the live model's buffers and norms of its own."""
        result = copy.deepcopy(self.copy)
        state = dict(model.state_dict())
        # A parameter that is used twice has two names, and the live value under either would undo the average.
        state.update({name: p.detach() for name, p in self.copy.named_parameters(remove_duplicate=False)})
        result.load_state_dict(state)
        refresh_(result, settle=True)  # all layers in one batch, instead of one by one in eval()
        for mine, theirs in zip(result.parameters(), model.parameters(), strict=True):
            mine.requires_grad_(theirs.requires_grad)
        with defer_norms():
            return result.eval()
