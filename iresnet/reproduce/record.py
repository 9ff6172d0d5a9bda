"""OUT/NAME.json: an entry in `runs` for every trained model, and rows for readers, which are computed from the entries.

An entry holds how its run was made, which cell it is, and what was measured: `row`, a few named metrics, and `details`,
the rest. `experiment` has every setting of a trained network, so that the entry does not depend on defaults that change
later. A file can be filled by several commands, even on several machines: a new entry replaces the one with the same
cell, budget, recipe, settings and seed, and the others stay.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from numpy.typing import NDArray

from ..data import DataSettings, npy
from ..results import Results, cell, nonfinite_to_none, read, write
from ..run import Run
from .cells import ALL_DATASETS, sort_key
from .job import Job

Entry: TypeAlias = dict[str, Any]
Row: TypeAlias = dict[str, Any]
Arrays: TypeAlias = dict[str, NDArray[Any]]

#: Together they identify an entry.
KEYS = ("dataset", "model", "budget", "recipe", "settings", "seed")

#: Over several seeds these show the largest value; other numbers show the mean.
WORST = (
    *("largest Lip(g)", "largest block bound", "code residual", "measured error", "composed bound"),
    *("error after 100 steps", "bias bound", "solver error", "terms", "draws"),
)


def new_entry(
    job: Job,
    dataset: str,
    model: str,
    row: Mapping[str, Any],
    details: Mapping[str, Any],
    made: Mapping[str, Any],
    settings: Sequence[str] = (),
    seed: int = 0,
) -> Entry:
    """Return an entry; `made` says how its run was made."""
    keys = dict(zip(KEYS, (dataset, model, job.budget, job.recipe, list(settings), seed), strict=True))
    return {**made, **keys, "row": nonfinite_to_none(row), "details": nonfinite_to_none(details)}


def settings_lines(run: Run) -> list[str]:
    """Return the lines of a settings file for `iresnet train`: every setting, with the default dataset directory."""
    return run.with_data_folder(DataSettings().folder).settings_text().splitlines()


def cached(
    run: Run, name: str, compute: Callable[[], Any], valid: Callable[[dict[str, Any]], bool] = bool
) -> dict[str, Any]:
    """Return what RUN/evaluation.json holds under a name if it is valid; else compute it and store it there."""
    known = dict(run.read_json("evaluation.json").get(name) or {})
    if not valid(known):
        known = nonfinite_to_none(compute())
        run.write_json("evaluation.json", {**run.read_json("evaluation.json"), name: known}, run.sha256())
    return known


def merge_entries(
    name: str, entries: Sequence[Entry], folder: Path, rows: Callable[[Sequence[Entry]], list[Row]]
) -> Results:
    """Add entries to OUT/NAME.json, in the order of the paper, and compute its rows again."""
    path = folder / f"{name}.json"
    before = read(path).runs if path.exists() else []  # a pipe or a folder is refused
    if not all(map(_is_valid, before)):
        raise damaged_file(path)
    new = [entry_key(e) for e in entries]
    runs = sorted([*(e for e in before if entry_key(e) not in new), *entries], key=_sort_key)
    try:
        results = Results(name, rows(runs), runs)
    except (KeyError, TypeError):  # new entries have all metrics
        raise damaged_file(path) from None
    write(results, folder)
    return results


def _is_valid(e: Entry) -> bool:
    """Whether an entry from a file has all keys, and metrics."""
    kinds = {"model": str, "budget": str, "recipe": str, "settings": list, "seed": int, "row": dict, "details": dict}
    if not all(isinstance(e.get(k), kind) for k, kind in kinds.items()):
        return False
    return e.get("dataset") in ALL_DATASETS and all(isinstance(s, str) for s in e["settings"])


def damaged_file(path: Path) -> ValueError:
    """Return the error for a file with unexpected content."""
    return ValueError(f"{path} is damaged. Remove it; the command writes it again.")


def load_arrays(path: Path, *names: str) -> Arrays:
    """Read the arrays that were saved for a plot; `names` must be among them."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist.")
    if not path.is_file():
        raise damaged_file(path)
    try:
        arrays = npy.load_arrays(path, lambda members: members)
    except ValueError:
        raise damaged_file(path) from None
    if any(name not in arrays for name in names):
        raise damaged_file(path)
    return arrays


def entry_key(e: Entry) -> tuple[Any, ...]:
    """Return the values that identify an entry."""
    return tuple(tuple(v) if isinstance(v := e.get(k), list) else v for k in KEYS)


def rows_per_run(runs: Sequence[Entry]) -> list[Row]:
    """Return a row for every entry."""
    return [{**_row_head(e), "seed": e["seed"], **e["row"], "run": i} for i, e in enumerate(runs)]


def rows_per_cell(runs: Sequence[Entry], metric: str = "error %") -> list[Row]:
    """Return a row for every cell: means over its seeds, with the standard deviation of its main metric."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, e in enumerate(runs):
        groups.setdefault(entry_key(e)[:-1], []).append(i)
    return [_row_over_seeds([runs[i] for i in members], members, metric) for members in groups.values()]


def _row_over_seeds(entries: Sequence[Entry], members: list[int], metric: str) -> Row:
    rows = [e["row"] for e in entries]
    row = {**_row_head(entries[0]), **{name: _mean(name, [r.get(name) for r in rows]) for name in rows[0]}}
    values = [r[metric] for r in rows]
    row |= {"seeds": len(rows), "spread": statistics.stdev(values) if len(rows) > 1 else None, "run": members[0]}
    # The interval of one network's error is over test images; a mean over networks has the spread instead.
    return row if len(rows) == 1 else {**row, **{k: None for k in ("low", "high") if k in row}, "runs": members}


def _mean(name: str, values: Sequence[Any]) -> Any:
    """Return one value for several seeds: the mean or the worst number, or all texts that differ."""
    if len({str(v) for v in values}) == 1:
        return values[0]
    known = [v for v in values if v is not None]
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in known):
        return " / ".join(map(cell, values))
    number = max(known) if name in WORST else statistics.fmean(known)
    return number if len(known) == len(values) else f"{cell(number)} ({len(known)} of {len(values)} seeds)"


def _row_head(e: Entry) -> Row:
    head = {k: e[k] for k in ("dataset", "model", "budget", "recipe")} | {"epochs": e.get("epochs")}
    return {**head, "settings": " ".join(e["settings"])} if e["settings"] else head


def _sort_key(e: Entry) -> tuple[Any, ...]:
    return ALL_DATASETS.index(e["dataset"]), sort_key(e["model"]), *(e[k] for k in KEYS[2:])


def comparable_entries(runs: Iterable[Entry], job: Job, dataset: str) -> list[Entry]:
    """Return the entries of one plot: of this dataset, with the job's budget, recipe, settings and first seed."""
    wanted = {"dataset": dataset, "budget": job.budget, "recipe": job.recipe, "settings": list(job.overrides)}
    return [e for e in runs if e["seed"] == job.seeds[0] and all(e[k] == v for k, v in wanted.items())]
