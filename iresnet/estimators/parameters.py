"""From an estimator's parameters to an experiment: a preset, with the settings that the parameters replace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
from sklearn.utils import check_random_state

from .. import config, presets
from ..data.settings import PLACEHOLDER
from ..presets import Experiment
from ..spelling import quoted

#: The setting that each parameter of an estimator replaces.
SETTINGS = {
    "blocks": "network.blocks",
    "width": "network.width",
    "learning_rate": "training.learning_rate",
    "max_steps": "training.steps",
    "max_time": "training.max_seconds",
    "patience": "training.patience",
    "batch_size": "training.batch",
    "validation_fraction": "data.validation",
}

#: What takes the place of settings of data; of the others, an estimator only reads `kinds` and `validation`.
INSTEAD = {
    "columns": "select the columns of X before fit",
    "drop": "select the columns of X before fit",
    "id": "leave this column out of X",
    "context": "give these columns as X to a ConditionalFlowDensity",
    "label": "give the labels to fit as y",
    "missing": "fill in missing cells, or leave their rows out, before fit",
    "test": "hold out rows before fit",
    "seed": "give random_state",
}

#: The warm-up of a shorter training than the preset's, as a fraction of it.
WARMUP = 0.1


def make_experiment(preset: str, parameters: Mapping[str, Any], settings: Mapping[str, Any], seed: int) -> Experiment:
    """Return the experiment of a preset with parameters and settings replaced; parameters that are None are not.

    `settings` are named as on the command line: "network.lipschitz", or "lipschitz" if only one group has that key.
    """
    if not isinstance(settings, Mapping):
        raise ValueError(f'settings must be a dict, such as {{"network.lipschitz": 0.9}}; got {quoted(settings)}.')
    found = presets.find(preset)
    found = replace(found, seed=seed, data=replace(found.data, source=PLACEHOLDER))
    content = config.to_mapping(found)
    for name, setting in SETTINGS.items():
        if (value := _plain(parameters[name])) is not None:
            _assign(content, setting, [value] if name == "blocks" and not isinstance(value, list) else value)
    if isinstance(steps := parameters["max_steps"], Real):
        warmup = min(found.training.warmup_steps, int(WARMUP * float(steps)))
        content["training"] |= {"epochs": 0, "warmup": warmup}
    for name, value in settings.items():
        path = config.setting_path(Experiment, f"{name}=")
        _refuse_without_effect(path)
        _assign(content, path, _plain(value))
    return config.from_mapping(Experiment, content, "the parameters")


def _refuse_without_effect(path: str) -> None:
    """Refuse a setting that is about files, images or the choice of columns: rows come as arrays."""
    group, _, name = path.partition(".")
    if group == "data" and name not in ("kinds", "validation"):
        raise ValueError(f"{path} has no effect here: {INSTEAD.get(name, 'leave it out')}.")


def _assign(content: dict[str, Any], path: str, value: Any) -> None:
    *groups, name = path.split(".")
    for group in groups:
        content = content[group]
    content[name] = value


def _plain(value: Any) -> Any:
    """Return a value without NumPy's types, which a grid search may give."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def seed_from(random_state: int | np.random.RandomState | None) -> int:
    """Return a seed: the integer itself, or one drawn from the random state, or from NumPy's global one."""
    if isinstance(random_state, int | np.integer):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31 - 1))
