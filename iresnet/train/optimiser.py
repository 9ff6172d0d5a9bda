"""The optimiser of an objective: its groups of parameters, and its rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .objective import Objective
from .settings import Training


def make_optimiser(objective: Objective, settings: Training) -> torch.optim.Optimizer:
    """The optimiser, with one group of parameters for each rate of decay; on a GPU one that a graph can capture."""
    groups, rate = parameter_groups(objective, settings), settings.learning_rate
    cuda = groups[0]["params"][0].is_cuda
    for group in groups:
        group["lr"] = torch.tensor(rate, device=groups[0]["params"][0].device) if cuda else rate
    if settings.optimiser == "sgd":
        # Fused, SGD reads the rate from the device; on a CPU it has no fused form for every processor.
        fused, nesterov = True if cuda else None, settings.nesterov and settings.momentum > 0
        return torch.optim.SGD(groups, rate, momentum=settings.momentum, nesterov=nesterov, fused=fused)
    if settings.optimiser == "adamax":
        return torch.optim.Adamax(groups, rate, betas=settings.betas, capturable=cuda)
    return torch.optim.AdamW(groups, rate, betas=settings.betas, fused=True, capturable=cuda)


def parameter_groups(objective: Objective, settings: Training) -> list[dict[str, Any]]:
    """Weights of branches and conditioners, those of the head, and the rest (biases, scales, the base), undecayed."""
    branches, head, rest = [], [], []
    for name, parameter in objective.named_parameters():
        inside = any(place in name for place in (".g.", ".conditioner.", ".lazy."))  # of blocks, couplings, zuko's
        if name.endswith(".original") or (inside and parameter.dim() > 1):
            branches.append(parameter)
        elif name.startswith("model.head.") and parameter.dim() > 1:
            head.append(parameter)
        else:
            rest.append(parameter)
    pairs = ((branches, settings.weight_decay), (head, settings.head_decay), (rest, 0.0))
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in pairs if parameters]


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group, where it lives: a captured step reads it from the device."""
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
