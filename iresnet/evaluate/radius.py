"""The certified radius of a sample: within it, its class cannot change.

With logits w_j . z + b_j of the code z = F(x) and K >= Lip(F), the margin to class j cannot fall faster than

    (f_y - f_j)(x') >= (f_y - f_j)(x) - K ||w_y - w_j|| ||x' - x||,

so the class is fixed within  r(x) = min over j of (f_y - f_j)(x) / (K ||w_y - w_j||)  (Tsuzuku et al., 2018).
K is the certificate's Lip(F): the product of one factor per block, 1 + Lip(g), or 1 if g is a `Potential`, and of the
Lipschitz constant of the scaling; w is the linear map from the whole code, including pooling. Distances are Euclidean
and in the units of x: grey levels for images, so that 36 of 255 is what other work calls 36/255.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..branch import unconstrained_copy
from ..chain import Chain
from ..classifier import Classifier
from ..data import Dataset
from ..data.labels import MISSING
from ..data.units import bin_centres
from ..model import Model
from ..multiscale import Multiscale
from ..progress import each
from ..proof import sample_norms
from ..train.margin import class_vectors
from ..transform import Transform, check_eval, flat_steps, stretch_of
from ..transforms.columns import ColumnTransform
from ..trust import NoBoundKnown, why_untrusted
from .chunks import CHUNK
from .classes import require_labels
from .roles import as_classifier

#: The allowance for rounding in float64, relative to the numbers in a head and to radii: more than n units in the last
#: place for sums of n = 10^4 products.
ROUNDING = 1e-11


@torch.no_grad()
def certified_radius(model: Model, data: Dataset) -> Tensor:
    """Compute the radius within which every sample provably keeps its correct class, in float64 and the units of x.

    It is 0 for a misclassified sample. With a `Logit` the ball is limited to inputs inside [0, levels], where the data
    are, and with a `ColumnTransform` to the part of its intervals that the data may fill (`clamp`): the slope has no
    bound outside, and the radius of a sample there is 0. Raises `NoBoundKnown` for a head that is not linear and for a
    transform without a proven bound, or with one for a part of the inputs of its parts only.
    """
    classifier, y = classifier_in_eval(model), require_labels(data)
    class_vectors(classifier.head)  # refuses the live head: a copy may have lost what makes it another function
    constant = lipschitz_bound(model, data)
    head = unconstrained_copy(classifier.head).double()
    size = _head_size(head)
    distances = _pairwise_distances(class_vectors(head), 0.0 if _is_one_matrix(head) else ROUNDING * size)
    limited = limited_part(classifier.transform)

    def radius(rows: Tensor) -> Tensor:
        point = bin_centres(data.x[rows], data.schema.levels).double()
        z, error = forward_with_error(classifier.transform, point)
        rounding = ROUNDING * size * (1 + sample_norms(z))
        radii = _radius(head(z), y[rows], constant, distances, error, rounding)
        return radii if limited is None else torch.where(limited.has_bound_at(point), radii, 0.0)

    radii = torch.cat(each(radius, torch.split(torch.arange(len(y), device=y.device), CHUNK)))
    return torch.where(y == MISSING, 0.0, radii.clamp_min(0))


def lipschitz_bound(model: Model, data: Dataset) -> float:
    """Return the proven Lip(F) of a model's transform for samples of this shape; raise `NoBoundKnown` without one."""
    transform = classifier_in_eval(model).transform
    stretch = stretch_of(transform, data.schema.shape)
    if reason := why_untrusted(model):
        raise NoBoundKnown(reason)
    if transform.takes_context:
        raise NoBoundKnown("The bound of a map with a context holds for one context, and not where that changes too.")
    columns = limited_part(transform)
    if isinstance(columns, ColumnTransform) and not math.isfinite(columns.stretch().forward):
        raise NoBoundKnown(
            "A positive column has a logarithm, whose slope near 0 has no bound. Train a classifier, which only "
            "standardises, or declare a smallest value: --kind COLUMN=bounded:LOWER:UPPER."
        )
    if not math.isfinite(stretch.forward):
        raise NoBoundKnown("A block has no Lipschitz bound; `certify` says which and why.")
    if not stretch.proven:
        raise NoBoundKnown(
            "A constant was asserted, or a transform is unknown; a certified radius needs a proof for all of them. "
            "`certify` says which."
        )
    return stretch.forward


