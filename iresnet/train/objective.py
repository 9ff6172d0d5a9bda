"""Objectives: modules that map a batch to a loss and metrics. DDP, torch.compile and CUDA graphs wrap these.

density           -log p(x)
classification    cross-entropy of the logits
margin            the same, with every other logit raised by the most that a perturbation within a radius can change it
joint             density * (-log p(x), in bits per dimension) + weight * cross-entropy; samples without a label (-1)
                  contribute to the density term only, which makes this semi-supervised learning

Discrete data (`levels`) are dequantised for the density, so that the loss is a bound on -log P of the integers (with
learned noise, -log p plus ln q of the noise: `dequantisation`). The classifier sees them at the centres of their bins.
The logged metrics are true values (nats are nats, errors are errors of this batch), with the log-determinant as the
model's estimator gives it; never a surrogate that only has the right gradient.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeAlias, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..allowed import Rule, check_settings, in_interval, minimum
from ..classifier import Classifier
from ..data import Augment
from ..data.augment import Shifted
from ..data.labels import MISSING
from ..data.units import bin_centres, nats_per_bit_per_dim, nats_per_unit, unit_name
from ..flow import Flow
from ..hybrid import Hybrid
from ..logdet import Estimator
from ..shard import batch_count, batch_mean, own_rows, take_own
from ..transforms.dequantisation import LearnedNoise, dequantise_for, learned_noise
from ..trust import NoBoundKnown
from .margin import class_vectors, pairwise_distances, requested_lipschitz

#: Scale of the logits in the margin loss: nats per radius.
SHARPNESS = 2.0

Loss: TypeAlias = tuple[Tensor, dict[str, Tensor]]


class Objective(nn.Module, ABC):
    """A model with a loss. `forward` returns the loss to minimise and detached metrics by name.

    If several processes share the batch (`shard`), `forward` gets the whole batch and computes the loss of its own
    rows, scaled so that the average over the processes is the loss of the batch.
    """

    model: nn.Module

    #: Whether the loss needs log-determinants; False if it uses only the model's code.
    needs_logdet: bool = True

    @abstractmethod
    def forward(self, x: Tensor, y: Tensor | None = None, *, estimator: Estimator | None = None,
                generator: torch.Generator | None = None) -> Loss:  # fmt: skip
        """Return (loss, metrics) of a batch x with labels y; `estimator` replaces the model's own, if given."""


class MaximumLikelihood(Objective):
    """-log p(x), averaged over the batch: density estimation. Metrics: `nats`, or `bits/dim` for discrete data."""

    model: Flow

    def __init__(self, model: Flow, levels: int | None = None) -> None:
        super().__init__()
        self.model, self.levels = model, levels
        if learned_noise(model) is None and any(isinstance(m, LearnedNoise) for m in model.modules()):
            raise ValueError(
                f"a {type(model).__name__} hides the learned noise of the flow it wraps. Wrap the objective instead."
            )

    def forward(self, x: Tensor, y: Tensor | None = None, *, estimator: Estimator | None = None,
                generator: torch.Generator | None = None) -> Loss:  # fmt: skip
        with own_rows(x) as rows:
            point, spent = dequantise_for(self.model, rows, self.levels, generator)
            nats = batch_mean(spent - self.model(point, estimator=estimator, generator=generator))
        loss = nats / nats_per_unit(x.shape[1:], self.levels)
        return loss, {unit_name(self.levels): loss.detach()}


