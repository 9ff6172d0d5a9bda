"""Robustness: a certified radius within which the class cannot change, and an attack that tries to change it.

With logits w_j . z + b_j of the code z = F(x) and K >= Lip(F), the margin to class j cannot fall faster than

    (f_y - f_j)(x') >= (f_y - f_j)(x) - K ||w_y - w_j|| ||x' - x||,

so the class is fixed within  r(x) = min over j of (f_y - f_j)(x) / (K ||w_y - w_j||)  (Tsuzuku et al., 2018).
K is the certificate's Lip(F): the product of one factor per block, 1 + Lip(g), or 1 if g is a `Potential`, and of the
Lipschitz constant of the scaling; w is the linear map from the whole code, including pooling. Distances are Euclidean
and in the units of x: grey levels for images, so that 36 of 255 is what other work calls 36/255. The attack (projected
gradient descent) searches for inputs of another class; it cannot succeed within a certified radius.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..branch import unconstrained_copy
from ..certificate import residual_blocks
from ..chain import Chain
from ..classifier import Classifier
from ..data import Dataset
from ..data.labels import MISSING
from ..data.units import bin_centres
from ..model import Model
from ..multiscale import Multiscale
from ..precision import full_precision
from ..progress import each
from ..proof import sample_norms
from ..train.objective import class_vectors
from ..transform import Transform, check_eval, stretch_of
from ..transforms.columns import ColumnTransform
from ..trust import NoBoundKnown, why_untrusted
from .chunks import CHUNK
from .classes import as_classifier, error_from_counts, labelled_samples, require_labels
from .classes import logits as dataset_logits

#: Moves points into the range of the data.
Move: TypeAlias = Callable[[Tensor], Tensor]

#: The product of the blocks' factors above which a radius is vacuous.
VACUOUS = 1e3

#: The layers of a linear head.
LINEAR = (nn.Linear, nn.Flatten, nn.Identity, nn.Dropout)

#: The allowance for rounding in float64, relative to the numbers in a head and to radii: more than n units in the last
#: place for sums of n = 10^4 products.
ROUNDING = 1e-11


@dataclass(frozen=True)
class Robustness:
    """Certified accuracy at a radius in percent, with its 95 % interval; at most the accuracy under attack.

    `pixel_radius` is the radius for pixels scaled to [0, 1], if the data are images; `lipschitz` bounds Lip(F);
    `median` is the median certified radius of all samples, None if there are none. `remark` says why nothing is
    certified, if so.
    """

    value: float
    low: float
    high: float
    clean: float
    attacked: float
    radius: float
    pixel_radius: float | None
    median: float | None
    lipschitz: float
    rows: int
    remark: str = ""

    def __str__(self) -> str:
        pixels = "" if self.pixel_radius is None else f" ({self.pixel_radius:.4g} for pixels in [0, 1])"
        text = (
            f"{self.value:.2f} % certified within {self.radius:g}{pixels} (95 % interval {self.low:.2f} to "
            f"{self.high:.2f} %), {self.attacked:.2f} % under attack, {self.clean:.2f} % clean; "
            + ("no radius" if self.median is None else f"median radius {self.median:.3g}")
        )
        text += f", Lip(F) <= {self.lipschitz:.3g}" if math.isfinite(self.lipschitz) else ""
        return f"{text}; {self.remark}" if self.remark else text


def robustness(
    model: Model, data: Dataset, radius: float, *, steps: int = 20, restarts: int = 3, seed: int = 0
) -> Robustness:
    """Compute the certified accuracy at `radius`, next to the accuracy under an attack."""
    classifier = _classifier(model)
    data = labelled_samples(data)
    held = survives_attack(model, data, radius, steps=steps, restarts=restarts, seed=seed)
    radii, constant, remark = _certified(model, data)
    wrong = error_from_counts(len(data) if radii is None else int((radii < radius).sum()), len(data))
    clean = _is_correct(classifier, data)
    if radii is not None and wrong.wrong == len(data) and bool(clean.any()):
        remark = _why_none(model, data, constant, radii, bool(held.any()))
    levels = data.schema.levels
    return Robustness(
        value=100 - wrong.value,
        low=100 - wrong.high,
        high=100 - wrong.low,
        clean=100 * float(clean.double().mean()),
        attacked=100 * float(held.double().mean()),
        radius=radius,
        pixel_radius=None if levels is None else radius / (levels - 1),
        median=None if radii is None else float(radii.median()),
        lipschitz=constant,
        rows=len(data),
        remark=remark,
    )


def _certified(model: Model, data: Dataset) -> tuple[Tensor | None, float, str]:
    """The radii, Lip(F), and why there are no radii; Lip(F) may be known even if margins are not."""
    try:
        constant = lipschitz_bound(model, data)
    except NoBoundKnown as error:
        return None, math.inf, f"no bound is known: {error}"
    try:
        return certified_radius(model, data), constant, ""
    except NoBoundKnown:
        return None, constant, _why_no_margin(model, data, constant)


def _why_no_margin(model: Model, data: Dataset, constant: float) -> str:
    head, remedy = _classifier(model).head, "network.head=[], and without network.bayes"
    names = [type(head).__name__]
    if isinstance(head, nn.Sequential) or hasattr(head, "layers"):
        parts = [m for name, m in head.named_modules() if "parametrizations" not in name and not isinstance(m, LINEAR)]
        names = [type(m).__name__.removesuffix("1d") for m in parts if next(m.children(), None) is None]
    if "BatchNorm" in names:
        remedy = "network.readout=lipschitz"
    anyway = (
        f"; Lip(F) <= {constant:.2g} would make a radius vacuous anyway"
        if _block_factors(model, data) > VACUOUS
        else ""
    )
    which = " and ".join(dict.fromkeys(names))
    return f"the head ({which}) is not linear, so it has no margin{anyway}. Train with {remedy}."


def _block_factors(model: Model, data: Dataset) -> float:
    """The product of the Lipschitz constants of the blocks."""
    return math.prod(block.stretch(at).forward for _, block, at in residual_blocks(model, data.schema.shape))


def _why_none(model: Model, data: Dataset, constant: float, radii: Tensor, survive: bool) -> str:
    """Why no sample is certified: the bound, if samples survive the attack that it does not certify; or the radius."""
    if not survive or _block_factors(model, data) <= VACUOUS:
        return f"the largest certified radius is {float(radii.max()):.3g}"
    blocks = len(list(residual_blocks(model, data.schema.shape)))
    return (
        f"the certified radius is vacuous: Lip(F) <= {constant:.2g}, a product of {blocks} factors, one per block, is "
        'far above the true value. Use branch = "potential", whose factors are 1, or fewer blocks or a smaller '
        "lipschitz, and train with objective.radius."
    )


def lipschitz_bound(model: Model, data: Dataset) -> float:
    """Return the proven Lip(F) of a model's transform for samples of this shape; raise `NoBoundKnown` without one."""
    stretch = stretch_of(_classifier(model).transform, data.schema.shape)
    if reason := why_untrusted(model):
        raise NoBoundKnown(reason)
    columns = _columns(_classifier(model))
    if columns is not None and not math.isfinite(columns.stretch().forward):
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


