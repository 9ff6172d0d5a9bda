"""The paper's flows as experiments (App. C.3), those of others beside them, and hybrids with a weight.

budget    smoke: 8x8 digits, one block a scale, a few steps; short: the preset as it is; paper: 200 epochs
recipe    ours: that of the preset; paper: Adamax, rate .003 from beginning to end, a series of 10 terms for MNIST and 5
          for CIFAR-10, nothing averaged and nothing clipped
others    the budget of our flow on the same set: its rows, augmentation, epochs, steps and batch; the rest, such as
          rates, is that of their own presets, whatever the recipe is
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .. import presets
from ..presets import Experiment
from .cells import DIGITS, FLOWS, Cell

EPOCHS, TERMS = 200, {"mnist": 10, "cifar10": 5}


def experiment(
    cell: Cell, budget: str, recipe: str, *, seed: int = 0, folder: str | None = None, changes: Sequence[str] = ()
) -> Experiment:
    """All that decides the run of a flow; `changes` are a user's own settings."""
    made = presets.find(cell.preset)
    if cell.is_other:
        made = with_budget_of(presets.find(FLOWS[cell.dataset, "flow"]), made)
    if cell.weight is not None:
        made = replace(made, objective=replace(made.objective, weight=cell.weight))
    data = replace(made.data, source=cell.dataset)
    made = replace(made, seed=seed, data=data if folder is None else replace(data, folder=folder))
    if recipe == "paper" and not cell.is_other:
        made = as_in_the_paper(made)
    if budget == "smoke":
        made = smallest(made)
    elif budget == "paper":
        made = replace(made, training=replace(made.training, epochs=EPOCHS))
    return presets.changed(made, changes)


def with_budget_of(ours: Experiment, made: Experiment) -> Experiment:
    """The same network and rates, with the data, epochs, steps and batch of ours."""
    t = ours.training
    training = replace(made.training, epochs=t.epochs, steps=t.steps, batch=t.batch)
    return replace(made, data=ours.data, training=training)


def as_in_the_paper(made: Experiment) -> Experiment:
    """The same network, trained as in App. C.3, which is silent about batches and says nothing of other schedules."""
    network = replace(made.network, estimator="series", terms=TERMS.get(made.data.source, made.network.terms))
    training = replace(
        made.training,
        optimiser="adamax",
        learning_rate=0.003,
        schedule="constant",
        warmup=0,
        clip=math.inf,
        weight_decay=0.0,
        average=0.0,
        select="last",
    )
    return replace(made, network=network, training=training)


def smallest(made: Experiment) -> Experiment:
    """The same kind of flow with one block a scale, for 8x8 digits, and training for a few steps."""
    network = replace(made.network, blocks=(1,) * len(made.network.blocks), width=16)
    warmup = min(5, made.training.warmup)
    training = replace(made.training, steps=40, epochs=0, batch=64, warmup=warmup, validate_every=40, save_every=10)
    return replace(made, data=replace(made.data, source=DIGITS), network=network, training=training)