class Classification(Objective):
    """Cross-entropy, optionally with label smoothing. Metrics: `cross-entropy`, `error %`."""

    model: Classifier
    needs_logdet = False

    def __init__(self, model: Classifier, levels: int | None = None, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.model, self.levels, self.label_smoothing = model, levels, label_smoothing

    def forward(self, x: Tensor, y: Tensor | None = None, *, estimator: Estimator | None = None,
                generator: torch.Generator | None = None) -> Loss:  # fmt: skip
        with own_rows(x) as rows:
            logits = self.model(bin_centres(rows, self.levels))
        return cross_entropy(logits, y, self.label_smoothing)


class Margin(Objective):
    """Cross-entropy with a Lipschitz margin (Tsuzuku, Sato and Sugiyama, 2018): predictions certified within a radius.

    With logits w_j . z + b_j of the code z = F(x) and K >= Lip(F), moving x by at most `radius` raises the logit of
    class j relative to that of class y by at most radius K ||w_y - w_j||. The loss adds that amount to every logit j,
    so a sample that is still classified correctly is correct in the whole ball. The raised logits are divided by
    radius K / SHARPNESS, since a constrained head cannot scale them itself. K follows from the requested coefficients,
    which a released model is proven to satisfy. Metrics: `loss`, which is minimised; `cross-entropy` and `error %` of
    the plain logits; `certified %`, the samples that are correct in the whole ball.
    """

    model: Classifier
    needs_logdet = False

    def __init__(
        self, model: Classifier, levels: int | None = None, label_smoothing: float = 0.0, *, radius: float
    ) -> None:
        super().__init__()
        self.model, self.levels, self.label_smoothing, self.radius = model, levels, label_smoothing, radius
        try:
            class_vectors(model.head), requested_lipschitz(model.transform)
        except NoBoundKnown as error:
            raise ValueError(f"radius = {radius:g} needs a bound for the whole network. {error}") from None

    def forward(self, x: Tensor, y: Tensor | None = None, *, estimator: Estimator | None = None,
                generator: torch.Generator | None = None) -> Loss:  # fmt: skip
        with own_rows(x) as rows:
            logits = self.model(bin_centres(rows, self.levels))
        _, metrics = cross_entropy(logits, y)
        assert y is not None
        reach = self.radius * requested_lipschitz(self.model.transform)
        distances = pairwise_distances(class_vectors(self.model.head))[take_own(y).clamp_min(0)]
        raised = logits + reach * distances.to(logits.dtype)
        loss, raised_metrics = cross_entropy(raised * (SHARPNESS / reach), y, self.label_smoothing)
        certified = {"certified %": 100 - raised_metrics["error %"]}
        return loss, {"loss": loss.detach(), **metrics, **certified}


class Joint(Objective):
    """density * -log p(x) in bits per dimension + weight * cross-entropy of the same code: the loss of a hybrid.

    With `augment`, the cross-entropy is computed on an augmented copy of the batch, and the density on the original.
    With `labelled`, the cross-entropy is that of the last `labelled` samples of a batch, and the density that of the
    others (`Batches`). With `density = 0` no likelihood is computed.
    Metrics: `loss`, `bits/dim` or `nats` unless `density = 0`, `cross-entropy`, `error %`.
    """

    model: Hybrid

    def __init__(
        self,
        model: Hybrid,
        levels: int | None = None,
        *,
        weight: float = 1.0,
        density: float = 1.0,
        label_smoothing: float = 0.0,
        augment: Augment | None = None,
        labelled: int = 0,
    ) -> None:
        super().__init__()
        self.model, self.levels, self.weight, self.density = model, levels, weight, density
        self.label_smoothing, self.augment, self.labelled = label_smoothing, augment, labelled
        self.needs_logdet = density > 0

    def forward(self, x: Tensor, y: Tensor | None = None, *, estimator: Estimator | None = None,
                generator: torch.Generator | None = None) -> Loss:  # fmt: skip
        first = len(x) - self.labelled if self.labelled else 0  # of the samples whose class is predicted
        metrics: dict[str, Tensor] = {}
        loss, logits = x.new_zeros((), dtype=torch.get_default_dtype()), None
        if self.density:
            with own_rows(x[:first] if first else x) as rows:
                point, _ = dequantise_for(self.model, rows, self.levels, generator)
                log_prob, logits = self.model(point, estimator=estimator, generator=generator)
                nats = -batch_mean(log_prob)
            metrics[unit_name(self.levels)] = (nats / nats_per_unit(x.shape[1:], self.levels)).detach()
            loss = self.density * nats / nats_per_bit_per_dim(x.shape[1:])
        if logits is None or first or self.augment is not None:
            with own_rows(x[first:]) as rows:
                logits = self._logits(rows, generator)
        ce, classes = cross_entropy(logits, None if y is None else y[first:], self.label_smoothing)
        loss = loss + self.weight * ce
        return loss, {"loss": loss.detach(), **metrics, **classes}

    def _logits(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """The logits of the samples, augmented."""
        if self.augment is not None:
            x = self.augment(x, generator or torch.default_generator)
        return self.model.logits(dequantise_for(self.model, x, self.levels, generator)[0])


def cross_entropy(logits: Tensor, y: Tensor | None, label_smoothing: float = 0.0) -> Loss:
    """Return the mean cross-entropy over the labelled samples, and metrics; zero if no sample has a label.

    If several processes share the batch, the logits are those of the own rows, and y are all labels.
    """
    if y is None:
        raise ValueError("this objective needs labels; the data have none. Use objective.kind = 'density'.")
    count = batch_count((y != MISSING).sum().clamp_min(1))
    y = take_own(y)
    loss = F.cross_entropy(logits, y, ignore_index=MISSING, label_smoothing=label_smoothing, reduction="sum") / count
    wrong = ((logits.argmax(dim=1) != y) & (y != MISSING)).sum()
    return loss, {"cross-entropy": loss.detach(), "error %": 100 * wrong / count}


ObjectiveKind: TypeAlias = Literal["density", "classification", "hybrid", "semi-supervised"]
OBJECTIVE_KINDS: tuple[str, ...] = get_args(ObjectiveKind)
#: Objectives of models with both a base and a head.
HYBRID_KINDS = ("hybrid", "semi-supervised")
FINITE = Rule(lambda radius: 0 <= radius < math.inf, "must be finite and not negative")


@dataclass(frozen=True)
class ObjectiveSettings:
    """Settings of the objective: what to train for."""

    #: semi-supervised: a hybrid for data in which some labels are missing.
    kind: ObjectiveKind = "hybrid"
    #: For hybrids: weight of the cross-entropy, relative to the bits per dimension.
    weight: Annotated[float, minimum(0)] = 1.0
    #: For hybrids: weight of the bits per dimension; 0: the same network, trained for its classes alone.
    density: Annotated[float, FINITE] = 1.0
    #: Label smoothing of the cross-entropy.
    label_smoothing: Annotated[float, in_interval("[0, 1)")] = 0.0
    #: For hybrids: the fraction of images that are shifted, by up to `data.shift`, in the copy of the batch that the
    #: cross-entropy is computed on.
    shifted: Shifted = 0.0
    #: For classifiers: train for predictions that are certified within this radius, in units of x (grey levels).
    radius: Annotated[float, FINITE] = 0.0

    def __post_init__(self) -> None:
        check_settings(self)
        if self.density != 1 and self.kind not in HYBRID_KINDS:
            raise ValueError(f"density is for hybrids; got {self.density} for kind = {self.kind!r}. Set density = 1.")
        if self.radius and self.kind != "classification":
            raise ValueError(
                f"radius is for kind = 'classification'; got {self.radius} for {self.kind!r}. Set radius = 0."
            )
        if not (self.weight or self.density):
            raise ValueError("weight and density must not both be 0, which trains for nothing. Raise one of them.")

    def build_objective(
        self, model: nn.Module, levels: int | None, augment: Augment | None = None, labelled: int = 0
    ) -> Objective:
        """Return the objective for a model that was built for this kind.

        `augment` is the data augmentation; `labelled` samples at the end of every batch are for the cross-entropy of a
        hybrid.
        """
        if self.kind == "density":
            return MaximumLikelihood(cast(Flow, model), levels)
        if self.kind == "classification" and self.radius:
            return Margin(cast(Classifier, model), levels, self.label_smoothing, radius=self.radius)
        if self.kind == "classification":
            return Classification(cast(Classifier, model), levels, self.label_smoothing)
        augment = (
            replace(augment, shifted=self.shifted) if augment is not None and augment.shift and self.shifted else None
        )
        return Joint(
            cast(Hybrid, model), levels, weight=self.weight, density=self.density,
            label_smoothing=self.label_smoothing, augment=augment, labelled=labelled,
        )  # fmt: skip
