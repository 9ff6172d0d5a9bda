"""A training that several processes share: what rank 0 passes to the others, and what the others do with it.

Rank 0 reads the settings, fits what is fitted before the first step, validates, logs and saves. The others get settings
and model from it, read the data themselves, and take the same steps. They write nothing, and need no run folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import data
from ..data import Batches, Dataset, Schema
from ..lipschitz import refresh_
from ..model import Model
from ..presets import Experiment
from ..spelling import counted
from ..train import Objective, train
from ..train.checkpoint import Checkpoint
from ..train.distributed import Group


@dataclass(frozen=True)
class SharedTraining:
    """What the processes need to train together; `state` is the checkpoint to resume from, `data` a fingerprint."""

    experiment: Experiment
    schema: Schema
    data: str
    model: Model
    state: Checkpoint | None
    random_states: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, experiment: Experiment, samples: Dataset, model: Model, state: Checkpoint | None, device: str
    ) -> SharedTraining:
        """Gather what rank 0 passes on; the model is still on the CPU."""
        return cls(experiment, samples.schema, samples.fingerprint(), model, state, _random_states(device))


def follow(group: Group, shared: SharedTraining, device: str, stop: Callable[[], bool]) -> None:
    """Take the steps of a training together with rank 0, which decides when it ends."""
    experiment, state = shared.experiment, shared.state
    samples = data.load(experiment.data, shared.schema).train
    if samples.fingerprint() != shared.data:
        raise ValueError(
            f"all processes need the same data; got others than rank 0 from {experiment.data.source}. Copy the data "
            "of its machine."
        )
    objective, batches, generator = prepare(experiment, samples, shared.model, device)
    _set_random_states(shared.random_states)

    def ends(_: object) -> bool:
        group.any(stop())
        return group.decide(False)

    train(
        objective, batches.starting_at(0 if state is None else state.read_count("step")), experiment.training,
        generator=generator, acceleration=experiment.acceleration, resume=state, callback=ends, group=group,
    )  # fmt: skip
    group.leave()


def prepare(
    experiment: Experiment, samples: Dataset, model: Model, device: str
) -> tuple[Objective, Batches, torch.Generator]:
    """Return what a training needs on a device: the objective, the batches, the generator. The model is moved there."""
    refresh_(model.to(device), settle=True)
    batches = make_batches(experiment, samples.to(device))
    augment, labelled = experiment.data.augment, batches.labelled_size
    objective = experiment.objective.build_objective(model, samples.schema.levels, augment, labelled)
    return objective, batches, torch.Generator(device).manual_seed(experiment.seed)


def make_batches(experiment: Experiment, dataset: Dataset) -> Batches:
    """Return the training batches of an experiment."""
    training, augment = experiment.training, experiment.data.augment
    return Batches(dataset, training.batch, seed=experiment.seed, augment=augment, labelled=training.labelled_batch)


def check_batch(batches: Batches, group: Group) -> None:
    """Refuse more processes than a batch has rows."""
    size = min(batches.size, batches.labelled_size or batches.size)
    if group.ranks > size:
        raise ValueError(
            f"every process needs a row of every batch; got {counted(size, 'row')} for {group.ranks} processes. Start "
            "fewer, or raise training.batch."
        )


def _random_states(device: str) -> tuple[Tensor, ...]:
    """Return the states of torch's global generators, which dropout draws from."""
    return torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device.startswith("cuda") else [])


def _set_random_states(states: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
