"""A job is what one command requests; its runs are trained where they are missing and resumed where they stopped.

A cell's run folder is RUNS/DATASET-MODEL, with `-seedN` for a seed other than 0. Unless --runs is given, RUNS is
OUT/table2 for classifiers, OUT/table4 for flows, OUT/figure2 for flows in the plane, OUT/hybrid for hybrids and
OUT/semi-supervised for those with few labels. All tables and figures that show a cell read it from there, so that it is
trained once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from .. import config, data, presets
from ..data import Dataset, DataSettings, Splits, subsample
from ..data.download import REGISTRY, is_present
from ..model import Model
from ..presets import Experiment
from ..results import is_published, require_commit
from ..run import Run, resume, start, truncation_warning
from ..spelling import nearest
from ..train import Report, TrainingError
from .cells import Cell, to_label
from .experiments import BUDGETS, KINDS, RECIPES, experiment

#: Settings that do not affect a result: the dataset directory, the run's name, and the steps, which follow from epochs.
IGNORED = ("name", "about", "data.folder", "training.steps")

#: Settings that identify a cell, beside those of its kind and its overrides: with other values it would be another.
FIXED = ("seed", "data.source")

#: How the error of a diverged training begins: "the loss of step 17 is nan; ...".
DIVERGED = re.compile(r"the (?:loss|gradient|weights) of step (\d+) [^;]*")


@dataclass(frozen=True)
class Job:
    """What is requested. Without `datasets` and `models` a result uses its own; `recipe` follows from the budget.

    Every result has its own datasets and models and refuses others (`Plan.choose`). `overrides` are settings as of
    --set.
    """

    budget: str = "smoke"
    out: Path = Path("runs/paper")
    datasets: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    recipe: str = ""
    overrides: tuple[str, ...] = ()
    data_dir: str | None = None
    runs: Path | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, known in (("budget", BUDGETS), ("recipe", ("", *RECIPES))):
            if (got := getattr(self, name)) not in known:
                words = [w for w in known if w]
                raise ValueError(f"{name} must be one of {', '.join(words)}; got {got!r}.{nearest(got, words)}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be distinct, at least one; got {list(self.seeds)}.")
        object.__setattr__(self, "models", tuple(dict.fromkeys(to_label(m) for m in self.models)))
        object.__setattr__(self, "recipe", self.recipe or ("paper" if self.budget == "paper" else "ours"))

    def experiment(self, cell: Cell, seed: int) -> Experiment:
        """Return the experiment of a cell; raise `ValueError` for an override that would make it another cell."""
        own = [config.setting_path(Experiment, assignment) for assignment in cell.overrides]
        fixed = (*FIXED, *KINDS[cell.purpose].fixed, *own, *(("network.family",) if cell.budget_of else ()))
        for assignment in self.overrides:
            if config.setting_path(Experiment, assignment) in fixed:
                raise ValueError(
                    f"--set must not turn {cell.label} into another cell; got --set {assignment}. "
                    "Choose the cell with --cells, --seed or --dataset."
                )
        more: Any = {"data_dir": self.data_dir, "overrides": self.overrides}
        return experiment(cell, self.budget, self.recipe, seed=seed, **more)

    def check(self, cells: Sequence[Cell]) -> None:
        """Raise an error for wrong folders, settings, commits or missing data, before anything is trained."""
        for name, path in (("--out", self.out), ("--runs", self.runs)):
            if path is not None and (file := next((p for p in (path, *path.parents) if p.is_file()), None)):
                raise ValueError(f"{name} must be a folder; {file} is a file. Choose another {name}.")
        for cell, seed in product(cells, self.seeds):
            wanted = self.experiment(cell, seed)
            usual, chains = presets.find(cell.preset).network, cell.purpose in ("classification", "plane")
            if wanted.network.factor_out and chains and not usual.factor_out and usual.family != "irevnet":
                raise ValueError("the paper's classifiers need factor_out=false; got factor_out=true. Leave it out.")
            folder = self.run_folder(cell, seed)
            if not (folder / "model.safetensors").is_file():
                _check_downloaded(wanted.data)
            if is_published(self.out) and (folder / "environment.json").is_file():
                require_commit(self.out, Run.open(folder).read_json("environment.json"))

    def run_folder(self, cell: Cell, seed: int) -> Path:
        """Return the run folder of a cell."""
        folder = self.out / KINDS[cell.purpose].home if self.runs is None else self.runs
        return folder / (cell.folder + (f"-seed{seed}" if seed else ""))


class Stopped(Exception):
    """The job was interrupted; finished work is saved."""


class Work:
    """A running job: its runs, its data and models, each read once, and its callbacks.

    `report` gives the progress report of a training by name, `stop` says whether to stop, `say` prints a line.
    """

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
        self._models: dict[Path, Model] = {}

    def get_run(self, cell: Cell, seed: int) -> Run:
        """Return the finished run of a cell: loaded, resumed, or trained now. Raises `Stopped`."""
        wanted = self.job.experiment(cell, seed)
        folder = self.job.run_folder(cell, seed)
        device = self.job.device
        if (folder / "config.toml").is_file():
            run = self._open(folder)
            _check_settings(run, wanted)
            if (folder / "model.safetensors").is_file():
                return run
            if found := find_divergence(run):
                raise TrainingError(f"{cell} diverged: {found['why']}. Remove {folder} to train it again.")
            result = resume(folder, device=device, report=self.report(str(cell)), stop=self.stop)
        else:
            splits = self._load(wanted.data)
            result = start(wanted, folder, device=device, report=self.report(str(cell)), stop=self.stop, splits=splits)
        if not result.finished:
            raise Stopped(f"{cell} stopped and saved at step {result.step} of {result.run.experiment.training.steps}")
        if warning := truncation_warning(result.run):
            self.say(f"{cell}: {warning}")
        return result.run

    def attempt(self, cell: Cell, seed: int) -> Run:
        """Return the run of a cell as `get_run` does, or one that diverged, which is noted and not trained again."""
        folder = self.job.run_folder(cell, seed)
        if (folder / "config.toml").is_file() and find_divergence(run := self._open(folder)):
            _check_settings(run, self.job.experiment(cell, seed))
            return run
        try:
            return self.get_run(cell, seed)
        except TrainingError as error:
            if not (found := DIVERGED.match(str(error))):
                raise
            run = self._open(folder)
            note = {"diverged": {"step": int(found[1]), "why": found[0]}}
            run.write_run_json("environment.json", run.read_json("environment.json") | note)
            return run

    def splits(self, run: Run) -> Splits:
        """Return the data of a run, verified to be those it was trained on; read once for all runs that share them."""
        key = run.experiment.data
        if key not in self._splits:
            self._splits[key] = run.splits()
        return self._splits[key]

    def model(self, run: Run) -> Model:
        """Return the final model of a run on the job's device; loaded once for all results."""
        if run.folder not in self._models:
            self._models[run.folder] = run.model(device=self.job.device)
        return self._models[run.folder]

    def images(self, run: Run, most: int) -> Dataset:
        """Return a fixed subsample of the test images on the job's device; a quarter of it for the budget smoke."""
        count = most // 4 if self.job.budget == "smoke" else most
        return subsample(self.splits(run).test, count).to(self.job.device)

    def _open(self, folder: Path) -> Run:
        return Run.open(folder).with_data_folder(self.job.data_dir)

    def _load(self, settings: DataSettings) -> Splits:
        key = settings.resolved()
        if key not in self._splits:
            self._splits[key] = data.load(settings)
        return self._splits[key]


def find_divergence(run: Run) -> dict[str, Any]:
    """Return the step at which a run diverged, and what was not finite; empty if `Work.attempt` noted no divergence."""
    return dict(run.read_json("environment.json").get("diverged") or {})


def _check_downloaded(settings: DataSettings) -> None:
    if settings.source in REGISTRY and not is_present(settings.source, settings.folder):
        raise FileNotFoundError(
            f"{settings.source} is not in the folder {settings.folder}. Run `iresnet data download {settings.source}`, "
            "or pass the folder that holds it with --data-dir."
        )


def _check_settings(run: Run, wanted: Experiment) -> None:
    """Raise `ValueError` for a run with other settings: its metrics would be recorded under the wrong name."""
    there, here = (dict(config.flatten(config.to_mapping(e))) for e in (run.experiment, wanted))
    compared = [k for k in {**there, **here} if k not in IGNORED]
    # Where epochs are given, steps follow from the data.
    for key in compared if wanted.training.epochs else [*compared, "training.steps"]:
        if there.get(key) != here.get(key):
            raise ValueError(
                f"{run.folder} holds a run with {key} = {there.get(key)}; the job requests {here.get(key)}. "
                "Request the same, or choose another --out."
            )
