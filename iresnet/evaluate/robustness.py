"""Robustness: the accuracy that is certified at a radius, next to the accuracy under an attack."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from ..certificate import residual_blocks
from ..data import Dataset
from ..data.dataset import check_unweighted
from ..model import Model
from ..spelling import round_down, round_up
from ..trust import NoBoundKnown
from .attack import is_correct, survives_attack
from .classes import error_from_counts, labelled_samples
from .radius import certified_radius, classifier_in_eval, lipschitz_bound

#: The product of the blocks' factors above which a radius is vacuous.
VACUOUS = 1e3

#: The layers of a linear head.
LINEAR = (nn.Linear, nn.Flatten, nn.Identity, nn.Dropout)


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
            + ("no radius" if self.median is None else f"median radius {round_down(self.median, '.3g')}")
        )
        text += f", Lip(F) <= {round_up(self.lipschitz, '.3g')}" if math.isfinite(self.lipschitz) else ""
        return f"{text}; {self.remark}" if self.remark else text


def robustness(
    model: Model, data: Dataset, radius: float, *, steps: int = 20, restarts: int = 3, seed: int = 0
) -> Robustness:
    """Compute the certified accuracy at `radius`, next to the accuracy under an attack."""
    classifier = classifier_in_eval(model)
    data = labelled_samples(data)
    check_unweighted(data)
    held = survives_attack(model, data, radius, steps=steps, restarts=restarts, seed=seed)
    radii, constant, remark = _certified(model, data)
    wrong = error_from_counts(len(data) if radii is None else int((radii < radius).sum()), len(data))
    clean = is_correct(classifier, data)
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
    head, remedy = classifier_in_eval(model).head, "network.head=[], and without network.bayes"
    names = [type(head).__name__]
    if isinstance(head, nn.Sequential) or hasattr(head, "layers"):
        parts = [m for name, m in head.named_modules() if "parametrizations" not in name and not isinstance(m, LINEAR)]
        names = [type(m).__name__.removesuffix("1d") for m in parts if next(m.children(), None) is None]
    if "BatchNorm" in names:
        remedy = "network.readout=lipschitz"
    anyway = (
        f"; Lip(F) <= {round_up(constant, '.2g')} would make a radius vacuous anyway"
        if _block_factors(model, data) > VACUOUS
        else ""
    )
    which = " and ".join(dict.fromkeys(names))
    return f"the head ({which}) is not linear, so it has no margin{anyway}. Train with {remedy}."


def _why_none(model: Model, data: Dataset, constant: float, radii: Tensor, survive: bool) -> str:
    """Why no sample is certified: the bound, if samples survive the attack that it does not certify; or the radius."""
    if not survive or _block_factors(model, data) <= VACUOUS:
        return f"the largest certified radius is {round_down(float(radii.max()), '.3g')}"
    blocks = len(list(residual_blocks(model, data.schema.shape)))
    bound = round_up(constant, ".2g")
    return (
        f"the certified radius is vacuous: Lip(F) <= {bound}, a product of {blocks} factors, one per block, is "
        'far above the true value. Use branch = "potential", whose factors are 1, or fewer blocks or a smaller '
        "lipschitz, and train with objective.radius."
    )


def _block_factors(model: Model, data: Dataset) -> float:
    """The product of the Lipschitz constants of the blocks."""
    return math.prod(block.stretch(at).forward for _, block, at in residual_blocks(model, data.schema.shape))
