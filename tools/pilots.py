"""Compare short trainings to find good settings: python -m tools.pilots PRESET --try "learning_rate=1e-3" ...

Each pilot is a preset with some settings replaced. It trains on a third of the training samples for a given number of
seconds (compiling and graph capture are not counted), with its schedule stretched over that time. Its averaged weights
are evaluated on the validation samples; the test set is never read. A word without "=" names another preset:

    python -m tools.pilots mnist-flow --try "" --try "learning_rate=1e-3" --try "mnist-flow-small" --seconds 60
    python -m tools.pilots cifar10-flow --list tools/pilots-cifar10.txt --seconds 120 --jobs 2 --device cuda

Rows are appended to OUT/NAME.json as they finish; `python -m tools.trial OUT/NAME.json` adds them to the recipes in the
documentation. Validation bits/dim come from a series with many terms (exact up to 64 dimensions) and from weights that
are not tightened: good for comparing pilots, not for publishing.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from iresnet import data
from iresnet.data import Dataset, subsample
from iresnet.data.units import nats_per_unit
from iresnet.evaluate import as_flow, has_density
from iresnet.evaluate.draws import log_prob_by_generator
from iresnet.lipschitz import defer_norms, refresh_
from iresnet.logdet import EXACT_UP_TO, PowerSeries
from iresnet.model import Model
from iresnet.models import build
from iresnet.presets import Experiment, find, with_overrides
from iresnet.results import PILOT, Results, markdown_table, nonfinite_to_none, provenance, read, write
from iresnet.run import validate
from iresnet.run.shared import make_batches
from iresnet.train import State, Training, set_learning_rate
from iresnet.tree import parameter_count

#: Validation samples that a density is evaluated on, draws of noise and probes per sample, terms of the series.
ROWS, DRAWS, TERMS = 1000, 2, 30

#: Warm-up steps on a GPU, which compile and capture before the clock starts; seconds reserved for the evaluation.
FIRST, RESERVE = 12, 45.0

#: Steps of the learning-rate schedule: fractions of a pilot's time, since its number of steps is not known beforehand.
PARTS = 1_000_000

COLUMNS = ("preset", "settings", "steps", "seconds", "bits/dim", "±", "error %", "note")


@dataclass(frozen=True)
class Pilot:
    """A preset and the settings to replace."""

    preset: str
    settings: tuple[str, ...] = ()

    @classmethod
    def parse(cls, line: str, preset: str) -> Pilot:
        """Parse a pilot from a line: words with "=" are settings, a word without names a preset.

        >>> Pilot.parse("mnist-flow-small learning_rate=1e-3 terms=4", "mnist-flow")
        Pilot(preset='mnist-flow-small', settings=('learning_rate=1e-3', 'terms=4'))
        """
        words = shlex.split(line, comments=True)
        names = [w for w in words if "=" not in w]
        if len(names) > 1:
            raise ValueError(f"a pilot names at most one preset; got {', '.join(names)}. Settings are KEY=VALUE.")
        return cls(names[0] if names else preset, tuple(w for w in words if "=" in w))

    def experiment(self, folder: str | None) -> Experiment:
        """The experiment that this pilot trains; unknown presets and settings raise ValueError."""
        made = with_overrides(find(self.preset), self.settings)
        return made if folder is None else replace(made, data=replace(made.data, folder=folder))


@dataclass(frozen=True)
class Budget:
    """Limits of a pilot.

    It trains on one `part`-th of the training samples for `seconds` and at most `steps` steps (0: no limit), and must
    be evaluated by the time `end` (as `time.time` counts).
    """

    part: int = 3
    seconds: float = 60.0
    steps: int = 0
    end: float = float("inf")
    device: str = "cpu"
    threads: int = 0


class Clock:
    """The elapsed fraction of a pilot, 0 to 1; it starts after the warm-up steps."""

    def __init__(self, budget: Budget, first: int) -> None:
        self.budget, self.first, self.begun = budget, first, 0.0
        self.seconds = budget.seconds

    def part(self, step: int) -> float:
        """The fraction that has elapsed before this step (steps count from 0)."""
        if step < self.first:
            return 0.0
        now = time.time()
        if step == self.first:
            self.begun = now
            self.seconds = max(1e-9, min(self.budget.seconds, self.budget.end - RESERVE - now))
        counted = (step - self.first) / self.budget.steps if self.budget.steps else 0.0
        return max((now - self.begun) / self.seconds, counted)

    @property
    def elapsed(self) -> float:
        return time.time() - self.begun


def run(pilot: Pilot, budget: Budget, folder: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train and evaluate one pilot; return its row and its environment. A failed pilot has the reason as its note."""
    if budget.threads:
        torch.set_num_threads(budget.threads)
    experiment, begun = pilot.experiment(folder), time.time()
    row: dict[str, Any] = {"dataset": experiment.data.source, "task": experiment.objective.kind}
    row |= {"preset": pilot.preset, "settings": " ".join(pilot.settings) or None}
    if begun + RESERVE >= budget.end:
        return {**row, "note": "not started: no time left"}, provenance(seeds=[experiment.seed], seconds=0.0)
    try:
        metrics, about = _train(experiment, budget)
        return {**row, **metrics}, about
    except (RuntimeError, ValueError) as error:  # a pilot may diverge or run out of memory
        reason = str(error).splitlines()[0]
    finally:  # free the memory for the next pilot in this process
        gc.collect()
        if budget.device.startswith("cuda"):
            torch.cuda.empty_cache()
    return {**row, "note": f"failed: {reason}"}, provenance(seeds=[experiment.seed], seconds=time.time() - begun)


