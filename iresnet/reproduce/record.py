"""OUT/NAME.json: one entry of `runs` for every trained model, and the rows a reader wants, which follow from them.

An entry holds the circumstances of its run, the cell it is, and what was measured of it: `row`, a few figures with
names, and `details`, the rest. A file is filled in several invocations, even on several machines: what is made now
replaces the entry of the same cell, budget, recipe, settings and seed, and the others stay.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from numpy.typing import NDArray

from ..data import npy
from ..results import Results, nonfinite_to_none, read, write
from ..run import Run
from .cells import SETS, Cell, order
from .job import Job

Entry: TypeAlias = dict[str, Any]
Row: TypeAlias = dict[str, Any]
Arrays: TypeAlias = dict[str, NDArray[Any]]

#: Together they name an entry.
KEYS = ("dataset", "model", "budget", "recipe", "settings", "seed")

#: Of several seeds the largest is shown for these, and the mean of other numbers.
WORST = (
    *("largest Lip(g)", "largest block bound", "code residual", "measured error", "composed bound"),
    *("error after 100 steps", "bias bound", "solver error", "terms", "draws"),
)


def entry(run: Run, cell: Cell, job: Job, row: Mapping[str, Any], details: Mapping[str, Any]) -> Entry:
    """What is known of one trained model: how it was made, and what was measured."""
    made = run.read_json("environment.json")
    return named(job, cell.dataset, cell.label, row, details, made, job.changes, run.experiment.seed)


def named(
    job: Job,
    dataset: str,
    model: str,
    row: Mapping[str, Any],
    details: Mapping[str, Any],
    made: Mapping[str, Any],
    settings: Sequence[str] = (),
    seed: int = 0,
) -> Entry:
    """An entry with all that names it; `made` says how."""
    which = dict(zip(KEYS, (dataset, model, job.budget, job.recipe, list(settings), seed), strict=True))
    return {**made, **which, "row": nonfinite_to_none(row), "details": nonfinite_to_none(details)}


def kept(run: Run, name: str, make: Callable[[], Any], fits: Callable[[dict[str, Any]], bool] = bool) -> dict[str, Any]:
    """What RUN/evaluation.json has under this name, if it fits; else made now, and kept there beside the rest."""
    found = dict(run.read_json("evaluation.json").get(name) or {})
    if not fits(found):
        found = nonfinite_to_none(make())
        run.write_json("evaluation.json", {**run.read_json("evaluation.json"), name: found}, run.sha256())
    return found


def merge(name: str, made: Sequence[Entry], folder: Path, rows: Callable[[Sequence[Entry]], list[Row]]) -> Results:
    """Put entries into OUT/NAME.json, in the order of the paper, and derive its rows anew."""
    path = folder / f"{name}.json"
    before = read(path).runs if path.is_file() else []
    if not all(map(_is_whole, before)):
        raise damaged(path)
    new = [key(e) for e in made]
    runs = sorted([*(e for e in before if key(e) not in new), *made], key=_place)
    try:
        results = Results(name, rows(runs), runs)
    except (KeyError, TypeError):  # what was made now has all figures
        raise damaged(path) from None
    write(results, folder)
    return results


def _is_whole(e: Entry) -> bool:
    """Whether an entry that was read has what names it, and figures."""
    words = [e.get(k) for k in ("model", "budget", "recipe")]
    settings = e.get("settings")
    return (
        e.get("dataset") in SETS
        and all(isinstance(w, str) for w in words)
        and isinstance(settings, list)
        and all(isinstance(s, str) for s in settings)
        and isinstance(e.get("seed"), int)
        and all(isinstance(e.get(k), dict) for k in ("row", "details"))
    )


def damaged(path: Path) -> ValueError:
    """What is said of a file that holds something else than was written."""
    return ValueError(f"{path} is damaged. Remove it; it can be made again.")


def arrays(path: Path, *names: str) -> Arrays:
    """The arrays that were kept for a picture; `names` must be among them."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist.")
    if not path.is_file():
        raise damaged(path)
    try:
        found = npy.load_arrays(path, lambda members: members)
    except ValueError:
        raise damaged(path) from None
    if any(name not in found for name in names):
        raise damaged(path)
    return found


def key(e: Entry) -> tuple[Any, ...]:
    """What an entry is about."""
    return tuple(tuple(v) if isinstance(v := e.get(k), list) else v for k in KEYS)


def one_by_one(runs: Sequence[Entry]) -> list[Row]:
    """A row for every entry."""
    return [{**_head(e), "seed": e["seed"], **e["row"], "run": i} for i, e in enumerate(runs)]


def over_seeds(runs: Sequence[Entry], of: str = "error %") -> list[Row]:
    """A row for every cell: means over its seeds, with the spread between them of its main figure."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, e in enumerate(runs):
        groups.setdefault(key(e)[:-1], []).append(i)
    return [_together([runs[i] for i in members], members, of) for members in groups.values()]


def _together(entries: Sequence[Entry], members: list[int], of: str) -> Row:
    rows = [e["row"] for e in entries]
    row = {**_head(entries[0]), **{name: _mean(name, [r.get(name) for r in rows]) for name in rows[0]}}
    errors = [r[of] for r in rows]
    row |= {"seeds": len(rows), "spread": statistics.stdev(errors) if len(rows) > 1 else None, "run": members[0]}
    # The interval of one net's error is over test images; a mean over nets has the spread instead.
    return row if len(rows) == 1 else {**row, **{k: None for k in ("low", "high") if k in row}, "runs": members}


def _mean(name: str, values: Sequence[Any]) -> Any:
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values):
        return values[0] if len({str(v) for v in values}) == 1 else " / ".join(map(str, values))
    if name in WORST:
        return max(numbers)
    return numbers[0] if len(set(numbers)) == 1 else statistics.fmean(numbers)


def _head(e: Entry) -> Row:
    head = {k: e[k] for k in ("dataset", "model", "budget", "recipe")} | {"epochs": e.get("epochs")}
    return {**head, "settings": " ".join(e["settings"])} if e["settings"] else head


def _place(e: Entry) -> tuple[Any, ...]:
    return SETS.index(e["dataset"]), order(e["model"]), e["budget"], e["recipe"], e["settings"], e["seed"]


def alike(runs: Iterable[Entry], job: Job, dataset: str) -> list[Entry]:
    """The entries that belong into one picture: this data set, made as this job makes them, of its first seed."""
    wanted = (job.budget, job.recipe, list(job.changes), job.seeds[0])
    return [
        e for e in runs if e["dataset"] == dataset and (e["budget"], e["recipe"], e["settings"], e["seed"]) == wanted
    ]