@torch.no_grad()
def certified_radius(model: Model, data: Dataset) -> Tensor:
    """Compute the radius within which every sample provably keeps its correct class, in float64 and the units of x.

    It is 0 for a misclassified sample. With a `Logit` the ball is limited to inputs inside [0, levels], where the data
    are, and with a `ColumnTransform` to the intervals of its columns: the slope has no bound outside. Raises
    `NoBoundKnown` for a head that is not linear and for a transform without a proven bound.
    """
    classifier, y = _classifier(model), require_labels(data)
    class_vectors(classifier.head)  # refuses the live head: a copy may have lost what makes it another function
    constant, head = lipschitz_bound(model, data), unconstrained_copy(classifier.head).double()
    distances, size = _pairwise_distances(class_vectors(head)), _head_size(head)

    def radius(rows: Tensor) -> Tensor:
        point = bin_centres(data.x[rows], data.schema.levels).double()
        z, error = forward_with_error(classifier.transform, point)
        rounding = ROUNDING * size * (1 + sample_norms(z))
        return _radius(head(z), y[rows], constant, distances, error, rounding)

    radii = torch.cat(each(radius, torch.split(torch.arange(len(y), device=y.device), CHUNK)))
    return torch.where(y == MISSING, 0.0, radii.clamp_min(0))


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


