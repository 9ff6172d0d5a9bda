"""Objectives: a batch in, a loss and the figures to watch out. The one thing that DDP, compile and graphs wrap.

density           -log p(x)
classification    cross-entropy of the logits
joint             -log p(x), in bits per dimension, + weight * cross-entropy; rows whose label is missing (-1) count for
                  the density alone, which is what semi-supervised learning is

Discrete data (`levels`) are dequantised for the density, so that the loss is a bound on -log P of the integers, and
taken at the middle of their bins for the classifier. The figures logged are what they say (nats are nats, errors are
errors of this batch), with the log-determinant as the model's estimator gives it; never a surrogate whose gradient
happens to be right.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .classifier import Classifier
from .data import Augment
from .flow import Flow
from .hybrid import Hybrid
from .preprocess import dequantise

#: The label of a row whose label is missing.
MISSING = -1

Loss: TypeAlias = tuple[Tensor, dict[str, Tensor]]


class Objective(nn.Module, ABC):
    """A model with a loss. `forward` returns the loss to minimise and detached figures by name."""

    model: nn.Module

    @abstractmethod
    def forward(self, x: Tensor, y: Tensor | None = None, *, generator: torch.Generator | None = None) -> Loss:
        """(loss, figures) of a batch x with labels y."""


class MaximumLikelihood(Objective):
    """-log p(x), averaged over the batch: density estimation. Figures: `nats`, or `bits/dim` for discrete data."""

    model: Flow

    def __init__(self, model: Flow, levels: int | None = None) -> None:
        super().__init__()
        self.model, self.levels = model, levels

    def forward(self, x: Tensor, y: Tensor | None = None, *, generator: torch.Generator | None = None) -> Loss:
        nats = -self.model(continuous(x, self.levels, generator), generator=generator).mean()
        loss = nats / unit(x, self.levels)
        return loss, {unit_name(self.levels): loss.detach()}


class Classification(Objective):
    """Cross-entropy, with smoothed labels if asked. Figures: `cross-entropy`, `error %`."""

    model: Classifier

    def __init__(self, model: Classifier, levels: int | None = None, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.model, self.levels, self.label_smoothing = model, levels, label_smoothing

    def forward(self, x: Tensor, y: Tensor | None = None, *, generator: torch.Generator | None = None) -> Loss:
        return cross_entropy(self.model(centred(x, self.levels)), y, self.label_smoothing)


class Joint(Objective):
    """-log p(x) per dimension in bits + weight * cross-entropy of the same code: a hybrid's loss.

    With `augment`, the cross-entropy is that of an augmented copy of the batch, while the density sees the data as they
    are. Figures: `loss`, `bits/dim` or `nats`, `cross-entropy`, `error %`.
    """

    model: Hybrid

    def __init__(
        self,
        model: Hybrid,
        levels: int | None = None,
        *,
        weight: float = 1.0,
        label_smoothing: float = 0.0,
        augment: Augment | None = None,
    ) -> None:
        super().__init__()
        self.model, self.levels, self.weight = model, levels, weight
        self.label_smoothing, self.augment = label_smoothing, augment

    def forward(self, x: Tensor, y: Tensor | None = None, *, generator: torch.Generator | None = None) -> Loss:
        log_prob, logits = self.model(continuous(x, self.levels, generator), generator=generator)
        nats = -log_prob.mean()
        if self.augment is not None:
            logits = self.model.logits(
                continuous(self.augment(x, generator or torch.default_generator), self.levels, generator)
            )
        ce, figures = cross_entropy(logits, y, self.label_smoothing)
        density = nats / unit(x, self.levels)
        per_dimension = nats / (math.prod(x.shape[1:]) * math.log(2))
        loss = per_dimension + self.weight * ce
        return loss, {"loss": loss.detach(), unit_name(self.levels): density.detach(), **figures}


def cross_entropy(logits: Tensor, y: Tensor | None, label_smoothing: float = 0.0) -> Loss:
    """The mean over the rows that have a label, and the error among them in percent; zero where none has one."""
    if y is None:
        raise ValueError("this objective learns from labels; the data have none. Use the objective 'density'.")
    labelled = y != MISSING
    count = labelled.sum().clamp_min(1)
    loss = F.cross_entropy(logits, y, ignore_index=MISSING, label_smoothing=label_smoothing, reduction="sum") / count
    wrong = ((logits.argmax(dim=1) != y) & labelled).sum()
    return loss, {"cross-entropy": loss.detach(), "error %": 100 * wrong / count}


def continuous(x: Tensor, levels: int | None, generator: torch.Generator | None = None) -> Tensor:
    """What a density is asked about: integers dequantised, other data as they are."""
    return x if levels is None else dequantise(x, levels, generator)


def centred(x: Tensor, levels: int | None) -> Tensor:
    """What a classifier is asked about: integers at the middle of their bins, other data as they are."""
    return x if levels is None else x.to(torch.get_default_dtype()) + 0.5


def unit(x: Tensor, levels: int | None) -> float:
    """Nats in the unit that is logged: bits per dimension for discrete data, nats otherwise."""
    return 1.0 if levels is None else math.prod(x.shape[1:]) * math.log(2)


def unit_name(levels: int | None) -> str:
    """The name of that unit."""
    return "nats" if levels is None else "bits/dim"


PURPOSES = ("density", "classification", "hybrid", "semi-supervised")


@dataclass(frozen=True)
class Aim:
    """What to train for, as settings.

    `kind` is density, classification, hybrid, or semi-supervised (a hybrid whose labels are missing for some rows);
    `weight` is that of the cross-entropy beside the bits per dimension of a hybrid. With `shifted`, a hybrid's
    cross-entropy is that of a copy of the batch in which this part of the images is shifted by up to `data.shift`.
    """

    kind: str = "hybrid"
    weight: float = 1.0
    label_smoothing: float = 0.0
    shifted: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in PURPOSES:
            raise ValueError(f"kind must be one of {', '.join(PURPOSES)}; got {self.kind!r}.")
        if self.weight < 0:
            raise ValueError(f"weight must not be negative; got {self.weight}.")
        if not 0 <= self.shifted <= 1:
            raise ValueError(f"shifted is the part of the images that is shifted, in [0, 1]; got {self.shifted}.")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must lie in [0, 1); got {self.label_smoothing}.")

    def objective(self, model: nn.Module, levels: int | None, augment: Augment | None = None) -> Objective:
        """The loss for a model that was built for this aim; `augment` is how the data are augmented."""
        if self.kind == "density":
            return MaximumLikelihood(cast(Flow, model), levels)
        if self.kind == "classification":
            return Classification(cast(Classifier, model), levels, self.label_smoothing)
        augment = (
            replace(augment, shifted=self.shifted) if augment is not None and augment.shift and self.shifted else None
        )
        return Joint(
            cast(Hybrid, model), levels, weight=self.weight, label_smoothing=self.label_smoothing, augment=augment
        )
