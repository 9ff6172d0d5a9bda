"""Objectives: a batch in, a loss and the figures to watch out. The one thing that DDP, compile and graphs wrap.

density           -log p(x)
classification    cross-entropy of the logits
margin            the same, after the other classes got ahead by all that a change of x of a given length can do
joint             -log p(x), in bits per dimension, + weight * cross-entropy; rows whose label is missing (-1) count for
                  the density alone, which is what semi-supervised learning is

Discrete data (`levels`) are dequantised for the density, so that the loss is a bound on -log P of the integers (if the
noise is learned, -log p plus ln q of the noise: `dequantisation`), and taken at the middle of their bins for the
classifier. The figures logged are what they say (nats are nats, errors are errors of this batch), with the
log-determinant as the model's estimator gives it; never a surrogate whose gradient happens to be right.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, TypeAlias, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import lipschitz as lip
from ..allowed import Rule, check_settings, in_interval, minimum
from ..branch import requested_bound
from ..classifier import Classifier
from ..data import Augment
from ..data.augment import Shifted
from ..flow import Flow
from ..hybrid import Hybrid
from ..logdet import Estimator
from ..models import Readout
from ..multiscale import Multiscale
from ..residual import ResidualBlock
from ..transform import Transform
from ..transforms.dequantisation import LearnedNoise, dequantise_for, learned_noise
from ..transforms.elementary import ActNorm
from ..transforms.preprocess import Standardise, dequantise
from ..trust import NoBoundKnown, why_untrusted

#: The label of a row whose label is missing.
MISSING = -1

#: How steep the loss of a margin is: by so many nats a radius.
SHARPNESS = 2.0

Loss: TypeAlias = tuple[Tensor, dict[str, Tensor]]


class Objective(nn.Module, ABC):
    """A model with a loss. `forward` returns the loss to minimise and detached figures by name."""

    model: nn.Module

    #: Whether the loss takes log-determinants; False where the model's code alone is asked for.
    needs_logdet: ClassVar[bool] = True

    @abstractmethod
    def forward(self, x: Tensor, y: Tensor | None = None, *, estimator: Estimator | None = None,
                generator: torch.Generator | None = None) -> Loss:  # fmt: skip
        """(loss, figures) of a batch x with labels y; `estimator` stands for the model's own, where it has one."""


class MaximumLikelihood(Objective):
    """-log p(x), averaged over the batch: density estimation. Figures: `nats`, or `bits/dim` for discrete data."""

    model: Flow

    def __init__(self, model: Flow, levels: int | None = None) -> None:
        super().__init__()
        self.model, self.levels = model, levels
        if learned_noise(model) is None and any(isinstance(m, LearnedNoise) for m in model.modules()):
            raise ValueError(
                f"the noise of this flow is hidden by the {type(model).__name__} around it. Wrap the objective instead."
            )

    def forward(self, x: Tensor, y: Tensor | None = None, *, estimator: Estimator | None = None,
                generator: torch.Generator | None = None) -> Loss:  # fmt: skip
        point, spent = dequantise_for(self.model, x, self.levels, generator)
        nats = (spent - self.model(point, estimator=estimator, generator=generator)).mean()
        loss = nats / nats_per_unit(x, self.levels)
        return loss, {unit_name(self.levels): loss.detach()}


