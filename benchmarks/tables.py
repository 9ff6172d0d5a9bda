"""Densities of tables: the preset `table-density` against mixtures, kernel densities, other flows and detectors.

python benchmarks/tables.py --stage choose --out runs/tables      candidates for the default, without test rows
python benchmarks/tables.py --stage confirm --out runs/tables     the default and all others, on test rows, read once
python benchmarks/tables.py --stage publish --out runs/tables     results/tables.json from what these stages wrote

Each (table, method, seed) is a job; `--jobs N` runs N of them at a time, with one thread each. A finished job is a line
of STAGE.jsonl, with the nats of every row in STAGE.rows, and a second call runs only what is missing. A flow of zuko
gets the time that ours took for the same table and seed, and at least 20 seconds; times are CPU times of one thread. It
needs zuko (pip install '.[bench]').
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy and torch are imported; worker processes inherit it

import argparse
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also from a checkout that is not installed

import numpy as np
import torch
from table_data import CHOOSE, TABLES, anomalies
from table_methods import PLAIN, TIMED, Fitted, iresnet, zuko_flow
from table_results import (
    FORMER,
    OURS,
    Jobs,
    candidate_rows,
    density_rows,
    detector_rows,
    read_jobs,
    rows_file,
    summary_rows,
)

from iresnet.results import Results, provenance, read, write

#: Candidates for the default, as settings that replace those of the preset.
START = (
    "network.covariance=full", "network.components=0", "network.spline_bins=32", "network.normalisation=none",
    "network.last_scale=0.01", "training.epochs=8", "training.min_steps=2000", "training.patience=12",
    "training.validate_every=50", "training.save_every=100000", "training.schedule=cosine",
)  # fmt: skip
CENTRE = (
    *START, "network.activation=sine", "network.frequency=4.0", "training.learning_rate=4e-3",
    "training.weight_decay=0.1",
)  # fmt: skip
AXES = ("network.mixing=true", "network.principal=true", "network.normalisation=actnorm")
CANDIDATES: dict[str, tuple[str, ...]] = {
    "centre": CENTRE,
    "former default": (
        "network.covariance=diagonal",
        "network.components=1",
        "network.spline_bins=0",
        "network.normalisation=actnorm",
        "network.last_scale=1.0",
        "network.activation=elu",
        "training.epochs=0",
        "training.steps=1000",
        "training.min_steps=0",
        "training.patience=0",
        "training.validate_every=20",
        "training.schedule=linear",
        "training.learning_rate=2e-3",
        "training.weight_decay=2.0",
    ),
    "one normal": (*CENTRE, "network.components=1"),
    "roulette": (*CENTRE, "network.estimator=roulette", "network.terms=4"),
    "elu": (*CENTRE, "network.activation=elu"),
    "lipswish": (*CENTRE, "network.activation=lipswish"),
    "frequency 2": (*CENTRE, "network.frequency=2.0"),
    "frequency 8": (*CENTRE, "network.frequency=8.0"),
    "frequency 8, rate 8e-3": (*CENTRE, "network.frequency=8.0", "training.learning_rate=8e-3"),
    "rate 1e-3": (*CENTRE, "training.learning_rate=1e-3"),
    "rate 1e-2": (*CENTRE, "training.learning_rate=1e-2"),
    "decay 1": (*CENTRE, "training.weight_decay=1.0"),
    "decay 0": (*CENTRE, "training.weight_decay=0.0"),
    "lipschitz 0.9": (*CENTRE, "network.lipschitz=0.9"),
    "average 0.998": (*CENTRE, "training.average=0.998"),
    "axes": (*CENTRE, *AXES),
    "no splines": (*CENTRE, "network.spline_bins=0"),
    "16 blocks": (*CENTRE, "network.blocks=[16]"),
    "width 128": (*CENTRE, "network.width=128"),
    "long": (*CENTRE, "training.min_steps=5000", "training.epochs=20"),
}

#: The candidate that became the default.
CHOSEN = "centre"

#: The least time that a flow of zuko gets; and tables that take long, which are started first.
LEAST_SECONDS = 20.0
SIZES = {"many rows": 4, "many rows, rings": 4, "curved": 3, "many columns": 3, "100 columns": 3}


def main() -> None:
    """Run the missing jobs of a stage."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", choices=("choose", "confirm", "publish"), required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/tables"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tables", nargs="+", default=None, help="all of the stage, if left out")
    parser.add_argument("--methods", nargs="+", default=None, help="candidates, or names of other methods")
    parser.add_argument("--seconds", type=float, default=1e9, help="no job is started after this time")
    parser.add_argument("--commit", help="the commit of this code, where there is no git")
    options = parser.parse_args()
    if options.stage == "publish":
        try:
            print(publish(options.out))
        except ValueError as error:  # files of an earlier version
            sys.exit(str(error))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    provenance(seeds=options.seeds, seconds=0)  # notes the commit, before anything is edited while jobs run
    tables = options.tables or list(CHOOSE if options.stage == "choose" else TABLES)
    methods = options.methods or (list(CANDIDATES) if options.stage == "choose" else [OURS, FORMER, *PLAIN, *TIMED])
    begin, path = time.perf_counter(), options.out / f"{options.stage}.jsonl"
    for timed in (False, True):  # flows of zuko come second, when it is known how long ours took
        chosen = [m for m in methods if (m in TIMED) == timed]
        run_jobs([(t, m, s) for m in chosen for t in tables for s in options.seeds], path, options, begin)
    seconds = time.perf_counter() - begin
    record = provenance(seeds=options.seeds, seconds=seconds) | ({"commit": options.commit} if options.commit else {})
    with (options.out / f"{options.stage}.runs.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def publish(folder: Path, results: Path = Path("results")) -> Path:
    """Write results/tables.json: the confirmed numbers, and what the default was chosen from.

    The rows of a stage that the folder does not have stay as they are.
    """
    present = read(results / "tables.json")
    rows, runs = [], []
    for stage in ("confirm", "choose"):
        if (folder / f"{stage}.jsonl").is_file():
            rows += [row | {"run": len(runs)} for row in stage_rows(stage, read_jobs(folder / f"{stage}.jsonl"))]
            runs.append(stage_run(folder / f"{stage}.runs.jsonl"))
    made = {row["table"] for row in rows}
    kept = [row for row in present.rows if row["table"] not in made]
    places = {old: len(runs) + i for i, old in enumerate(sorted({row["run"] for row in kept}))}
    rows += [row | {"run": places[row["run"]]} for row in kept]
    return write(Results("tables", rows, runs + [present.runs[old] for old in places]), results)


def stage_rows(stage: str, jobs: Jobs) -> list[dict[str, Any]]:
    """Summarise the jobs of a stage."""
    if stage == "choose":
        return candidate_rows(jobs, CHOSEN)
    densities = density_rows(jobs)
    return densities + summary_rows(densities) + detector_rows(jobs)


def stage_run(path: Path) -> dict[str, Any]:
    """Describe the calls of a stage as one run: the last, with all seeds and the time of all; the others are parts."""
    *earlier, last = (json.loads(line) for line in path.read_text().splitlines())
    records = [*earlier, last]
    seeds = sorted({seed for r in records for seed in r["seeds"]})
    run = last | {"seeds": seeds, "seconds": sum(r["seconds"] for r in records)}
    return run | ({"earlier": earlier} if earlier else {})


def run_jobs(jobs: list[tuple[str, str, int]], path: Path, options: argparse.Namespace, begin: float) -> None:
    """Run the jobs that the file does not have yet, and append their results to it."""
    done = finished(path)
    missing = sorted((job for job in jobs if job not in done), key=lambda job: -SIZES.get(job[0], 0))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool, path.open("a") as file:
        pending = {}
        for table, method, seed in missing:
            ours = done.get((table, OURS, seed), {}).get("seconds", 0.0)
            seconds = max(LEAST_SECONDS, ours)
            last = begin + options.seconds
            clock = time.time() + last - time.perf_counter()
            pending[pool.submit(run_job, options.stage, table, method, seed, seconds, clock)] = (table, method, seed)
        for future in as_completed(pending):
            try:
                result = future.result()
            except Exception as error:  # one failed job must not lose the others
                print(*pending[future], repr(error), flush=True)
                continue
            if result is not None:
                row, nats = result
                if "nats" in row:  # before the line that says that the job is finished
                    rows_file(path, row).parent.mkdir(exist_ok=True)
                    np.save(rows_file(path, row), nats)
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(row, flush=True)


def finished(path: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Read the rows of earlier calls."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return {(row["table"], row["method"], row["seed"]): row for row in rows}


def run_job(
    stage: str, name: str, method: str, seed: int, seconds: float, clock: float
) -> tuple[dict[str, Any], np.ndarray] | None:
    """Fit a method to a table and evaluate it: on rows kept for that to choose, on test rows to confirm.

    Returns what STAGE.jsonl keeps, and -score of every row in float32: its nats, if the method is a density. The seed
    alone decides the rows and their order.
    """
    if time.time() > clock:
        return None
    torch.set_num_threads(1)
    table = TABLES[name](seed) if stage == "confirm" else TABLES[name](seed).for_choosing()
    begin = time.process_time()
    fitted = fit(method)(table, seed) if method not in TIMED else zuko_flow(table, seed, kind=method, seconds=seconds)
    took = time.process_time() - begin
    rows = table.test if table.choice is None or stage == "confirm" else table.choice
    row: dict[str, Any] = {"table": name, "method": method, "seed": seed}
    row |= {"rows": len(table.train), "columns": rows.shape[1], "held out": len(rows), "seconds": round(took, 2)}
    score = fitted.score(rows)
    if fitted.is_density:
        row |= {"nats": float(-score.mean()), "standard error": float(score.std(ddof=1) / np.sqrt(len(score)))}
    if table.log_density is not None:
        row["entropy"] = float(-table.log_density(rows).mean())
    row |= {"auroc": auroc(fitted, rows, anomalies(table, rows, seed), score), **fitted.about}
    return row, np.float32(-score)


def fit(method: str) -> Any:
    """The function that fits a method."""
    return PLAIN[method] if method in PLAIN else partial(iresnet, overrides=CANDIDATES.get(method, ()))


def auroc(fitted: Fitted, rows: np.ndarray, unusual: np.ndarray, score: np.ndarray) -> float:
    """The probability that an anomaly scores below a held-out row."""
    from sklearn.metrics import roc_auc_score

    both = np.concatenate([score, np.nan_to_num(fitted.score(unusual), nan=-1e30, neginf=-1e30)])
    return float(roc_auc_score(np.repeat([1, 0], [len(rows), len(unusual)]), np.clip(both, -1e30, 1e30)))


if __name__ == "__main__":
    main()
