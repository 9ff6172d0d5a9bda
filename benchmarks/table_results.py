"""Summaries of what `tables.py` measured: rows for results/tables.json.

A number is a mean over seeds. Its standard error is that of the mean over all test rows, sqrt(sum of squares) / seeds.
All methods of a table and seed are evaluated on the same rows, so two of them are compared by the differences on these
rows: the error of their mean is paired, and usually much smaller than that of either mean.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from table_data import CHOOSE

OURS = "default"
#: What the methods are called in results; those that are not named here keep their names.
DENSITIES = ("default", "mixture", "kernel density", "spline flow", "MAF")
DETECTORS = (*DENSITIES, "isolation forest", "local outlier factor")
FORMER = "former default"

Jobs = dict[str, dict[str, list[dict[str, Any]]]]


def rows_file(path: Path, job: dict[str, Any]) -> Path:
    """Where the nats of every held-out row of a job are kept, beside the stage's file `path`."""
    return path.with_suffix(".rows") / f"{job['table']} - {job['method']} - {job['seed']}.npy"


def read_jobs(path: Path) -> Jobs:
    """Read the finished jobs of a stage: table -> method -> one entry per seed, with the nats of its rows."""
    found: Jobs = defaultdict(lambda: defaultdict(list))
    for line in path.read_text().splitlines():
        job = json.loads(line)
        if "nats" in job:
            job["nats of rows"] = _nats_of_rows(path, job)
        found[job["table"]][job["method"]].append(job)
    return found


def _nats_of_rows(path: Path, job: dict[str, Any]) -> np.ndarray:
    file = rows_file(path, job)
    if not file.is_file():
        raise ValueError(
            f"{path.name} has a job without the nats of its rows, {file.parent.name}/{file.name}, which comparisons "
            "need. Delete its line, or start with an empty folder, and run the stage again."
        )
    return np.load(file).astype(np.float64)


def nats(jobs: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the mean over seeds and its standard error over test rows."""
    return mean(j["nats"] for j in jobs), math.hypot(*(j["standard error"] for j in jobs)) / len(jobs)


def nats_behind(ours: list[dict[str, Any]], other: list[dict[str, Any]]) -> tuple[float, float]:
    """Return by how many nats `ours` is behind `other` on the same rows, and the paired standard error of that."""
    others = {j["seed"]: j["nats of rows"] for j in other}
    pairs = [(j["nats of rows"], others[j["seed"]]) for j in ours if j["seed"] in others]
    if not pairs or any(len(a) != len(b) for a, b in pairs):
        raise ValueError(
            f"{ours[0]['method']} and {other[0]['method']} must be evaluated on the same rows of a seed; got "
            f"{[(len(a), len(b)) for a, b in pairs] or 'no seed that both have'}. Run both again."
        )
    gaps = [a - b for a, b in pairs]
    errors = [gap.std(ddof=1) / math.sqrt(len(gap)) for gap in gaps]
    return float(mean(gap.mean() for gap in gaps)), float(math.hypot(*errors) / len(errors))


def density_rows(jobs: Jobs) -> list[dict[str, Any]]:
    """A row per table: the nats of every density, and how far ours is behind the best other one and the mixture."""
    rows = []
    for name, methods in jobs.items():
        if OURS not in methods or "mixture" not in methods:
            continue
        found = {m: nats(methods[m]) for m in (*DENSITIES, FORMER) if m in methods}
        best = min((m for m in found if m not in (OURS, FORMER)), key=lambda m: found[m][0])
        behind, error = nats_behind(methods[OURS], methods[best])
        behind_mixture, error_mixture = nats_behind(methods[OURS], methods["mixture"])
        entropies = [j["entropy"] for j in methods[OURS] if "entropy" in j]
        rows.append(
            {
                "table": "nats",
                "data": name,
                "used": "to choose" if name in CHOOSE else "to confirm",
                "rows": methods[OURS][0]["rows"],
                "columns": methods[OURS][0]["columns"],
                "entropy": mean(entropies) if entropies else None,
                **{m: found[m][0] if m in found else None for m in (*DENSITIES, FORMER)},
                "standard error": found[OURS][1],
                "best other": best,
                "behind the best": behind,
                "its standard error": error,
                "best or within one error": behind <= error,
                "behind the mixture": behind_mixture,
                "standard error behind the mixture": error_mixture,
                "no worse than the mixture": behind_mixture <= error_mixture,
                "seconds": mean(j["seconds"] for j in methods[OURS]),
                "steps": [j["steps"] for j in methods[OURS]],
                "seeds": len(methods[OURS]),
            }
        )
    return rows


def detector_rows(jobs: Jobs) -> list[dict[str, Any]]:
    """A row per table: the mean AUROC of every method against generated anomalies."""
    return [
        {"table": "auroc", "data": name, "used": "to choose" if name in CHOOSE else "to confirm"}
        | {m: mean(j["auroc"] for j in methods[m]) if m in methods else None for m in DETECTORS}
        | {"seeds": len(methods[OURS])}
        for name, methods in jobs.items()
        if OURS in methods
    ]


def summary_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """On how many tables the goals are met: of those used to choose, and of the others."""
    groups = {
        "to choose": [row for row in rows if row["used"] == "to choose"],
        "to confirm": [row for row in rows if row["used"] == "to confirm"],
        "all": rows,
    }
    goals = ("best or within one error", "no worse than the mixture")
    return [
        {"table": "goals", "tables": name, "number": len(part), **{g: sum(row[g] for row in part) for g in goals}}
        for name, part in groups.items()
    ]


def candidate_rows(jobs: Jobs, chosen: str) -> list[dict[str, Any]]:
    """A row per candidate: the nats it is behind the chosen one, and on how many tables by a paired standard error."""
    rows, names = [], dict.fromkeys(m for methods in jobs.values() for m in methods)
    for name in names:
        both = [(m[name], m[chosen]) for m in jobs.values() if name in m and chosen in m]
        gaps = [nats_behind(a, b) for a, b in both if {j["seed"] for j in a} & {j["seed"] for j in b}]
        if gaps:
            rows.append(
                {
                    "table": "candidates",
                    "candidate": name,
                    "tables": len(gaps),
                    "nats behind": mean(g for g, _ in gaps),
                    "worse by an error": sum(g > e for g, e in gaps),
                    "better by an error": sum(g < -e for g, e in gaps),
                }
            )
    return sorted(rows, key=lambda row: row["nats behind"])
