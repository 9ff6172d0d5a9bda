"""A table or figure of the paper as an object: what it shows, what the paper says, what it costs, and how to make it.

To add one: write a file with the paper's values and a `Result`, and add it to `iresnet.reproduce.RESULTS`. For trained
cells, a `Plan` lists the cells, a function measures one of them, and `trained_result` does the rest. Other results give
`run_items` a list of what to measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ..results import Results
from ..run import Run
from ..spelling import hint, nearest
from .cells import DATASETS, DENSITIES, DIGITS, FLOWS, LABELS, Cell, find_cell, parse_number
from .experiments import BUDGETS
from .job import Job, Stopped, Work
from .record import Entry, Row, comparable_entries, merge_entries, new_entry, rows_per_run, settings_lines

#: What is measured of a trained cell: named metrics, other details, and a sentence for the screen.
Measurement: TypeAlias = tuple[Row, dict[str, Any], str]
#: The name of what is to be measured, and a function that returns its entry and a sentence.
Item: TypeAlias = tuple[str, Callable[[], tuple[Entry, str]]]
#: The entries by dataset that one plot or sentence compares.
Groups: TypeAlias = dict[str, list[Entry]]


@dataclass(frozen=True)
class Reproduction:
    """A reproduced result: the content of its file, the columns to print (heading: key), files, and notes."""

    results: Results
    columns: Mapping[str, str]
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """One table or figure. `says` is the paper's result, `costs` has a few words for every budget."""

    name: str
    about: str
    says: str
    costs: Mapping[str, str]
    run: Callable[[Work], Reproduction]
    check: Callable[[Job], object] = lambda job: None
    plan: Plan | None = None


#: Headings of columns that are narrower than their keys.
HEADINGS = {
    "dataset": "data",
    "largest Lip(g)": "Lip(g)\n≤",
    "error %": "error\n%",
    "epochs": "ep-\nochs",
    "parameters": "para-\nmeters",
    "bits/dim": "bits/\ndim",
    "bias bound": "bias\nat most",
    "estimator error": "esti-\nmator ±",
    "error over images": "images\n±",
}


def columns(*keys: str | tuple[str, str]) -> dict[str, str]:
    """Return the columns to print (heading: key); a tuple gives the heading of its key.

    >>> columns("model", "epochs", "training s", ("±", "spread"))
    {'model': 'model', 'ep-\\nochs': 'epochs', 'training\\ns': 'training s', '±': 'spread'}
    """
    pairs = (key if isinstance(key, tuple) else (HEADINGS.get(key, key.replace(" ", "\n", 1)), key) for key in keys)
    return dict(pairs)


def budget_costs(smoke: str, short: str, paper: str | None = None) -> dict[str, str]:
    """Return the costs by budget; without `paper` that budget costs as much as the short one."""
    return dict(zip(BUDGETS, (smoke, short, short if paper is None else paper), strict=True))


@dataclass(frozen=True)
class Plan:
    """Which cells a result shows: those of the paper, and the few of the smoke budget."""

    name: str
    cells: tuple[Cell, ...]
    smoke: tuple[Cell, ...]
    other_datasets: tuple[Cell, ...] = ()  # used only where their dataset is requested
    other_models: tuple[Cell, ...] = ()  # used only where their label is requested
    letter: str = ""  # "c" or "w": cells with any such number may be requested

    def choose(self, job: Job) -> list[Cell]:
        """Return the cells that a job requests; raise `ValueError` for one that the result does not have."""
        own = self.own_cells(job)
        labels = dict.fromkeys(label for cells in own.values() for label in cells)
        if unknown := next((m for m in job.models if m not in LABELS and not parse_number(m)), None):
            there = {cell.label for cell in self.other_models if cell.dataset in own}
            known = dict.fromkeys([*labels, *(label for label in LABELS if label in there)])
            raise ValueError(f"{self.name} has no cell {unknown!r}. {hint(unknown, known)}")
        found = [self._find(d, m, cells) for d, cells in own.items() for m in job.models or cells]
        if cells := [cell for cell in found if cell is not None]:
            return cells
        models, datasets = ", ".join(job.models), ", ".join(own)
        raise ValueError(f"{self.name} has no cell {models} on {datasets}. Its cells are {', '.join(labels)}.")

    def check(self, job: Job) -> None:
        """Raise an error for a job that cannot be done, before anything is trained."""
        job.check(self.choose(job))

    def own_cells(self, job: Job) -> dict[str, dict[str, Cell]]:
        """Return the cells of every dataset that the job requests, by label."""
        if job.budget == "smoke":
            if job.datasets and (DIGITS not in job.datasets or not {DIGITS, *DENSITIES}.issuperset(job.datasets)):
                raise ValueError(
                    f"{self.name} with the budget smoke uses digits; got {', '.join(job.datasets)}. "
                    "Leave --dataset out."
                )
            return cells_by_dataset(self.smoke)
        known = cells_by_dataset((*self.cells, *self.other_datasets))
        wanted = job.datasets or cells_by_dataset(self.cells)
        chosen = {d: cells for d, cells in known.items() if d in wanted}
        unknown = [d for d in job.datasets if d not in (*DATASETS, DIGITS, *DENSITIES)]
        if unknown or not chosen:
            got = unknown or job.datasets
            remedy = nearest(got[0], known) or " Choose among those."
            raise ValueError(f"{self.name} uses {', '.join(known)}; got {', '.join(got)}.{remedy}")
        return chosen

    def _find(self, dataset: str, label: str, own: Mapping[str, Cell]) -> Cell | None:
        letter, _ = parse_number(label) or ("", 0.0)
        others = (cell for cell in self.other_models if (cell.dataset, cell.label) == (dataset, label))
        return own.get(label) or (find_cell(dataset, label) if letter and letter == self.letter else next(others, None))


