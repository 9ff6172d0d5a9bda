"""Short trainings side by side, to find a recipe: python -m tools.pilots PRESET --try "learning_rate=1e-3" ...

Each pilot is a preset with some settings replaced. It is trained on a third of the training rows for so many seconds of
steps (compiling and capturing before the clock starts), with its schedule stretched over that time, and its averaged
weights are judged on held-out rows. Nothing of the test part is read. Words of a pilot without "=" name another preset:

    python -m tools.pilots mnist-flow --try "" --try "learning_rate=1e-3" --try "mnist-flow-small" --seconds 60
    python -m tools.pilots cifar10-flow --list tools/pilots-cifar10.txt --seconds 120 --jobs 2 --device cuda

The rows go to OUT/NAME.json as they come; `python -m tools.trial OUT/NAME.json` puts them among the recipes that the
documentation shows. Held-out bits are those of a series with many terms (exact up to 64 dimensions), of weights that
are not tightened: good to compare pilots with each other, not to publish.
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
from typing import Any

import torch
from torch import nn

from iresnet import data
from iresnet.data import Batches, Dataset, subsample
from iresnet.evaluate import as_flow, has_density
from iresnet.evaluate.likelihood import log_prob_by_generator
from iresnet.lipschitz import defer_norms, refresh_
from iresnet.logdet import EXACT_UP_TO, PowerSeries
from iresnet.models import build
from iresnet.presets import Experiment, find, with_overrides
from iresnet.results import Results, markdown_table, nonfinite_to_none, provenance, read, write
from iresnet.run import validate
from iresnet.train import State, Training, set_learning_rate
from iresnet.train.objective import nats_per_unit

#: Held-out rows by which a density is judged, draws of noise and probes for each, terms of the series.
ROWS, DRAWS, TERMS = 1000, 2, 30

#: Steps before the clock starts, on a GPU: they compile and capture. Seconds that judging may take.
FIRST, RESERVE = 12, 45.0

#: A schedule counts in parts of a pilot's time, not in steps, whose number is not known before.
PARTS = 1_000_000

COLUMNS = ("preset", "settings", "steps", "seconds", "bits/dim", "±", "error %", "note")


@dataclass(frozen=True)
class Pilot:
    """What is tried: a preset, and settings that are replaced."""

    preset: str
    settings: tuple[str, ...] = ()

    @classmethod
    def parse(cls, line: str, preset: str) -> Pilot:
        """A pilot as it is typed: words with "=" are settings, one without names a preset.

        >>> Pilot.parse("mnist-flow-small learning_rate=1e-3 terms=4", "mnist-flow")
        Pilot(preset='mnist-flow-small', settings=('learning_rate=1e-3', 'terms=4'))
        """
        words = shlex.split(line, comments=True)
        names = [w for w in words if "=" not in w]
        if len(names) > 1:
            raise ValueError(f"a pilot names one preset at most; got {', '.join(names)}. Settings are KEY=VALUE.")
        return cls(names[0] if names else preset, tuple(w for w in words if "=" in w))

    def experiment(self, folder: str | None) -> Experiment:
        """All that decides it but for the time; what there is not is refused."""
        made = with_overrides(find(self.preset), self.settings)
        return made if folder is None else replace(made, data=replace(made.data, folder=folder))


@dataclass(frozen=True)
class Budget:
    """What a pilot may take: a part of the training rows, seconds of steps, steps at most (0: as many as there is time
    for), and a point in time (of `time.time`) by which it must be judged."""

    part: int = 3
    seconds: float = 60.0
    steps: int = 0
    end: float = float("inf")
    device: str = "cpu"
    threads: int = 0


class Clock:
    """How much of a pilot is over, between 0 and 1; it starts when the steps are as fast as they will be."""

    def __init__(self, budget: Budget, first: int) -> None:
        self.budget, self.first, self.begun = budget, first, 0.0
        self.seconds = budget.seconds

    def part(self, step: int) -> float:
        """The part that is over before this step, counted from 0."""
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
    """Train and judge one pilot: its row, and its circumstances. One that fails has the reason as its note."""
    if budget.threads:
        torch.set_num_threads(budget.threads)
    experiment, begun = pilot.experiment(folder), time.time()
    row: dict[str, Any] = {"dataset": experiment.data.source, "task": experiment.objective.kind}
    row |= {"preset": pilot.preset, "settings": " ".join(pilot.settings) or None}
    if begun + RESERVE >= budget.end:
        return {**row, "note": "not begun: no time was left"}, provenance(seeds=[experiment.seed], seconds=0.0)
    try:
        metrics, about = _train(experiment, budget)
        return {**row, **metrics}, about
    except (RuntimeError, ValueError) as error:  # a pilot may well diverge, or not fit into memory
        reason = str(error).splitlines()[0]
    finally:  # the next one in this process begins with the whole memory
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
    objective = experiment.objective.build_objective(model, splits.schema.levels, experiment.data.augment)
    settings, generator = experiment.training, torch.Generator(device).manual_seed(experiment.seed)
    state = State(objective, settings, generator, experiment.acceleration)
    clock = Clock(budget, FIRST if device.startswith("cuda") else 1)
    objective.train()
    batches = Batches(train, settings.batch, seed=experiment.seed, augment=experiment.data.augment)
    for x, y in batches.starting_at(0):
        if (part := clock.part(state.step)) >= 1:
            break
        set_learning_rate(state.optimiser, rate(settings, state.step, part))
        state.advance(x, y)
        state.update_average()
        if state.step == clock.first and device.startswith("cuda"):
            torch.cuda.synchronize()
    seconds = clock.elapsed
    metrics = judged(state.averaged_model(), splits.validation.to(device), experiment)
    row = {"training rows": len(train), "batch": batches.size, "steps": state.step, "seconds": round(seconds, 1)}
    size, precision = sum(p.numel() for p in model.parameters()), state.engine.precision
    about = provenance(seeds=[experiment.seed], seconds=seconds, precision=precision, parameters=size)
    return row | nonfinite_to_none(metrics), about | {"engine": str(state.engine)}


def rate(settings: Training, step: int, part: float) -> float:
    """The learning rate: the schedule over the pilot's time, and its warm-up over steps, as ever."""
    clock = replace(settings, epochs=0, steps=PARTS, warmup=0)
    return clock.learning_rate_at(min(PARTS - 1, int(part * PARTS))) * min(1.0, (step + 1) / max(1, settings.warmup))


