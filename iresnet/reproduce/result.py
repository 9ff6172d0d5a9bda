"""A table or a figure of the paper as an object: what it shows, what the paper says, what it costs, and how it is made.

To add one: a file with the paper's values, a function `run(work) -> Reproduction`, and a `Result` of its own; then a
line in `iresnet.reproduce.RESULTS`. Where it is made of trained cells, `Plan` says of which, a function measures
one of them, and `of_cells` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from ..results import Results
from ..run import Run
from ..spelling import hint, nearest
from .cells import DATASETS, DENSITIES, DIGITS, FLOWS, LABELS, Cell, find, numbered
from .experiments import BUDGETS
from .job import Job, Stopped, Work
from .record import Entry, Row, alike, entry, merge, one_by_one

#: What is measured of a trained cell: figures with names, the rest, and a sentence for whoever waits.
Measured: TypeAlias = tuple[Row, dict[str, Any], str]
#: The entries of every data set that were made as a job makes them.
Groups: TypeAlias = dict[str, list[Entry]]


@dataclass(frozen=True)
class Reproduction:
    """What was made: the results file's content, the columns worth printing (heading: key), and where files are."""

    results: Results
    columns: Mapping[str, str]
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """One table or figure. `costs` has a few words for every budget."""

    name: str
    about: str
    says: str
    costs: Mapping[str, str]
    run: Callable[[Work], Reproduction]
    check: Callable[[Job], object] = lambda job: None
    plan: Plan | None = None


def costs(smoke: str, short: str, paper: str | None = None) -> dict[str, str]:
    """What every budget costs; that of the paper may be the same as the short one."""
    return dict(zip(BUDGETS, (smoke, short, short if paper is None else paper), strict=True))


@dataclass(frozen=True)
class Plan:
    """Which cells a result shows: those of the paper, and the few that the budget smoke makes."""

    name: str
    cells: tuple[Cell, ...]
    smoke: tuple[Cell, ...]
    others: tuple[Cell, ...] = ()  # made only where their data set is asked for
    beside: tuple[Cell, ...] = ()  # made only where they are asked for by their label
    letter: str = ""  # "c" or "w": cells with any such number may be asked for

    def chosen(self, job: Job) -> list[Cell]:
        """The cells that a job asks for; one that the result does not have is refused."""
        own = self.own(job)
        labels = dict.fromkeys(label for cells in own.values() for label in cells)
        if stranger := next((m for m in job.models if m not in LABELS and not numbered(m)), None):
            known = dict.fromkeys([*labels, *self._beside(own)])
            raise ValueError(f"{self.name} has no cell {stranger!r}. {hint(stranger, known)}")
        found = [self._find(d, m, cells) for d, cells in own.items() for m in job.models or cells]
        if cells := [cell for cell in found if cell is not None]:
            return cells
        asked, sets = ", ".join(job.models), ", ".join(own)
        raise ValueError(f"{self.name} has no cell {asked} on {sets}. Its cells are {', '.join(labels)}.")

    def check(self, job: Job) -> None:
        """Refuse what cannot be made, before anything is trained."""
        job.check(self.chosen(job))

    def own(self, job: Job) -> dict[str, dict[str, Cell]]:
        """The cells of every data set that the job asks for, by label."""
        if job.budget == "smoke":
            if job.datasets and (DIGITS not in job.datasets or not {DIGITS, *DENSITIES}.issuperset(job.datasets)):
                raise ValueError(
                    f"{self.name} of the budget smoke is made of digits; got {', '.join(job.datasets)}. "
                    "Leave --dataset out."
                )
            return by_dataset(self.smoke)
        known, wanted = by_dataset((*self.cells, *self.others)), job.datasets or by_dataset(self.cells)
        chosen = {d: cells for d, cells in known.items() if d in wanted}
        strangers = [d for d in job.datasets if d not in (*DATASETS, DIGITS, *DENSITIES)]
        if strangers or not chosen:
            got = strangers or job.datasets
            remedy = nearest(got[0], known) or " Ask for those."
            raise ValueError(f"{self.name} is made of {', '.join(known)}; got {', '.join(got)}.{remedy}")
        return chosen

    def _beside(self, datasets: Mapping[str, object]) -> list[str]:
        """The labels that may stand beside its own on these sets."""
        there = {cell.label for cell in self.beside if cell.dataset in datasets}
        return [label for label in LABELS if label in there]

    def _find(self, dataset: str, label: str, own: Mapping[str, Cell]) -> Cell | None:
        """One of its own, or one that may stand beside them."""
        letter, _ = numbered(label) or ("", 0.0)
        beside = (cell for cell in self.beside if (cell.dataset, cell.label) == (dataset, label))
        return own.get(label) or (find(dataset, label) if letter and letter == self.letter else next(beside, None))


