"""All that decides the run of a cell, by what its network is for.

budget    smoke: 8x8 digits and a few blocks, or four in the plane; a few steps. short: classifiers with fewer epochs,
          flows as their presets say, 1,000 steps in the plane. paper: 200 epochs, and 20,000 steps in the plane
recipe    ours: that of the preset. paper: of classifiers App. C.2, of flows and hybrids App. C.3; nothing is averaged
          and nothing clipped. The paper says nothing about training in the plane
others    flows of others have the budget of our flow on the same set: its rows, augmentation, epochs, steps and batch;
          the rest, such as rates, is that of their own presets, whatever the recipe is
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import presets
from ..presets import Experiment
from ..train import ObjectiveSettings
from .cells import DATASETS, DIGITS, Cell

BUDGETS, RECIPES = ("smoke", "short", "paper"), ("ours", "paper")

#: Epochs of classifiers by budget, MNIST needs fewer in the short one; of flows; and steps in the plane.
EPOCHS = {"short": {"mnist": 10, "cifar10": 30, "cifar100": 30}, "paper": dict.fromkeys(DATASETS, 200)}
FLOW_EPOCHS, STEPS = 200, {"smoke": 30, "short": 1_000, "paper": 20_000}
#: Terms of the paper's series.
TERMS = {"mnist": 10, "cifar10": 5}


@dataclass(frozen=True)
class Kind:
    """What networks for one purpose share: where their runs are, what makes a cell of one, and how they are trained."""

    home: str
    fixed: tuple[str, ...]
    recipe: Callable[[Experiment], Experiment]
    budget: Callable[[Experiment, str], Experiment]


def experiment(
    cell: Cell, budget: str, recipe: str, *, seed: int = 0, folder: str | None = None, changes: Sequence[str] = ()
) -> Experiment:
    """All that decides the run of a cell; `changes` are a user's own settings, such as "training.epochs=100"."""
    made, kind = presets.with_overrides(presets.find(cell.preset), cell.overrides), KINDS[cell.purpose]
    if cell.budget_of:
        made = _with_budget_of(presets.find(cell.budget_of), made)
    data = replace(made.data, source=cell.dataset)
    made = replace(made, seed=seed, data=data if folder is None else replace(data, folder=folder))
    if recipe == "paper" and not cell.own_recipe:
        made = kind.recipe(made)
    return presets.with_overrides(kind.budget(made, budget), changes)


def _with_budget_of(ours: Experiment, made: Experiment) -> Experiment:
    """The same network and rates, with the data, epochs, steps and batch of ours."""
    t = ours.training
    return _trained(replace(made, data=ours.data), epochs=t.epochs, steps=t.steps, batch=t.batch)


def _trained(made: Experiment, **settings: Any) -> Experiment:
    return replace(made, training=replace(made.training, **settings))


def as_in_appendix_c2(made: Experiment) -> Experiment:
    """The same classifier by SGD; shifts bring in zeros, up to 4 pixels on CIFAR (the released code)."""
    small = made.data.source == "mnist"
    data = replace(made.data, shift=2 if small else 4, shifted=1.0, border="blank", flip=not small, cutout=0)
    made = _trained(made, optimiser="sgd", batch=128, learning_rate=0.1, momentum=0.9, nesterov=False)
    made = _trained(made, weight_decay=5e-4, head_decay=5e-4, schedule="milestones", milestones=(0.3, 0.6, 0.8))
    made = _trained(made, decay=0.2, warmup=0, clip=math.inf, average=0.0, select="last")
    return replace(made, data=data, objective=ObjectiveSettings(kind="classification"))


def as_in_appendix_c3(made: Experiment) -> Experiment:
    """The same flow by Adamax at one rate; the paper is silent about batches and says nothing of other schedules."""
    network = replace(made.network, estimator="series", terms=TERMS.get(made.data.source, made.network.terms))
    made = _trained(made, optimiser="adamax", learning_rate=0.003, schedule="constant", warmup=0, clip=math.inf)
    return replace(_trained(made, weight_decay=0.0, average=0.0, select="last"), network=network)


def _classifier(made: Experiment, budget: str) -> Experiment:
    if budget != "smoke":
        return _trained(made, epochs=EPOCHS[budget][made.data.source])
    few = replace(made.network, blocks=(1, 1, 1), padding=3 if made.network.padding else 0)
    data = replace(made.data, validation=0.15, shift=1, flip=False, cutout=0)
    made = _trained(made, learning_rate=0.1 if made.training.optimiser == "sgd" else 0.01)
    return _smallest(replace(made, network=replace(few, width=min(few.width, 16)), data=data), steps=30)


def _flow(made: Experiment, budget: str) -> Experiment:
    if budget != "smoke":
        return _trained(made, epochs=FLOW_EPOCHS) if budget == "paper" else made
    network = replace(made.network, blocks=(1,) * len(made.network.blocks), width=16)
    return _smallest(replace(made, network=network), steps=40)


def _smallest(made: Experiment, steps: int) -> Experiment:
    """On 8x8 digits, for a few steps."""
    warmup, data = min(5, made.training.warmup), replace(made.data, source=DIGITS)
    made = _trained(made, steps=steps, epochs=0, batch=64, warmup=warmup, validate_every=steps, save_every=10)
    return replace(made, data=data)


def _plane(made: Experiment, budget: str) -> Experiment:
    steps = STEPS[budget]
    made = _trained(made, steps=steps, epochs=0)
    if budget != "smoke":
        return made
    made = _trained(made, batch=64, warmup=5, validate_every=steps, save_every=10)
    return replace(made, network=replace(made.network, blocks=(4,), width=16))


KINDS = {
    "classification": Kind(
        "table2",
        ("network.family", "network.constrained", "network.lipschitz", "network.kernels", "network.normalisation"),
        as_in_appendix_c2,
        _classifier,
    ),
    "density": Kind("table4", (), as_in_appendix_c3, _flow),
    "hybrid": Kind("hybrid", ("objective.kind", "objective.weight"), as_in_appendix_c3, _flow),
    "plane": Kind("figure2", (), lambda made: made, _plane),
}