def flow_plan(name: str, *datasets: str, paper: Mapping[str, Any], others: Sequence[str] = ()) -> Plan:
    """Return a plan of our flow on every dataset, with the paper's value by dataset; other flows are optional."""
    flows = tuple(replace(cell, paper=paper.get(cell.dataset)) for cell in FLOWS)
    usual = {cell.dataset: cell for cell in flows if cell.label == "flow"}
    own, more = (tuple(usual[d] for d in names) for names in (datasets, others))
    return Plan(name, own, (usual[DIGITS],), more, flows)


def cells_by_dataset(cells: Sequence[Cell]) -> dict[str, dict[str, Cell]]:
    """Group cells by dataset and label."""
    datasets = dict.fromkeys(cell.dataset for cell in cells)
    return {d: {cell.label: cell for cell in cells if cell.dataset == d} for d in datasets}


def run_items(
    work: Work, name: str, items: Iterable[Item], rows: Callable[[Sequence[Entry]], list[Row]] = rows_per_run
) -> Results:
    """Measure one item after the other; each is in OUT/NAME.json before the next begins. Raises `Stopped`."""
    results = Results(name)
    for what, measure in items:
        if work.stop():
            raise Stopped(f"{what} was not begun")
        entry, sentence = measure()
        results = merge_entries(name, [entry], work.job.out, rows)
        work.say(f"{name}  {what}: {sentence}")
    return results


def trained_result(
    plan: Plan,
    measure: Callable[[Work, Run, Cell], Measurement],
    columns: Mapping[str, str],
    *,
    about: str,
    says: str,
    costs: Mapping[str, str],
    notes: Sequence[str] = (),
    remarks: Callable[[Sequence[Row], Groups], Sequence[str]] = lambda rows, groups: (),
    rows: Callable[[Sequence[Entry]], list[Row]] = rows_per_run,
    all_seeds: bool = False,
    get_run: Callable[[Work, Cell, int], Run] = Work.get_run,
    published: Callable[[Job], Sequence[Entry]] = lambda job: (),
    plots: Callable[[Work, Groups], Sequence[Path]] = lambda work, groups: (),
) -> Result:
    """Return a result of trained cells: a file and perhaps plots, from the first seed or from `all_seeds`.

    Every cell is trained where it is missing (`get_run`), measured and recorded. `published` entries, which are no runs
    of ours, are added to the file. `remarks` follow the notes.
    """

    def measure_cell(work: Work, cell: Cell, seed: int) -> tuple[Entry, str]:
        run = get_run(work, cell, seed)
        row, details, sentence = measure(work, run, cell)
        made = {**run.read_json("environment.json"), "experiment": settings_lines(run)}
        return new_entry(work.job, cell.dataset, cell.label, row, details, made, work.job.overrides, seed), sentence

    def run(work: Work) -> Reproduction:
        job, cells = work.job, plan.choose(work.job)
        seeds = job.seeds if all_seeds else job.seeds[:1]
        if others := published(job):
            merge_entries(plan.name, others, job.out, rows)
        if len(seeds) < len(job.seeds):
            work.say(f"{plan.name} uses the first seed alone, {seeds[0]}")
        items = [(str(cell), partial(measure_cell, work, cell, seed)) for cell in cells for seed in seeds]
        results = run_items(work, plan.name, items, rows)
        groups = {d: comparable_entries(results.runs, job, d) for d in cells_by_dataset(cells)}
        files, said = plots(work, groups), remarks(results.rows, groups)
        return Reproduction(results, columns, (job.out / f"{plan.name}.json", *files), (*notes, *said))

    return Result(plan.name, about, says, costs, run, plan.check, plan)


def plot_each_dataset(
    name: str, usual: str, plot: Callable[[list[Entry], Path], Path]
) -> Callable[[Work, Groups], list[Path]]:
    """Return a function that makes one plot per dataset."""
    return lambda work, groups: [
        plot(entries, plot_path(work.job, name, dataset, usual)) for dataset, entries in groups.items()
    ]


def plot_path(job: Job, name: str, dataset: str, usual: str) -> Path:
    """Return OUT/NAME.png, or OUT/NAME-DATASET.png for a dataset other than the paper's."""
    return job.out / (f"{name}.png" if dataset in (usual, DIGITS) else f"{name}-{dataset}.png")


def refuse_choices(job: Job, rule: str) -> None:
    """Raise `ValueError` for --set, --cells and --dataset, which a result without trained cells does not have."""
    if got := (*job.overrides, *job.models, *job.datasets):
        raise ValueError(f"{rule}; got {', '.join(got)}. Leave --set, --cells and --dataset out.")
