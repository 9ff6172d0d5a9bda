"""Measure the core's claims and write results/core.json: `make bench` (a few minutes on one core).

Norm bounds, error bounds of inverses, truncation bounds, unbiased estimators and constant memory. "No violation" is the
result of a test with the stated number of trials, not a proof.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from core_inverses import measure_inverses
from core_logdets import measure_estimators, measure_memory, measure_truncation
from core_norms import measure_norms
from core_results import Row

from iresnet.results import Results, provenance, require_commit, write


def main() -> None:
    """Measure everything, print it, and write results/core.json."""
    parser = argparse.ArgumentParser(description="Measure the core's claims; write results/core.json.")
    parser.add_argument("--quick", action="store_true", help="run fewer trials; print the results, do not write them")
    quick = parser.parse_args().quick
    if not quick:
        require_commit("results")
    torch.set_num_threads(1)
    start = time.perf_counter()
    parts: list[Callable[[], list[Row]]] = [
        lambda: measure_norms(56 if quick else 1_000),
        lambda: measure_inverses(80 if quick else 10_000),
        measure_truncation,
        lambda: measure_estimators(30 if quick else 3_000),
        measure_memory,
    ]
    rows = []
    for part in parts:
        rows += part()
        print(f"{len(rows)} rows after {time.perf_counter() - start:.0f} s", flush=True)
    for r in rows:
        at = f"L={r['L']} " if "L" in r else ""
        print(f"{r['claim']:<24}{at + r['family']:<62}{r['metric']:<42}{r['value']:>10.4g}   target {r['target']}")
    if not quick:
        seconds = time.perf_counter() - start
        run = provenance(seeds=[0, 1, 2, 3], seconds=seconds, precision="float32 and float64")
        print(write(Results("core", rows, [run])))


if __name__ == "__main__":
    main()
