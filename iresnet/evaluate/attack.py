"""Projected gradient descent: a search for inputs of another class within a ball around a sample.

It cannot succeed within a certified radius (`radius`). That it fails is a test, not a proof.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from ..classifier import Classifier
from ..data import Dataset
from ..data.units import bin_centres
from ..model import Model
from ..precision import full_precision
from ..progress import each
from ..transforms.columns import ColumnTransform
from .chunks import CHUNK
from .classes import logits as dataset_logits
from .classes import require_labels
from .radius import classifier_in_eval

#: Moves points into the range of the data.
Move: TypeAlias = Callable[[Tensor], Tensor]

#: The largest distance of neighbouring float32, as a part of what a step of the attack changes a number by.
FINEST = 0.1


def survives_attack(
    model: Model, data: Dataset, radius: float, *, steps: int = 20, restarts: int = 3, seed: int = 0
) -> Tensor:
    """Which samples are classified correctly and stay so under projected gradient descent from several starts.

    Every step goes 2.5 radius / steps down the gradient of f_y - max f_j, then back into the ball and into the range of
    the data. The first start is x itself, the others are drawn from the ball. It runs in float64 where float32 would
    lose its steps.
    """
    check_radius(radius)
    for name, value in (("steps", steps), ("restarts", restarts)):
        if value < 1:
            raise ValueError(f"an attack needs {name} of at least 1; got {value}.")
    classifier, y = classifier_in_eval(model), require_labels(data)
    inside = _range(classifier, data.schema.levels)
    generator = torch.Generator(data.x.device).manual_seed(seed)
    held, points = is_correct(classifier, data), bin_centres(data.x, data.schema.levels)
    change = 2.5 * radius / steps / math.sqrt(data.schema.dimension)
    if torch.finfo(points.dtype).eps * float(points.abs().max()) > FINEST * change:
        classifier, points = copy.deepcopy(classifier).double(), points.double()

    def attack(rows: Tensor, *, inner: bool) -> None:
        x = points[rows]
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
    columns = next((m for m in classifier.transform.modules() if isinstance(m, ColumnTransform)), None)
    return (lambda at: at) if columns is None else columns.clamp


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
def is_correct(classifier: Classifier, data: Dataset) -> Tensor:
    """Return which samples are classified correctly."""
    try:
        predictions = dataset_logits(classifier, data).argmax(dim=1)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        why = str(error).splitlines()[0]
        raise ValueError(f"the model does not accept samples of shape {data.schema.shape}: {why}") from None
    return predictions == require_labels(data)


def check_radius(radius: float) -> None:
    """Refuse a radius that is not positive and finite."""
    if not 0 < radius < math.inf:
        raise ValueError(f"radius must be positive and finite, in the units of the data; got {radius}.")
