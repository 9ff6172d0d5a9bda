"""Chooses how a density of a table starts, by a pilot: a mixture of normals found by EM, or one normal.

A mixture with many components is ahead at first. Where the data lie on curved surfaces, which a mixture tiles with
small normals, a network with one normal learns to unbend them and overtakes it within some hundred steps; where the
data have clusters, it never does. So both are trained for a few steps, and validation samples decide. With few samples,
to which a network adds little, the mixture is taken.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from ..base import FullMixture
from ..data import Batches, Splits
from ..lipschitz import defer_norms, refresh_
from ..models import build
from ..presets import Experiment
from ..train import train
from .callback import validate

#: The steps of a pilot, and the number of training samples below which there is none.
PILOT_STEPS, MIN_SAMPLES = 400, 1_000


def build_start(experiment: Experiment, splits: Splits, stop: Callable[[], bool] = lambda: False) -> nn.Module:
    """Build the model to train, its base fitted; with components = 0, the better one of two starts."""
    model = _build(experiment, splits, experiment.network.components)
    base = getattr(model, "base", None)
    is_open = isinstance(base, FullMixture) and experiment.network.components == 0 and base.components > 1
    if not is_open or len(splits.train) < MIN_SAMPLES or experiment.training.steps <= PILOT_STEPS:
        return model
    other = _build(experiment, splits, 1)
    return min((model, other), key=lambda start: _pilot(experiment, splits, copy.deepcopy(start), stop))


def _build(experiment: Experiment, splits: Splits, components: int) -> nn.Module:
    network = replace(experiment.network, components=components)
    torch.manual_seed(experiment.seed)
    with defer_norms():
        return build(network, splits.schema, experiment.objective.kind, splits.train.x, splits.validation.x)


def _pilot(experiment: Experiment, splits: Splits, model: nn.Module, stop: Callable[[], bool]) -> float:
    """Train for a few steps, and return the validation loss."""
    refresh_(model, settle=True)
    objective = experiment.objective.build_objective(model, splits.schema.levels)
    batches = Batches(splits.train, experiment.training.batch, seed=experiment.seed)
    settings = replace(experiment.training, steps=PILOT_STEPS, schedule="constant")
    generator = torch.Generator().manual_seed(experiment.seed)
    trained = train(objective, batches.starting_at(0), settings, generator=generator, callback=lambda _: stop())
    return validate(trained, splits.validation, experiment.objective)[1]
