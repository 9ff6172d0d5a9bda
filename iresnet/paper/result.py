"""A table or a figure of the paper as an object: what it shows, what the paper says, what it costs, and how it is made.

To add one: a file with the paper's values, a function `run(work) -> Outcome`, and a `Result` of its own; then a line in
`iresnet.paper.RESULTS`. Where it is made of trained cells, `Plan` says of which, and `fill` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ..results import Results
from ..run import Run
from ..spelling import hint, nearest
from .cells import DATASETS, DENSITIES, DIGITS, NAMED, Cell, coefficient_of, exists, weight_of
from .job import Job, Stopped, Work
from .record import Entry, Row, entry, merge, one_by_one

#: What is measured of a trained cell: figures with names, the rest, and a sentence for whoever waits.
Measured: TypeAlias = tuple[Row, dict[str, Any], str]


@dataclass(frozen=True)
class Outcome:
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
    run: Callable[[Work], Outcome]
    check: Callable[[Job], object] = lambda job: None


@dataclass(frozen=True)
class Plan:
    """Which cells a result shows: its data sets, the models on each, and the few that the budget smoke makes."""

    name: str
    models: Mapping[str, tuple[str, ...]]
    smoke: tuple[str, ...]
    others: tuple[str, ...] = ()  # sets that are made only where they are asked for, with the models of the first

    def cells(self, job: Job) -> list[Cell]:
        """The cells that a job asks for; one that the result does not have is refused."""
        own = self._own(job)
        nameless = [m for m in job.models if m not in NAMED]
        if stranger := next((m for m in nameless if coefficient_of(m) is weight_of(m) is None), None):
            raise ValueError(f"{self.name} has no cell {stranger!r}. {hint(stranger, self._known(own))}")
        cells = [Cell(d, m) for d, models in own.items() for m in self._chosen(d, models, job)]
        if not cells:
            known = dict.fromkeys(m for models in own.values() for m in models)
            asked, sets = ", ".join(job.models), ", ".join(own)
            raise ValueError(f"{self.name} has no cell {asked} on {sets}. Its cells are {', '.join(known)}.")
        return cells

    def check(self, job: Job) -> None:
        """Refuse what cannot be made, before anything is trained."""
        job.check(self.cells(job))

    def _own(self, job: Job) -> dict[str, tuple[str, ...]]:
        """The models of every set that the job asks for."""
        if job.budget == "smoke":
            if job.datasets and (DIGITS not in job.datasets or not {DIGITS, *DENSITIES}.issuperset(job.datasets)):
                raise ValueError(
                    f"{self.name} of the budget smoke is made of digits; got {', '.join(job.datasets)}. "
                    "Leave --dataset out."
                )
            return {DIGITS: self.smoke}
        first = next(iter(self.models.values()))
        known = {**self.models, **{d: tuple(m for m in first if exists(d, m)) for d in self.others}}
        chosen = {d: known[d] for d in known if d in (job.datasets or self.models)}
        strangers = [d for d in job.datasets if d not in (*DATASETS, DIGITS, *DENSITIES)]
        if strangers or not chosen:
            got = strangers or job.datasets
            remedy = nearest(got[0], known) or " Ask for those."
            raise ValueError(f"{self.name} is made of {', '.join(known)}; got {', '.join(got)}.{remedy}")
        return chosen

    def _known(self, own: Mapping[str, tuple[str, ...]]) -> list[str]:
        """Its models on these sets, and the named ones that may stand beside them."""
        beside = [m for m in NAMED if self.takes(m) and any(exists(d, m) for d in own)]
        return list(dict.fromkeys([*(m for models in own.values() for m in models), *beside]))

    def _chosen(self, dataset: str, own: tuple[str, ...], job: Job) -> list[str]:
        """Those of its own that the job names; a table takes any model that is named, a figure only its own."""
        return [m for m in job.models or own if (m in own or self.takes(m)) and exists(dataset, m)]

    def takes(self, model: str) -> bool:
        """Whether a model that is not in the paper's may stand beside them."""
        return False


def fill(
    work: Work,
    plan: Plan,
    measure: Callable[[Work, Run, Cell], Measured],
    *,
    seeds: Sequence[int],
    rows: Callable[[Sequence[Entry]], list[Row]] = one_by_one,
) -> Results:
    """Train, measure and record cell after cell; what is done is on the disk before the next begins."""
    results = None
    if len(seeds) < len(work.job.seeds):
        work.say(f"{plan.name} is made with the first seed alone, {seeds[0]}")
    for cell in plan.cells(work.job):
        for seed in seeds:
            if work.stop():
                raise Stopped(f"{cell} was not begun")
            run = work.trained(cell, seed)
            row, details, sentence = measure(work, run, cell)
            results = merge(plan.name, [entry(run, cell, work.job, row, details)], work.job.out, rows)
            work.say(f"{plan.name}  {cell}: {sentence}")
    assert results is not None  # a plan has at least one cell
    return results


def datasets_of(plan: Plan, job: Job) -> list[str]:
    """The data sets of a job's cells, in order."""
    return list(dict.fromkeys(cell.dataset for cell in plan.cells(job)))


def picture_path(job: Job, name: str, dataset: str, usual: str) -> Path:
    """OUT/NAME.png, or OUT/NAME-DATASET.png for another set than the paper's."""
    return job.out / (f"{name}.png" if dataset in (usual, DIGITS) else f"{name}-{dataset}.png")
