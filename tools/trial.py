"""Add trained runs and pilots to the recipes: python -m tools.trial RUN_OR_PILOTS ... [--note "..."]

A run folder gives one row: its differences from its preset, its training time, and the validation metrics by which its
weights were selected. A results file of `tools.pilots`, or of this tool on another machine, gives all its rows. They
are added to results/recipes-DATASET-TASK.json, which docs/results/recipes.md shows; rows that exist already are
skipped. The test set is never read. Their runs are marked as pilots: they choose settings, and publish no result.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from iresnet import config
from iresnet.logdet import EXACT_UP_TO
from iresnet.presets import Experiment, find
from iresnet.results import PILOT, Results, nonfinite_to_none, read, write
from iresnet.run import Run
from iresnet.run.callback import BIAS, VALIDATION_SAMPLES

Trial: TypeAlias = tuple[dict[str, Any], dict[str, Any]]

RESULTS = Path(__file__).resolve().parent.parent / "results"

#: The columns of every row, present even if a trial failed.
COLUMNS = (
    "dataset", "task", "preset", "settings", "training rows", "batch", "steps", "seconds", "bits/dim", "nats", "±",
    "error %", "held-out rows", "method", "on", "note",
)  # fmt: skip

#: Settings that do not affect a trial.
BESIDE = ("name", "about", "data.folder")


def of_run(run: Run) -> Trial:
    """The row of a finished run, and its environment."""
    experiment, environment = run.experiment, run.read_json("environment.json")
    preset, differences = settings_of(experiment)
    row: dict[str, Any] = {
        "dataset": Path(experiment.data.source).name,
        "task": experiment.objective.kind,
        "preset": preset,
        "settings": " ".join(differences) or None,
        "training rows": run.read_json("data.json")["train"]["rows"],
        "batch": experiment.training.batch,
        "steps": experiment.training.steps,
        "seconds": environment["seconds"],
        **_metrics(run),
    }
    return nonfinite_to_none(row), environment


def _metrics(run: Run) -> dict[str, Any]:
    """The validation metrics by which the weights were selected; an unfinished run raises FileNotFoundError.

    They are read, not recomputed from the likelihoods stored with the model: those share their noise, which would bias
    a mean.
    """
    if not (run.folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"{run.folder} is not finished. Resume it: iresnet train --resume --out {run.folder}")
    best, rows = run.best_metrics(), int(run.read_json("data.json")["validation"]["rows"])
    names = "bits/dim", "nats", "error %"
    metrics = {"±": None, **{name: best.get(f"validation {name}") for name in names}}
    if metrics["bits/dim"] is None and metrics["nats"] is None:
        return metrics | {"held-out rows": rows}
    how = "exact" if run.schema.dimension <= EXACT_UP_TO else f"a series whose rest is below {BIAS:g} bits/dim"
    return metrics | {"held-out rows": min(rows, VALIDATION_SAMPLES), "method": how}


def settings_of(experiment: Experiment) -> tuple[str, list[str]]:
    """The preset of an experiment, and the settings that differ from it."""
    try:
        preset = find(experiment.name)
    except (ValueError, OSError):
        preset = Experiment()
    here, there = (dict(_flat(config.to_mapping(e))) for e in (experiment, preset))
    skipped = {*BESIDE, "training.steps"} if experiment.training.epochs else {*BESIDE, "training.epochs"}
    changes = [f"{key}={_word(here[key])}" for key in here if key not in skipped and here[key] != there.get(key)]
    return experiment.name if preset.name == experiment.name else "none", changes


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _word(value: Any) -> str:
    """A value as a user types it on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_word, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def trials(path: Path) -> list[Trial]:
    """The trials of a run folder or of a results file."""
    if path.suffix != ".json":
        return [of_run(Run.open(path))]
    found = read(path)
    if any(k not in row for row in found.rows for k in ("dataset", "task", "preset", "run")):
        raise ValueError(f"{path} is not a file of tools.pilots: its rows must have dataset, task, preset and run.")
    return [({k: v for k, v in row.items() if k != "run"}, found.runs[row["run"]]) for row in found.rows]


def record(made: Sequence[Trial], folder: Path, note: str | None = None) -> dict[Path, int]:
    """Append trials to the files of their datasets and tasks; return the number of new rows for each file."""
    added: dict[Path, int] = {}
    for row, environment in made:
        about = environment | PILOT
        name = f"recipes-{row['dataset']}-{row['task']}"
        path = folder / f"{name}.json"
        kept = read(path) if path.is_file() else Results(name, [], [])
        added.setdefault(path, 0)
        if about in kept.runs and any(_same(row, r) for r in kept.rows):
            continue
        notes = "; ".join(n for n in (row.get("note"), note) if n) or None
        gpu = about.get("hardware", {}).get("gpu")
        new = {**dict.fromkeys(COLUMNS), **row, "on": gpu or "CPU", "note": notes, "run": len(kept.runs)}
        write(Results(name, [*kept.rows, new], [*kept.runs, about]), folder)
        added[path] += 1
    return added


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return all(a.get(k) == b.get(k) for k in ("preset", "settings", "steps", "bits/dim", "error %"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Record the given runs and pilots, and print which files changed."""
    parser = argparse.ArgumentParser(prog="python -m tools.trial", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="RUN_OR_PILOTS")
    parser.add_argument("--note", help="short note for the new rows")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results files")
    options = parser.parse_args(arguments)
    try:
        made = [trial for path in options.paths for trial in trials(path)]
        for path, count in record(made, options.results, options.note).items():
            print(f"{count} new in {path}")
    except (ValueError, OSError) as error:
        print(f"trial: {error}", file=sys.stderr)
        return 2
    print("Show them: make tables")
    return 0


if __name__ == "__main__":
    sys.exit(main())