def limited_part(transform: Transform) -> Transform | None:
    """Return the transform whose bound holds for a part of its inputs only (`has_bound_at`), None if there is none.

    Raises `NoBoundKnown` unless it comes first: otherwise its input is not a sample, but what others make of it.
    """
    found = [t for t in transform.modules() if isinstance(t, Transform) and t.bound_is_limited]
    if not found:
        return None
    if found != [next(flat_steps(transform))]:
        raise NoBoundKnown(
            f"The bound of {type(found[-1]).__name__} holds for a part of its inputs only, which is known of samples, "
            "and not of what another transform makes of them. Let it be the first."
        )
    return found[0]


def forward_with_error(transform: Transform, x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute F(x) in float64 and a bound of its rounding error: that of every part, propagated through the rest."""
    error = x.new_zeros(len(x))

    def step(part: Transform, x: Tensor) -> Tensor:
        nonlocal error
        if isinstance(part, Chain):
            for t in part:
                x = step(t, x)
            return x
        if isinstance(part, Multiscale):
            return part.run_forward(x, step)
        z, shape = part.reference(x), tuple(x.shape[1:])
        own = part.rounding(shape).residual_bound(torch.zeros_like(error), sample_norms(x) + error, sample_norms(z))
        # What was already split off to the code keeps its error, so the factor is at least one.
        error = (max(1.0, part.stretch(shape).forward) * error + own) * (1 + ROUNDING)
        return z

    return step(transform, x), error


def _head_size(head: nn.Module) -> float:
    """A bound of the numbers in a linear head for a code of norm one: the product of norms of weights and biases."""
    layers = [layer for layer in head.modules() if isinstance(layer, nn.Linear)]
    return math.prod(1 + sum(float(p.norm()) for p in layer.parameters()) for layer in layers)


def _radius(logits: Tensor, y: Tensor, constant: float, distances: Tensor, error: Tensor, rounding: Tensor) -> Tensor:
    """min over j of the margin f_y - f_j, divided by its Lipschitz constant, rounded down; infinite for equal classes.

    `error` bounds the error of the codes, `rounding` that of the logits.
    """
    y = y.clamp_min(0)
    margins = logits.gather(1, y[:, None]) - logits - 2 * rounding[:, None] - distances[y] * error[:, None]
    radii = torch.where(margins > 0, margins / (constant * distances[y]), 0.0)
    return radii.scatter(1, y[:, None], math.inf).amin(dim=1) * (1 - ROUNDING)


def _is_one_matrix(head: nn.Module) -> bool:
    """Whether the class vectors of a head are rows of a stored matrix, and not computed from several numbers."""
    pooled = any(getattr(m, "pool", False) for m in head.modules())
    return not pooled and sum(isinstance(layer, nn.Linear) for layer in head.modules()) == 1


def _pairwise_distances(v: Tensor, error: float) -> Tensor:
    """||v_i - v_j|| without cancellation, rounded up; 0 only for equal vectors. `error` is that of the vectors."""
    tiny = math.sqrt(v.shape[1]) * 2.0**-511  # squares of smaller numbers underflow
    rows = [torch.where((v == row).all(dim=1), 0.0, (v - row).norm(dim=1) + tiny) for row in v]
    return torch.stack(rows) * (1 + ROUNDING) + error


def classifier_in_eval(model: Model) -> Classifier:
    """Return the classifier of a model in eval mode; raise a `ValueError` if it has none, or is in training."""
    check_eval(model, "robustness")
    return as_classifier(model, "robustness needs a classifier")