def of_flows(name: str, *datasets: str, paper: Mapping[str, Any], others: Sequence[str] = ()) -> Plan:
    """Our flow on every set, with what the paper says of that; any other flow of ours may be asked for."""
    flows = tuple(replace(cell, paper=paper.get(cell.dataset)) for cell in FLOWS)
    usual = {cell.dataset: cell for cell in flows if cell.label == "flow"}
    own, more = (tuple(usual[d] for d in sets) for sets in (datasets, others))
    return Plan(name, own, (usual[DIGITS],), more, flows)


def by_dataset(cells: Sequence[Cell]) -> dict[str, dict[str, Cell]]:
    """Cells by data set and label."""
    sets = dict.fromkeys(cell.dataset for cell in cells)
    return {d: {cell.label: cell for cell in cells if cell.dataset == d} for d in sets}


def of_cells(
    plan: Plan,
    measure: Callable[[Work, Run, Cell], Measured],
    columns: Mapping[str, str],
    *,
    about: str,
    says: str,
    costs: Mapping[str, str],
    notes: Sequence[str] = (),
    remarks: Callable[[Sequence[Row], Groups], Sequence[str]] = lambda rows, groups: (),
    rows: Callable[[Sequence[Entry]], list[Row]] = one_by_one,
    several: bool = False,
    published: Callable[[Job], Sequence[Entry]] = lambda job: (),
    pictures: Callable[[Work, Groups], Sequence[Path]] = lambda work, groups: (),
) -> Result:
    """A result that is made of trained cells, of the first seed or of `several`: a file, and perhaps pictures.

    Cell after cell is trained, measured and recorded; what is done is on the disk before the next begins. Entries that
    are no cells of ours, `published`, stand beside them. `remarks` follow the notes.
    """

    def run(work: Work) -> Reproduction:
        job, cells = work.job, plan.chosen(work.job)
        results, seeds = Results(plan.name), job.seeds if several else job.seeds[:1]
        if others := published(job):
            merge(plan.name, others, job.out, rows)
        if len(seeds) < len(job.seeds):
            work.say(f"{plan.name} is made with the first seed alone, {seeds[0]}")
        for cell, seed in ((cell, seed) for cell in cells for seed in seeds):
            if work.stop():
                raise Stopped(f"{cell} was not begun")
            trained = work.trained(cell, seed)
            row, details, sentence = measure(work, trained, cell)
            results = merge(plan.name, [entry(trained, cell, job, row, details)], job.out, rows)
            work.say(f"{plan.name}  {cell}: {sentence}")
        groups = {d: alike(results.runs, job, d) for d in by_dataset(cells)}
        files, said = pictures(work, groups), remarks(results.rows, groups)
        return Reproduction(results, columns, (job.out / f"{plan.name}.json", *files), (*notes, *said))

    return Result(plan.name, about, says, costs, run, plan.check, plan)


def each(name: str, usual: str, draw: Callable[[list[Entry], Path], Path]) -> Callable[[Work, Groups], list[Path]]:
    """A picture for every data set."""
    return lambda work, groups: [
        draw(entries, picture_path(work.job, name, dataset, usual)) for dataset, entries in groups.items()
    ]


def picture_path(job: Job, name: str, dataset: str, usual: str) -> Path:
    """OUT/NAME.png, or OUT/NAME-DATASET.png for another set than the paper's."""
    return job.out / (f"{name}.png" if dataset in (usual, DIGITS) else f"{name}-{dataset}.png")


def refuse(job: Job, sentence: str) -> None:
    """Refuse --set, --cells and --dataset for a result that is made of no cells."""
    if job.changes or job.models or job.datasets:
        raise ValueError(sentence)
