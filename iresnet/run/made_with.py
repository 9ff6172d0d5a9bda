"""What a model was made with: the settings that, with its weights, determine its function. Checkpoints store them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import config
from ..data import Schema
from ..presets import Experiment
from ..train.checkpoint import Checkpoint

#: What of a schema determines the function of a model, whose samples and classes have an order and a meaning.
OF_THE_FUNCTION = ("shape", "levels", "columns", "classes", "kinds", "targets", "one_hot")


def made_with(experiment: Experiment, schema: Schema) -> dict[str, Any]:
    """Return the settings that determine a model's function, by name."""
    network = {f"network.{k}": v for k, v in config.to_mapping(experiment.network).items()}
    content = schema.to_dict()
    rows = {f"schema.{name}": content.get(name, []) for name in OF_THE_FUNCTION}
    return {**network, "objective.kind": experiment.objective.kind, **rows}


def check_made_with(saved: Checkpoint, experiment: Experiment, schema: Schema, folder: Path) -> None:
    """Refuse a checkpoint that was made with other settings than those in this run folder."""
    made, here = saved.state.get("made_with", {}), made_with(experiment, schema)
    former = {**here, "schema.kinds": [str(kind) for kind in schema.kinds]}  # without names of categories
    for key, value in made.items() if isinstance(made, dict) else ():
        if value not in (here.get(key, value), former.get(key, value)):
            where = folder / ("schema.json" if key.startswith("schema.") else "config.toml")
            why = "it was made with {} = {}; got {}".format(key, *_excerpts(value, here[key]))
            raise saved.mismatch_error(str(where), why, "Restore that value, or train again.")


def _excerpts(made: object, here: object) -> tuple[str, str]:
    """Return 40 characters of two different values: their beginnings, or what surrounds the first difference."""
    texts = repr(made), repr(here)
    same = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), 0)
    start = same - 20 if same > 35 else 0
    return texts[0][start : start + 40], texts[1][start : start + 40]
