"""The average of a model's weights over its training, which is what a run releases."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ..lipschitz import defer_norms, refresh_


class Average:
    """An exponential moving average of a model's parameters.

    Early on the decay is shortened to step / (step + 10), so that the start is forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.copy, self.decay, self.count = copy.deepcopy(model).requires_grad_(False), decay, 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move towards the model's present weights."""
        self.count += 1
        weight = 1 - min(self.decay, self.count / (self.count + 10))
        torch._foreach_lerp_(list(self.copy.parameters()), [p.detach() for p in model.parameters()], weight)

    def result(self, model: nn.Module) -> nn.Module:
        """A copy of the averaged model in eval, with the live model's buffers and norms of its own."""
        result = copy.deepcopy(self.copy)
        state = dict(model.state_dict())
        # A parameter that is used twice has two names, and the live value under either would undo the average.
        state.update({name: p.detach() for name, p in self.copy.named_parameters(remove_duplicate=False)})
        result.load_state_dict(state)
        refresh_(result, settle=True)  # all at once, so not one by one on the way to eval
        for mine, theirs in zip(result.parameters(), model.parameters(), strict=True):
            mine.requires_grad_(theirs.requires_grad)
        with defer_norms():
            return result.eval()