class Classification(Objective):
    """Cross-entropy, with smoothed labels if asked. Figures: `cross-entropy`, `error %`."""

    model: Classifier
    needs_logdet = False

    def __init__(self, model: Classifier, levels: int | None = None, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.model, self.levels, self.label_smoothing = model, levels, label_smoothing

    def forward(self, x: Tensor, y: Tensor | None = None, *, estimator: Estimator | None = None,
                generator: torch.Generator | None = None) -> Loss:  # fmt: skip
        return cross_entropy(self.model(bin_centres(x, self.levels)), y, self.label_smoothing)


class Margin(Objective):
    """Cross-entropy with a Lipschitz margin (Tsuzuku, Sato and Sugiyama, 2018): classes that hold within a radius.

    With logits w_j . z + b_j of the code z = F(x), no x' at most `radius` from x gains class j more than
    radius K ||w_y - w_j|| on class y, K >= Lip(F). The logits of all j get that ahead; what is then classified right is
    right in the whole ball. Logits count in units of radius K / SHARPNESS, since a constrained head cannot scale them.
    K is that of the coefficients asked for, which a released model is proven to keep. Figures: `loss`, which is
    minimised; of plain logits, `cross-entropy` and `error %`; `certified %`, the rows that are right in the ball.
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
        logits = self.model(bin_centres(x, self.levels))
        _, metrics = cross_entropy(logits, y)
        assert y is not None
        one = self.radius * requested_lipschitz(self.model.transform)
        raised = logits + one * pairwise_distances(class_vectors(self.model.head))[y.clamp_min(0)].to(logits.dtype)
        loss, raised_figures = cross_entropy(raised * (SHARPNESS / one), y, self.label_smoothing)
        certified = {"certified %": 100 - raised_figures["error %"]}
        return loss, {"loss": loss.detach(), **metrics, **certified}


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

    def forward(self, x: Tensor, y: Tensor | None = None, *, estimator: Estimator | None = None,
                generator: torch.Generator | None = None) -> Loss:  # fmt: skip
        point = to_continuous(x, self.levels, generator)
        log_prob, logits = self.model(point, estimator=estimator, generator=generator)
        nats = -log_prob.mean()
        if self.augment is not None:
            logits = self.model.logits(
                to_continuous(self.augment(x, generator or torch.default_generator), self.levels, generator)
            )
        ce, metrics = cross_entropy(logits, y, self.label_smoothing)
        density = nats / nats_per_unit(x, self.levels)
        per_dimension = nats / (math.prod(x.shape[1:]) * math.log(2))
        loss = per_dimension + self.weight * ce
        return loss, {"loss": loss.detach(), unit_name(self.levels): density.detach(), **metrics}


def cross_entropy(logits: Tensor, y: Tensor | None, label_smoothing: float = 0.0) -> Loss:
    """The mean over the rows that have a label, and the error among them in percent; zero where none has one."""
    if y is None:
        raise ValueError("this objective learns from labels; the data have none. Use the objective 'density'.")
    labelled = y != MISSING
    count = labelled.sum().clamp_min(1)
    loss = F.cross_entropy(logits, y, ignore_index=MISSING, label_smoothing=label_smoothing, reduction="sum") / count
    wrong = ((logits.argmax(dim=1) != y) & labelled).sum()
    return loss, {"cross-entropy": loss.detach(), "error %": 100 * wrong / count}


def class_vectors(head: nn.Module) -> Tensor:
    """Vectors v_j, one a class, as far apart as the w_j of a head whose logits are w_j . z + b_j: as a matrix, by rows.

    A mean over P positions has the norm 1 / sqrt(P): its columns are scaled by that. `NoBoundKnown` says why a head is
    not linear.

    >>> class_vectors(nn.Sequential(nn.Flatten(), nn.Linear(4, 3))).shape
    torch.Size([3, 4])
    """
    if isinstance(head, Readout) and (reason := why_untrusted(head)):
        raise NoBoundKnown(f"A margin is read off a linear head; {reason}")
    layers = head.layers if isinstance(head, Readout) else head
    v: Tensor | None = None
    for name, layer in lip.leaves(layers):
        where = f"{type(layer).__name__} ({name})" if name else type(layer).__name__
        if isinstance(layer, nn.Linear) and not why_untrusted(layer):
            v = _pooled(layer.weight, head) if v is None else layer.weight @ v
        elif not isinstance(layer, nn.Flatten | nn.Identity) or lip.lipschitz_constant(layer) is None:
            raise NoBoundKnown(
                f"A margin is read off a linear head; this one has {where}. {why_untrusted(layer)}".rstrip()
            )
    if v is None:
        raise NoBoundKnown(f"A margin is read off a linear head; {type(head).__name__} has no linear layer.")
    return v


def _pooled(weight: Tensor, head: nn.Module) -> Tensor:
    """The weight of a head's first layer, its columns scaled where they meet means over positions."""
    if not (isinstance(head, Readout) and head.pool):
        return weight
    return weight * torch.cat([weight.new_full((s[0],), math.prod(s[1:]) ** -0.5) for s in head.shapes])


def pairwise_distances(v: Tensor) -> Tensor:
    """||v_i - v_j|| for all rows i and j, without a table of all differences."""
    others = 1 - torch.eye(len(v), dtype=v.dtype, device=v.device)
    with torch.autocast(v.device.type, enabled=False):  # a difference of squares is none in half precision
        squares = v.square().sum(dim=1)
        return (squares[:, None] + squares - 2 * v @ v.T).clamp_min(torch.finfo(v.dtype).tiny).sqrt() * others


def requested_lipschitz(transform: Transform) -> Tensor | float:
    """Lip(F) for the coefficients asked for: cheap, differentiable in the scales, and nothing is read from a device."""
    if isinstance(transform, ResidualBlock):
        return requested_bound(transform.g).block_lipschitz if transform.asserted is None else 1 + transform.asserted
    if isinstance(transform, ActNorm):
        return transform.log_scale.max().exp()
    if isinstance(transform, Standardise):
        return 1 / transform.std.min()
    parts = transform.parts()
    if not parts:
        own = transform.stretch().forward
        if math.isinf(own):
            raise NoBoundKnown(f"No Lipschitz constant is known for {type(transform).__name__}.")
        return own
    total: Tensor | float = 1.0
    for position, (_, part, _) in enumerate(parts):
        factor = requested_lipschitz(part)
        if position and isinstance(transform, Multiscale):  # what left at an earlier scale is not shrunk by a later one
            factor = torch.as_tensor(factor).clamp_min(1.0)
        total = total * factor
    return total


def to_continuous(x: Tensor, levels: int | None, generator: torch.Generator | None = None) -> Tensor:
    """What a density is asked about: integers dequantised, other data as they are."""
    return x if levels is None else dequantise(x, levels, generator)


def bin_centres(x: Tensor, levels: int | None) -> Tensor:
    """What a classifier is asked about: integers at the middle of their bins, other data as they are."""
    return x if levels is None else x.to(torch.get_default_dtype()) + 0.5


def nats_per_unit(x: Tensor, levels: int | None) -> float:
    """Nats in the unit that is logged: bits per dimension for discrete data, nats otherwise."""
    return 1.0 if levels is None else math.prod(x.shape[1:]) * math.log(2)


def unit_name(levels: int | None) -> str:
    """The name of that unit."""
    return "nats" if levels is None else "bits/dim"


ObjectiveKind: TypeAlias = Literal["density", "classification", "hybrid", "semi-supervised"]
OBJECTIVE_KINDS: tuple[str, ...] = get_args(ObjectiveKind)
RADIUS = Rule(lambda radius: 0 <= radius < math.inf, "must be finite and not negative")


@dataclass(frozen=True)
class ObjectiveSettings:
    """What to train for, as settings."""

    #: Semi-supervised is a hybrid whose labels are missing for some rows.
    kind: ObjectiveKind = "hybrid"
    #: Hybrids: that of the cross-entropy, beside the bits per dimension.
    weight: Annotated[float, minimum(0)] = 1.0
    #: The part of the target that is spread over all classes.
    label_smoothing: Annotated[float, in_interval("[0, 1)")] = 0.0
    #: Hybrids: the cross-entropy is that of a copy of the batch in which this part of the images is shifted, by up to
    #: `data.shift`.
    shifted: Shifted = 0.0
    #: How far x may be moved, in its own units (grey levels), before the class a classifier gives may change.
    radius: Annotated[float, RADIUS] = 0.0

    def __post_init__(self) -> None:
        check_settings(self)
        if self.radius and self.kind != "classification":
            raise ValueError(
                f"radius is for kind = 'classification'; got {self.radius} for {self.kind!r}. Set radius = 0."
            )

    def build_objective(self, model: nn.Module, levels: int | None, augment: Augment | None = None) -> Objective:
        """The loss for a model that was built for this aim; `augment` is how the data are augmented."""
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
            cast(Hybrid, model), levels, weight=self.weight, label_smoothing=self.label_smoothing, augment=augment
        )