@torch.no_grad()
def judged(model: nn.Module, validation: Dataset, experiment: Experiment) -> dict[str, Any]:
    """What a pilot is compared by, on rows that it was not trained on."""
    metrics: dict[str, Any] = {"bits/dim": None, "±": None, "error %": None}
    if has_density(model):
        rows = subsample(validation, ROWS)
        exact = rows.schema.dimension <= EXACT_UP_TO
        generator = torch.Generator(rows.x.device).manual_seed(0)
        estimator = None if exact else PowerSeries(terms=TERMS)
        values = -log_prob_by_generator(as_flow(model), rows, estimator, [generator] * DRAWS).mean(0) / nats_per_unit(
            rows.x, rows.schema.levels
        )
        metrics |= {"bits/dim": float(values.mean()), "±": float(values.std()) / len(rows) ** 0.5}
        metrics |= {"held-out rows": len(rows), "method": "exact" if exact else f"series of {TERMS} terms"}
    if experiment.objective.kind != "density":
        plain = replace(experiment.objective, kind="classification", radius=0.0)
        metrics["error %"] = validate(model, validation, plain)[0]["validation error %"]
        metrics["held-out rows"] = len(validation)
    return metrics


# ---------------------------------------------------------------------------------------------- many of them


def run_all(
    pilots: Sequence[Pilot], budget: Budget, out: Path, name: str, *, jobs: int = 1, folder: str | None = None
) -> Results:
    """Run pilots, so many at a time; OUT/NAME.json has every row as soon as it is there, after those it had."""
    path = out / f"{name}.json"
    kept = read(path) if path.is_file() else Results(name, [], [])
    rows, runs = list(kept.rows), list(kept.runs)
    for row, about in _outcomes(pilots, budget, jobs, folder):
        rows.append({**row, "run": len(runs)})
        runs.append(about)
        write(Results(name, rows, runs), out)
        print(_line(row), flush=True)
    return Results(name, rows, runs)


def _outcomes(
    pilots: Sequence[Pilot], budget: Budget, jobs: int, folder: str | None
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """One after another here, or in so many processes, each used again, so that what it compiled is there."""
    if jobs == 1:
        yield from (run(pilot, budget, folder) for pilot in pilots)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(run, pilot, budget, folder) for pilot in pilots]
        yield from (future.result() for future in as_completed(futures))


def _line(row: dict[str, Any]) -> str:
    words = [row["preset"], row["settings"] or "as it is"]
    words += [f"{row[k]:.4f} {k}" for k in ("bits/dim", "error %") if row.get(k) is not None]
    words += [f"{row['steps']:,} steps in {row['seconds']:.0f} s"] if "steps" in row else [row["note"]]
    return "  ".join(words)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The pilots, the best first: by bits per dimension, then by error."""

    def place(row: Mapping[str, Any]) -> tuple[float, float]:
        numbers = (row.get("bits/dim"), row.get("error %"))
        first, second = (float("inf") if n is None else n for n in numbers)
        return first, second

    known = {k for row in rows for k in row}
    return markdown_table(sorted(rows, key=place), [c for c in COLUMNS if c in known])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the pilots that are asked for, and print them side by side."""
    parser = argparse.ArgumentParser(prog="python -m tools.pilots", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("preset", help="the preset that pilots without a name of their own begin with")
    add("--try", dest="tries", action="append", default=[], metavar="SETTINGS", help="KEY=VALUE ...; may be repeated")
    add("--list", type=Path, help="a file with one pilot a line; # begins a comment")
    add("--seconds", type=float, default=60.0, help="of steps, for each pilot")
    add("--steps", type=int, default=0, help="at most so many, for each pilot")
    add("--limit", type=float, default=float("inf"), help="seconds for the whole command; pilots are cut to fit")
    add("--part", type=int, default=3, help="one of so many parts of the training rows; 1: all")
    add("--jobs", type=int, default=1, help="pilots at a time")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--data-dir", default=None, help="where downloaded sets lie")
    add("--out", type=Path, default=Path("runs/pilots"))
    add("--name", default="pilots", help="of the file of results in OUT")
    asked = parser.parse_args(arguments)
    try:
        pilots = _pilots(asked)
        threads = max(1, (os.cpu_count() or 1) // asked.jobs) if asked.jobs > 1 else 0
        end = time.time() + asked.limit
        budget = Budget(asked.part, asked.seconds, asked.steps, end, asked.device, threads)
        made = run_all(pilots, budget, asked.out, asked.name, jobs=asked.jobs, folder=asked.data_dir)
    except BrokenProcessPool:
        print(f"pilots: a process was ended, by lack of memory perhaps; try fewer --jobs. {asked.out} has the rest.")
        return 1
    except (ValueError, OSError) as error:
        print(f"pilots: {error}", file=sys.stderr)
        return 2
    print(f"\n{table(made.rows)}\n\n{asked.out / asked.name}.json")
    return 0


def _pilots(asked: argparse.Namespace) -> list[Pilot]:
    """What is asked for, all of it known before the first begins."""
    for name in ("part", "jobs"):
        if getattr(asked, name) < 1:
            raise ValueError(f"--{name} must be at least 1; got {getattr(asked, name)}.")
    if not asked.seconds > 0:
        raise ValueError(f"--seconds must be positive; got {asked.seconds:g}.")
    lines = [] if asked.list is None else asked.list.read_text(encoding="utf-8").splitlines()
    listed = [line for line in lines if shlex.split(line, comments=True)]
    pilots = [Pilot.parse(line, asked.preset) for line in (*listed, *asked.tries)] or [Pilot(asked.preset)]
    for pilot in pilots:
        pilot.experiment(asked.data_dir)
    return pilots


if __name__ == "__main__":
    sys.exit(main())
