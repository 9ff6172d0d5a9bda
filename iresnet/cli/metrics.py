"""The metrics that `iresnet evaluate` and `iresnet report` compute: of which samples, and where they are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..data import Dataset, Splits, subsample
from ..device import device_of
from ..evaluate import evaluate, has_density, why_no_baselines
from ..logdet import EXACT_UP_TO
from ..model import Model
from ..run import Run
from .console import Screen, waiting

#: Samples evaluated by default if likelihoods are estimates, which take long.
MANY = 1000

#: Metrics that are dropped from evaluation.json if other samples are evaluated.
OF_ROWS = ("robustness", "probe")

Rows = Annotated[
    int | None,
    typer.Option(
        help="How many samples to evaluate, drawn at random.",
        min=1,
        show_default=f"all up to {EXACT_UP_TO} dimensions, else {MANY:,}",
    ),
]


def row_limit(rows: int | None, dimension: int) -> int | None:
    """Return how many samples to evaluate: those requested, else all (None) if likelihoods are exact."""
    return rows or (None if dimension <= EXACT_UP_TO else MANY)


def chosen_samples(model: Model, data: Dataset, rows: int | None) -> Dataset:
    """Return so many samples, always the same ones, on the model's device."""
    most = row_limit(rows, data.schema.dimension)
    return subsample(data, len(data) if most is None else most).to(device_of(model))


def evaluate_some(model: Model, data: Dataset, rows: int | None, screen: Screen, **options: Any) -> dict[str, Any]:
    """Return the metrics on so many samples, computed on the model's device; "of" is how many there are."""
    chosen = chosen_samples(model, data, rows)
    with waiting(screen, f"Evaluating {len(chosen):,} of {len(data):,} samples …"):
        return evaluate(model, chosen, **options) | {"of": len(data)}


def fitting_splits(run: Run, model: Model, screen: Screen) -> Splits | None:
    """Return the splits for the baselines of a density of rows; None, and say why, if there can be none."""
    if not has_density(model) or run.schema.is_image:
        return None
    reason = why_no_baselines(run.schema)
    try:
        if not reason:
            return run.splits()
    except ValueError as error:
        reason = f"the training rows cannot be read: {str(error).rstrip('.')}"
    screen.say(f"No baselines: {reason}.")
    return None


def warn_stale(run: Run, screen: Screen) -> None:
    """Say that saved metrics belong to other weights and will be replaced."""
    path = run.output / "evaluation.json"
    if path.is_file() and not run.read_current_json(path.name):
        screen.say(f"{path} does not belong to these weights and will be replaced.")


def save_metrics(run: Run, content: dict[str, Any], sha256: str) -> Path:
    """Save metrics of the test split, beside other metrics of the same samples and weights."""
    known = run.read_current_json("evaluation.json")
    if known.get("rows") != content["rows"]:
        known = {name: value for name, value in known.items() if name not in OF_ROWS}
    return run.write_json("evaluation.json", {**known, **content}, sha256)
