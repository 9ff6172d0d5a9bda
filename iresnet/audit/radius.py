"""Check certified radii by an attack: within a radius, no step may change the class."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from ..data import Dataset
from ..evaluate import certified_radius, has_head
from ..train.margin import class_vectors
from .subject import Skipped, Subject, Verdict, lengths, normalise

#: Gradient steps, and starts.
STEPS, STARTS = 10, 2


def check_radius(s: Subject) -> Verdict:
    """Projected gradient descent on f_y - max f_j within the certified radius of every sample."""
    if not has_head(s.model):
        raise Skipped("the model is not a classifier")
    class_vectors(cast(nn.Module, s.model.head))  # says why a head has no radius, before anything is computed
    levels = s.schema.levels
    rows = s.samples.float() if levels is None else s.samples.to(torch.uint8)
    x = rows.double() + (0.0 if levels is None else 0.5)
    y = _logits(s, x).argmax(1)
    certified = certified_radius(s.model, Dataset(rows, y, s.schema))
    margins = torch.stack([_attack(s, x, y, certified * (1 - 1e-9), start) for start in range(STARTS)]).amin(0)
    fooled, largest = int((margins < 0).sum()), float(certified.max())
    words = f"{fooled} of {len(x)} samples change their class within radii of up to {largest:.3g}"
    return fooled == 0, f"{words}; smallest margin {float(margins.min()):.2g}"


def _logits(s: Subject, x: Tensor) -> Tensor:
    logits: Tensor = s.plain.head(s.transform(x))  # type: ignore[operator]
    return logits


def _attack(s: Subject, x: Tensor, y: Tensor, within: Tensor, start: int) -> Tensor:
    """The smallest margin of every sample during the attack."""
    size = within.reshape(-1, *[1] * (x.dim() - 1))
    change = start * size * normalise(torch.randn(x.shape, generator=s.generator("attack"), dtype=x.dtype))
    left = torch.full((len(x),), math.inf, dtype=torch.float64)
    for _ in range(STEPS):
        at = (x + change).detach().requires_grad_()
        logits = _logits(s, at)
        margin = logits.gather(1, y[:, None])[:, 0] - logits.scatter(1, y[:, None], -math.inf).amax(1)
        left = torch.minimum(left, margin.detach())
        change = change - 2.5 / STEPS * size * normalise(torch.autograd.grad(margin.sum(), at)[0])
        change = change * (within / lengths(change).clamp_min(1e-300)).clamp_max(1.0).reshape(size.shape)
        change = s.clamp(x + change) - x
    return left