def _train(experiment: Experiment, budget: Budget) -> tuple[dict[str, Any], dict[str, Any]]:
    splits, device = data.load(experiment.data), budget.device
    train = subsample(splits.train, max(1, len(splits.train) // budget.part)).to(device)
    torch.manual_seed(experiment.seed)
    with defer_norms():
        model = build(experiment.network, splits.schema, experiment.objective.kind, train.x).to(device)
    refresh_(model, settle=True)
    batches = make_batches(experiment, train)
    objective = experiment.objective.build_objective(
        model, splits.schema.levels, experiment.data.augment, batches.labelled_size
    )
    settings, generator = experiment.training, torch.Generator(device).manual_seed(experiment.seed)
    state = State(objective, settings, generator, experiment.acceleration)
    clock = Clock(budget, FIRST if device.startswith("cuda") else 1)
    objective.train()
    for x, y in batches.starting_at(0):
        if (part := clock.part(state.step)) >= 1:
            break
        set_learning_rate(state.optimiser, rate(settings, state.step, part))
        state.advance(x, y)
        state.update_average()
        if state.step == clock.first and device.startswith("cuda"):
            torch.cuda.synchronize()
    seconds = clock.elapsed
    metrics = validation_metrics(cast(Model, state.averaged_model()), splits.validation.to(device), experiment)
    row = {"training rows": len(train), "batch": batches.size, "steps": state.step, "seconds": round(seconds, 1)}
    size, precision = parameter_count(model), state.engine.precision
    about = provenance(seeds=[experiment.seed], seconds=seconds, precision=precision, parameters=size)
    return row | nonfinite_to_none(metrics), about | {"engine": str(state.engine)}


def rate(settings: Training, step: int, part: float) -> float:
    """The learning rate: the schedule runs over the pilot's time, its warm-up over steps."""
    clock = replace(settings, epochs=0, steps=PARTS, warmup=0)
    return clock.learning_rate_at(min(PARTS - 1, int(part * PARTS))) * min(1.0, (step + 1) / max(1, settings.warmup))


@torch.no_grad()
def validation_metrics(model: Model, validation: Dataset, experiment: Experiment) -> dict[str, Any]:
    """The metrics that pilots are compared by, on validation samples."""
    metrics: dict[str, Any] = {"bits/dim": None, "±": None, "error %": None}
    if has_density(model):
        rows = subsample(validation, ROWS)
        exact = rows.schema.dimension <= EXACT_UP_TO
        generator = torch.Generator(rows.x.device).manual_seed(0)
        estimator = None if exact else PowerSeries(terms=TERMS)
        values = -log_prob_by_generator(as_flow(model), rows, estimator, [generator] * DRAWS).mean(0) / nats_per_unit(
            rows.schema.shape, rows.schema.levels
        )
        metrics |= {"bits/dim": float(values.mean()), "±": float(values.std()) / len(rows) ** 0.5}
        metrics |= {"held-out rows": len(rows), "method": "exact" if exact else f"series of {TERMS} terms"}
    if experiment.objective.kind != "density":
        plain = replace(experiment.objective, kind="classification", radius=0.0)
        metrics["error %"] = validate(model, validation, plain)[0]["validation error %"]
        metrics["held-out rows"] = len(validation)
    return metrics


# ---------------------------------------------------------------------------------------------- several pilots


def run_all(
    pilots: Sequence[Pilot], budget: Budget, out: Path, name: str, *, jobs: int = 1, folder: str | None = None
) -> Results:
    """Run pilots, `jobs` at a time, and append each row to OUT/NAME.json as soon as it is finished."""
    path = out / f"{name}.json"
    kept = read(path) if path.is_file() else Results(name, [], [])
    rows, runs = list(kept.rows), list(kept.runs)
    for row, about in _results(pilots, budget, jobs, folder):
        rows.append({**row, "run": len(runs)})
        runs.append(about | PILOT)
        write(Results(name, rows, runs), out)
        print(_line(row), flush=True)
    return Results(name, rows, runs)


def _results(
    pilots: Sequence[Pilot], budget: Budget, jobs: int, folder: str | None
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Run pilots one after another, or in `jobs` processes that are reused, so that compiled code is reused too."""
    if jobs == 1:
        yield from (run(pilot, budget, folder) for pilot in pilots)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(run, pilot, budget, folder) for pilot in pilots]
        yield from (future.result() for future in as_completed(futures))


def _line(row: dict[str, Any]) -> str:
    words = [row["preset"], row["settings"] or "unchanged"]
    words += [f"{row[k]:.4f} {k}" for k in ("bits/dim", "error %") if row.get(k) is not None]
    words += [f"{row['steps']:,} steps in {row['seconds']:.0f} s"] if "steps" in row else [row["note"]]
    return "  ".join(words)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of the pilots, the best first: by bits/dim, then by error."""

    def place(row: Mapping[str, Any]) -> tuple[float, float]:
        numbers = (row.get("bits/dim"), row.get("error %"))
        first, second = (float("inf") if n is None else n for n in numbers)
        return first, second

    known = {k for row in rows for k in row}
    return markdown_table(sorted(rows, key=place), [c for c in COLUMNS if c in known])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requested pilots and print a table of them."""
    parser = argparse.ArgumentParser(prog="python -m tools.pilots", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("preset", help="preset of pilots that name none")
    add(
        "--try",
        dest="tries",
        action="append",
        default=[],
        metavar="SETTINGS",
        help="KEY=VALUE ...; repeatable",
    )
    add("--list", type=Path, help="file with one pilot per line; # starts a comment")
    add("--seconds", type=float, default=60.0, help="training time of each pilot")
    add("--steps", type=int, default=0, help="maximum number of steps of each pilot; 0: no limit")
    add("--limit", type=float, default=float("inf"), help="seconds for the whole command; pilots are shortened to fit")
    add("--part", type=int, default=3, help="train on one N-th of the training samples; 1: all")
    add("--jobs", type=int, default=1, help="number of pilots that run in parallel")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--data-dir", default=None, help="dataset directory")
    add("--out", type=Path, default=Path("runs/pilots"))
    add("--name", default="pilots", help="name of the results file in OUT")
    options = parser.parse_args(arguments)
    try:
        pilots = _pilots(options)
        threads = max(1, (os.cpu_count() or 1) // options.jobs) if options.jobs > 1 else 0
        end = time.time() + options.limit
        budget = Budget(options.part, options.seconds, options.steps, end, options.device, threads)
        made = run_all(pilots, budget, options.out, options.name, jobs=options.jobs, folder=options.data_dir)
    except BrokenProcessPool:
        print(f"pilots: a worker process died, perhaps out of memory; try fewer --jobs. {options.out} has the others.")
        return 1
    except (ValueError, OSError) as error:
        print(f"pilots: {error}", file=sys.stderr)
        return 2
    print(f"\n{table(made.rows)}\n\n{options.out / options.name}.json")
    return 0


def _pilots(options: argparse.Namespace) -> list[Pilot]:
    """The requested pilots; all are checked before the first one starts."""
    for name in ("part", "jobs"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} must be at least 1; got {getattr(options, name)}.")
    if not options.seconds > 0:
        raise ValueError(f"--seconds must be positive; got {options.seconds:g}.")
    lines = [] if options.list is None else options.list.read_text(encoding="utf-8").splitlines()
    listed = [line for line in lines if shlex.split(line, comments=True)]
    pilots = [Pilot.parse(line, options.preset) for line in (*listed, *options.tries)] or [Pilot(options.preset)]
    for pilot in pilots:
        pilot.experiment(options.data_dir)
    return pilots


if __name__ == "__main__":
    sys.exit(main())
