"""Summaries of what `tables.py` measured: rows for results/tables.json.

A number is a mean over seeds. Its standard error is that of the mean over all test rows, sqrt(sum of squares) / seeds.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

from table_data import CHOOSE

OURS = "default"
#: What the methods are called in results; those that are not named here keep their names.
DENSITIES = ("default", "mixture", "kernel density", "spline flow", "MAF")
DETECTORS = (*DENSITIES, "isolation forest", "local outlier factor")
FORMER = "former default"

Jobs = dict[str, dict[str, list[dict[str, Any]]]]


def read_jobs(path: Path) -> Jobs:
    """Read the finished jobs of a stage: table -> method -> one entry per seed."""
    found: Jobs = defaultdict(lambda: defaultdict(list))
    for line in path.read_text().splitlines():
        job = json.loads(line)
        found[job["table"]][job["method"]].append(job)
    return found


def nats(jobs: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the mean over seeds and its standard error over test rows."""
    return mean(j["nats"] for j in jobs), math.hypot(*(j["standard error"] for j in jobs)) / len(jobs)


def density_rows(jobs: Jobs) -> list[dict[str, Any]]:
    """A row per table: the nats of every density, and whether ours is the best or within one standard error of it."""
    rows = []
    for name, methods in jobs.items():
        if OURS not in methods or "mixture" not in methods:
            continue
        found = {m: nats(methods[m]) for m in (*DENSITIES, FORMER) if m in methods}
        ours, error = found[OURS]
        best = min(value for m, (value, _) in found.items() if m not in (OURS, FORMER))
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
                "standard error": error,
                "best or within one error": ours <= best + error,
                "no worse than the mixture": ours <= found["mixture"][0] + error,
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
    """A row per candidate: how many nats it is behind the chosen one, and on how many tables by a standard error."""
    rows, names = [], dict.fromkeys(m for methods in jobs.values() for m in methods)
    for name in names:
        gaps = []
        for methods in jobs.values():
            both = {j["seed"]: j for j in methods[name]}
            pairs = [(both[j["seed"]], j) for j in methods[chosen] if j["seed"] in both and "nats" in j]
            pairs = [(a, b) for a, b in pairs if "nats" in a]
            gaps += [(mean(a["nats"] - b["nats"] for a, b in pairs), nats([b for _, b in pairs])[1])] if pairs else []
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
