"""The optimiser: its parameter groups and its learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .objective import Objective
from .settings import Training


def make_optimiser(objective: Objective, settings: Training) -> torch.optim.Optimizer:
    """Create the optimiser, with one parameter group per weight decay; on a GPU it can be captured in a CUDA graph."""
    groups, lr = parameter_groups(objective, settings), settings.learning_rate
    cuda = groups[0]["params"][0].is_cuda
    for group in groups:
        group["lr"] = torch.tensor(lr, device=groups[0]["params"][0].device) if cuda else lr
    if settings.optimiser == "sgd":
        # Fused SGD reads the learning rate from the device; on a CPU not every processor has a fused version.
        fused, nesterov = True if cuda else None, settings.nesterov and settings.momentum > 0
        return torch.optim.SGD(groups, lr, momentum=settings.momentum, nesterov=nesterov, fused=fused)
    if settings.optimiser == "adamax":
        return torch.optim.Adamax(groups, lr, betas=settings.betas, capturable=cuda)
    return torch.optim.AdamW(groups, lr, betas=settings.betas, fused=True, capturable=cuda)


def parameter_groups(objective: Objective, settings: Training) -> list[dict[str, Any]]:
    """Group the parameters by weight decay.

    Weights of residual branches and conditioners get `weight_decay`, weights of the head `head_decay`, everything else
    (biases, scales, the base) `other_decay`.
    """
    branches, head, rest = [], [], []
    for name, parameter in objective.named_parameters():
        inside = any(part in name for part in (".g.", ".conditioner.", ".lazy."))  # blocks, couplings, zuko's flows
        if name.endswith(".original") or (inside and parameter.dim() > 1):
            branches.append(parameter)
        elif name.startswith("model.head.") and parameter.dim() > 1:
            head.append(parameter)
        else:
            rest.append(parameter)
    pairs = ((branches, settings.weight_decay), (head, settings.head_decay), (rest, settings.other_decay))
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in pairs if parameters]


def set_learning_rate(optimiser: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of every parameter group, in place: a CUDA graph reads it from the device."""
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate
