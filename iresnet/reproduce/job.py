"""What one invocation asks for, and the runs it is made of: trained if they are missing, taken up where they stopped.

A cell's run folder is RUNS/DATASET-MODEL, with `-seedN` for another seed than 0; RUNS is OUT/table2 for classifiers,
OUT/table4 for flows, OUT/figure2 for densities in the plane and OUT/hybrid for hybrids unless it is named. Every table
and figure that shows a cell takes it from there, so that it is trained once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from torch import nn

from .. import config, data, presets
from ..data import Dataset, DataSettings, Splits, subsample
from ..data.download import REGISTRY, is_present
from ..presets import Experiment
from ..run import Run, resume, start, truncation_warning
from ..spelling import nearest
from ..train import Report
from .cells import Cell, label_of
from .experiments import BUDGETS, KINDS, RECIPES, experiment

#: Settings that change nothing of a result: where data lie, what a run is called, and what follows from the data.
BESIDE = ("name", "about", "data.folder", "training.steps")

#: Settings that say which cell it is, with those of its kind: to change them is to ask for another.
FIXED = ("seed", "data.source")


@dataclass(frozen=True)
class Job:
    """What is asked for. Without `datasets` and `models` a result makes its own; `recipe` follows from the budget.

    Which sets and models there are, every result says itself, and refuses others (`Plan.chosen`).
    """

    budget: str = "smoke"
    out: Path = Path("runs/paper")
    datasets: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    recipe: str = ""
    changes: tuple[str, ...] = ()
    folder: str | None = None
    runs: Path | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, known in (("budget", BUDGETS), ("recipe", ("", *RECIPES))):
            if (got := getattr(self, name)) not in known:
                words = [w for w in known if w]
                raise ValueError(f"{name} must be one of {', '.join(words)}; got {got!r}.{nearest(got, words)}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be different numbers, at least one; got {list(self.seeds)}.")
        object.__setattr__(self, "models", tuple(dict.fromkeys(label_of(m) for m in self.models)))
        object.__setattr__(self, "recipe", self.recipe or ("paper" if self.budget == "paper" else "ours"))

    def experiment(self, cell: Cell, seed: int) -> Experiment:
        """All that decides the run of a cell; a setting that would make another cell of it is refused."""
        fixed = (*FIXED, *KINDS[cell.purpose].fixed, *(("network.family",) if cell.budget_of else ()))
        for assignment in self.changes:
            if config.setting_path(Experiment, assignment) in fixed:
                raise ValueError(
                    f"{cell.label} is what the cell is; choose it with --cells, --seed or --dataset; "
                    f"got --set {assignment}."
                )
        return experiment(cell, self.budget, self.recipe, seed=seed, folder=self.folder, changes=self.changes)

    def check(self, cells: Sequence[Cell]) -> None:
        """Refuse what cannot be made, before anything is trained: folders, settings, and data that are not there."""
        for name, path in (("--out", self.out), ("--runs", self.runs)):
            if path is not None and (file := next((p for p in (path, *path.parents) if p.is_file()), None)):
                raise ValueError(f"{file} is a file; {name} must be a folder. Choose another {name}.")
        for cell, seed in product(cells, self.seeds):
            wanted = self.experiment(cell, seed)
            usual, chains = presets.find(cell.preset).network, cell.purpose in ("classification", "plane")
            if wanted.network.factor_out and chains and not usual.factor_out and usual.family != "irevnet":
                raise ValueError("the paper's classifiers are chains of blocks; got factor_out=true. Leave it out.")
            if not (self.run_folder(cell, seed) / "model.safetensors").is_file():
                _check_there(wanted.data)

    def run_folder(self, cell: Cell, seed: int) -> Path:
        """Where the run of a cell is."""
        folder = self.out / KINDS[cell.purpose].home if self.runs is None else self.runs
        return folder / (cell.folder + (f"-seed{seed}" if seed else ""))


class Stopped(Exception):
    """Someone asked to stop; what was done is saved."""


class Work:
    """A job under way: its runs, its data and models, which are read once, and whom it tells."""

    def __init__(
        self,
        job: Job,
        *,
        report: Callable[[str], Report | None] = lambda name: None,
        stop: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.job, self.report, self.stop, self.say = job, report, stop, say
        self._splits: dict[DataSettings, Splits] = {}
        self._models: dict[Path, nn.Module] = {}

    def trained(self, cell: Cell, seed: int) -> Run:
        """The finished run of a cell: as it is found, taken up, or made anew. Raises `Stopped`."""
        wanted, folder, device = self.job.experiment(cell, seed), self.job.run_folder(cell, seed), self.job.device
        if (folder / "config.toml").is_file():
            run = Run.open(folder)
            _check_same(run, wanted)
            if (folder / "model.safetensors").is_file():
                return run
            outcome = resume(folder, device=device, report=self.report(str(cell)), stop=self.stop)
        else:
            splits = self._load(wanted.data)
            outcome = start(wanted, folder, device=device, report=self.report(str(cell)), stop=self.stop, splits=splits)
        if not outcome.finished:
            raise Stopped(f"{cell} stopped and saved at step {outcome.step} of {outcome.run.experiment.training.steps}")
        if warning := truncation_warning(outcome.run):
            self.say(f"{cell}: {warning}")
        return outcome.run

    def splits(self, run: Run) -> Splits:
        """The data of a run, proven to be those it was trained on; read once for all runs that share them."""
        key = run.experiment.data
        if key not in self._splits:
            self._splits[key] = run.splits()
        return self._splits[key]

    def model(self, run: Run) -> nn.Module:
        """The released model of a run, on the job's device; loaded once for all results that show it."""
        if run.folder not in self._models:
            self._models[run.folder] = run.model(device=self.job.device)
        return self._models[run.folder]

    def images(self, run: Run, most: int) -> Dataset:
        """So many test images, always the same ones, on the job's device; a quarter of them for the budget smoke."""
        count = most // 4 if self.job.budget == "smoke" else most
        return subsample(self.splits(run).test, count).to(self.job.device)

    def _load(self, settings: DataSettings) -> Splits:
        key = settings.resolved()
        if key not in self._splits:
            self._splits[key] = data.load(settings)
        return self._splits[key]


def _check_there(settings: DataSettings) -> None:
    if settings.source in REGISTRY and not is_present(settings.source, settings.folder):
        raise FileNotFoundError(
            f"{settings.source} is not in the folder {settings.folder}. Run `iresnet data download {settings.source}`, "
            "or name the folder that holds it: --data-dir."
        )


def _check_same(run: Run, wanted: Experiment) -> None:
    """Refuse a run that was made with other settings: its figures would stand under the wrong name."""
    there, here = (dict(_flat(config.to_mapping(e))) for e in (run.experiment, wanted))
    compared = [k for k in {**there, **here} if k not in BESIDE]
    # Where epochs are asked for, steps follow from the data.
    for key in compared if wanted.training.epochs else [*compared, "training.steps"]:
        if there.get(key) != here.get(key):
            raise ValueError(
                f"{run.folder} holds a run with {key} = {there.get(key)}; this asks for {here.get(key)}. "
                "Ask for the same, or choose another --out."
            )


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
