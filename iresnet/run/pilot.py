"""Chooses how a density of a table starts, by a pilot: a mixture of normals found by EM, or one normal.

A mixture with many components is ahead at first. Where the data lie on curved surfaces, which a mixture tiles with
small normals, a network with one normal learns to unbend them and overtakes it within some hundred steps; where the
data have clusters, it never does. So both are trained for a few steps, and validation samples decide: the mixture is
left if one normal is clearly ahead of it, trained or not. With few samples, to which a network adds little, the mixture
is taken.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from .. import evaluate
from ..base import FullMixture
from ..data import Batches, Splits, subsample
from ..lipschitz import defer_norms, refresh_
from ..model import Model
from ..models import build
from ..presets import Experiment
from ..progress import each, part, phase
from ..train import State, train
from ..train.average import Average
from .callback import VALIDATION_SAMPLES

#: The steps of a pilot, and the number of training samples below which there is none; and by how many standard errors
#: one normal must be ahead.
PILOT_STEPS, MIN_SAMPLES, SIGMAS = 400, 1_000, 2


def build_start(experiment: Experiment, splits: Splits, stop: Callable[[], bool] = lambda: False) -> Model:
    """Build the model to train, its base fitted; with components = 0, the better one of two starts."""
    is_mixture = experiment.network.covariance == "full" and experiment.objective.kind != "classification"
    with phase("fitting a mixture of Gaussians" if is_mixture else "building the network"):
        model = _build(experiment, splits, experiment.network.components)
    base = getattr(model, "base", None)
    is_open = isinstance(base, FullMixture) and experiment.network.components == 0 and base.components > 2
    if not is_open or len(splits.train) < MIN_SAMPLES or experiment.training.steps <= PILOT_STEPS:
        return model
    other = _build(experiment, splits, 1)
    with phase("comparing one Gaussian with a mixture"):
        one, many = each(lambda start: _pilot(experiment, splits, copy.deepcopy(start), stop), [other, model])
    gain = one - many
    return other if gain.mean() > SIGMAS * gain.std() / math.sqrt(len(gain)) else model


def _build(experiment: Experiment, splits: Splits, components: int) -> Model:
    network = replace(experiment.network, components=components)
    torch.manual_seed(experiment.seed)
    with defer_norms():
        return build(network, splits.schema, experiment.objective.kind, splits.train.x, splits.validation.x)


def _pilot(experiment: Experiment, splits: Splits, model: Model, stop: Callable[[], bool]) -> Tensor:
    """Train for a few steps; return the log-likelihoods of validation samples, by the better one of start and end."""
    refresh_(model, settle=True)
    objective = experiment.objective.build_objective(model, splits.schema.levels)
    batches = Batches(splits.train, experiment.training.batch, seed=experiment.seed)
    settings = replace(experiment.training, steps=PILOT_STEPS, schedule="constant")
    generator = torch.Generator().manual_seed(experiment.seed)
    held_out = subsample(splits.validation, VALIDATION_SAMPLES)

    def callback(state: State) -> bool:
        with part(state.step, PILOT_STEPS + 2):
            return stop()

    with part(0, PILOT_STEPS + 2):
        start = evaluate.log_likelihood(Average(model, 0.0).result(model), held_out).value.double()
    trained = cast(Model, train(objective, batches.starting_at(0), settings, generator=generator, callback=callback))
    with part(PILOT_STEPS + 1, PILOT_STEPS + 2):
        end = evaluate.log_likelihood(trained, held_out).value.double()
    return max(start, end, key=lambda likelihoods: float(likelihoods.mean()))
