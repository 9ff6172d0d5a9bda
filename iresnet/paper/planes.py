"""Densities in the plane as experiments (Figure 2, App. C.3): 100 blocks of an i-ResNet, 100 + 100 layers of a Glow.

budget    smoke: four blocks, a few steps; short: 1,000 steps; paper: 20,000, the same for both models
recipe    the paper says nothing about training; both recipes are that of the preset
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .. import presets
from ..presets import Experiment
from .cells import Cell

#: Steps of a budget.
STEPS = {"smoke": 30, "short": 1_000, "paper": 20_000}


def experiment(
    cell: Cell, budget: str, recipe: str, *, seed: int = 0, folder: str | None = None, changes: Sequence[str] = ()
) -> Experiment:
    """All that decides the run of a flow on the plane; `changes` are a user's own settings."""
    made = presets.find(cell.preset)
    data = replace(made.data, source=cell.dataset)
    made = replace(made, seed=seed, data=data if folder is None else replace(data, folder=folder))
    made = replace(made, training=replace(made.training, steps=STEPS[budget], epochs=0))
    return presets.changed(smallest(made) if budget == "smoke" else made, changes)


def smallest(made: Experiment) -> Experiment:
    """The same kind of flow with four blocks, and training for a few steps."""
    network = replace(made.network, blocks=(4,), width=16)
    steps = made.training.steps
    training = replace(made.training, batch=64, warmup=5, validate_every=steps, save_every=10)
    return replace(made, network=network, training=training)
