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
from typing import TypeAlias

import torch
from torch import Tensor, nn

from .. import evaluate
from ..base import FullMixture
from ..data import Batches, Splits, subsample
from ..lipschitz import defer_norms, refresh_
from ..models import build
from ..presets import Experiment
from ..train import State, train
from ..train.average import Average
from .callback import VALIDATION_SAMPLES

#: Told in a sentence what is being done.
Announce: TypeAlias = Callable[[str], None]

#: The steps of a pilot, and the number of training samples below which there is none; and by how many standard errors
#: one normal must be ahead.
PILOT_STEPS, MIN_SAMPLES, SIGMAS = 400, 1_000, 2


def build_start(
    experiment: Experiment,
    splits: Splits,
    stop: Callable[[], bool] = lambda: False,
    announce: Announce = lambda text: None,
) -> nn.Module:
    """Build the model to train, its base fitted; with components = 0, the better one of two starts."""
    is_mixture = experiment.network.covariance == "full" and experiment.objective.kind != "classification"
    announce("Fitting a mixture of Gaussians …" if is_mixture else "Building the network …")
    model = _build(experiment, splits, experiment.network.components)
    base = getattr(model, "base", None)
    is_open = isinstance(base, FullMixture) and experiment.network.components == 0 and base.components > 2
    if not is_open or len(splits.train) < MIN_SAMPLES or experiment.training.steps <= PILOT_STEPS:
        return model
    other = _build(experiment, splits, 1)
    one, many = (
        _pilot(experiment, splits, copy.deepcopy(start), _callback(name, announce, stop))
        for name, start in (("one Gaussian", other), ("a mixture", model))
    )
    gain = one - many
    return other if gain.mean() > SIGMAS * gain.std() / math.sqrt(len(gain)) else model


def _build(experiment: Experiment, splits: Splits, components: int) -> nn.Module:
    network = replace(experiment.network, components=components)
    torch.manual_seed(experiment.seed)
    with defer_norms():
        return build(network, splits.schema, experiment.objective.kind, splits.train.x, splits.validation.x)


def _callback(name: str, announce: Announce, stop: Callable[[], bool]) -> Callable[[State], bool]:
    """Return what is called after each step of a pilot: it says how far it is, and whether to stop."""

    def callback(state: State) -> bool:
        announce(f"Comparing two starts, now {name}: step {state.step} of {PILOT_STEPS} …")
        return stop()

    return callback


def _pilot(experiment: Experiment, splits: Splits, model: nn.Module, callback: Callable[[State], bool]) -> Tensor:
    """Train for a few steps; return the log-likelihoods of validation samples, by the better one of start and end."""
    refresh_(model, settle=True)
    objective = experiment.objective.build_objective(model, splits.schema.levels)
    batches = Batches(splits.train, experiment.training.batch, seed=experiment.seed)
    settings = replace(experiment.training, steps=PILOT_STEPS, schedule="constant")
    generator = torch.Generator().manual_seed(experiment.seed)
    held_out = subsample(splits.validation, VALIDATION_SAMPLES)
    start = evaluate.log_likelihood(Average(model, 0.0).result(model), held_out).value.double()
    trained = train(objective, batches.starting_at(0), settings, generator=generator, callback=callback)
    end = evaluate.log_likelihood(trained, held_out).value.double()
    return max(start, end, key=lambda likelihoods: float(likelihoods.mean()))