def _pairwise_distances(v: Tensor) -> Tensor:
    """||v_i - v_j|| without cancellation, rounded up."""
    return torch.stack([(v - row).norm(dim=1) for row in v]) * (1 + ROUNDING)


def survives_attack(
    model: Model, data: Dataset, radius: float, *, steps: int = 20, restarts: int = 3, seed: int = 0
) -> Tensor:
    """Which samples are classified correctly and stay so under projected gradient descent from several starts.

    Every step goes 2.5 radius / steps down the gradient of f_y - max f_j, then back into the ball and into the range of
    the data. The first start is x itself, the others are drawn from the ball.
    """
    check_radius(radius)
    for name, value in (("steps", steps), ("restarts", restarts)):
        if value < 1:
            raise ValueError(f"an attack needs {name} of at least 1; got {value}.")
    classifier, y = _classifier(model), require_labels(data)
    inside = _range(classifier, data.schema.levels)
    generator = torch.Generator(data.x.device).manual_seed(seed)
    held = _is_correct(classifier, data)

    def attack(rows: Tensor, *, inner: bool) -> None:
        x = bin_centres(data.x[rows], data.schema.levels)
        noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype) if inner else None
        held[rows] = ~_is_fooled(classifier, x, y[rows], radius * (1 - 1e-6), steps, noise, inside)

    def attack_all(start: int) -> None:
        chunks = torch.split(held.nonzero().flatten(), CHUNK) if bool(held.any()) else ()
        each(partial(attack, inner=start > 0), chunks)

    each(attack_all, range(restarts))
    return held


def _range(classifier: Classifier, levels: int | None) -> Move:
    """Return the function that moves points into the range of the data: of pixels, or of the columns of a table."""
    if levels is not None:
        return lambda at: at.clamp(0.5, levels - 0.5)
    columns = _columns(classifier)
    return (lambda at: at) if columns is None else columns.clamp


def _columns(classifier: Classifier) -> ColumnTransform | None:
    return next((m for m in classifier.transform.modules() if isinstance(m, ColumnTransform)), None)


def _is_fooled(
    classifier: Classifier, x: Tensor, y: Tensor, radius: float, steps: int, noise: Tensor | None, inside: Move
) -> Tensor:
    at = x if noise is None else _project(x, x + noise * (radius / noise.flatten(1).norm(dim=1).amax()), radius, inside)
    fooled = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for step in range(steps + 1):
        at = at.detach().requires_grad_()
        with full_precision(x), torch.enable_grad():
            logits = classifier(at)
            own = logits.gather(1, y[:, None]).squeeze(1)
            margin = own - logits.scatter(1, y[:, None], -math.inf).amax(dim=1)
        fooled |= margin.detach() < 0
        if step < steps:
            (gradient,) = torch.autograd.grad(margin.sum(), at)
            length = gradient.flatten(1).norm(dim=1).clamp_min(torch.finfo(x.dtype).tiny)
            move = gradient * (2.5 * radius / steps / length).view(-1, *[1] * (x.dim() - 1))
            at = _project(x, at.detach() - move, radius, inside)
    return fooled


def _project(x: Tensor, at: Tensor, radius: float, inside: Move) -> Tensor:
    """Project a point into the ball around x and into the range of the data."""
    change = at - x
    length = change.flatten(1).norm(dim=1).clamp_min(torch.finfo(x.dtype).tiny)
    return inside(x + change * (radius / length).clamp_max(1.0).view(-1, *[1] * (x.dim() - 1)))


@torch.no_grad()
def _is_correct(classifier: Classifier, data: Dataset) -> Tensor:
    try:
        predictions = dataset_logits(classifier, data).argmax(dim=1)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        why = str(error).splitlines()[0]
        raise ValueError(f"the model does not accept samples of shape {data.schema.shape}: {why}") from None
    return predictions == require_labels(data)


def _classifier(model: Model) -> Classifier:
    check_eval(model, "robustness")
    return as_classifier(model, "robustness needs a classifier")


def check_radius(radius: float) -> None:
    """Refuse a radius that is not positive and finite."""
    if not 0 < radius < math.inf:
        raise ValueError(f"radius must be positive and finite, in the units of the data; got {radius}.")
