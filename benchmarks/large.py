"""Measure how memory and time of the command grow with the rows of a file, and write results/large.json.

    python3 benchmarks/large.py --out results                                  half an hour on one core
    python3 benchmarks/large.py --rows 2000 20000 --out runs/large             a dry run

A density of four columns is trained once. Then every command runs in a process of its own, with one thread: `score` of
an NPY file and of a CSV file, `sample`, `evaluate`, and `train` for some steps, which reads blocks of a file that is
larger than `data.in_memory`. The memory is the peak of the process, the interpreter and its libraries included.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from iresnet.results import Results, provenance, require_commit, write

#: Prints the peak memory of the process in KiB (Linux); `ru_maxrss` would be at least that of the process before it.
PROGRAM = """
import sys
from iresnet.cli import main
try:
    main()
finally:
    print("peak", open("/proc/self/status").read().split("VmHWM:")[1].split()[0], file=sys.stderr)
"""

#: Rows of the table that the density is trained on, and rows that are made at a time.
TRAINED, CHUNK = 20_000, 100_000


def make_rows(n: int, seed: int) -> np.ndarray:
    """Draw rows of four columns that depend on each other."""
    r = np.random.default_rng(seed)
    a, b = r.normal(size=(2, n))
    return np.stack([a, a**2 / 3 + b / 2, np.exp(b / 2), a + r.normal(size=n)], axis=1).astype(np.float32)


def write_npy(path: Path, rows: int) -> None:
    """Write an NPY file chunk by chunk."""
    out = np.lib.format.open_memmap(path, "w+", np.float32, (rows, 4))
    for k in range(0, rows, CHUNK):
        out[k : k + CHUNK] = make_rows(min(CHUNK, rows - k), k)
    out.flush()


def write_csv(path: Path, rows: int) -> None:
    """Write the same rows as a CSV file."""
    with path.open("w") as out:
        out.write("x0,x1,x2,x3\n")
        for k in range(0, rows, CHUNK):
            np.savetxt(out, make_rows(min(CHUNK, rows - k), k), "%.7g", ",")


def run(*words: object) -> tuple[float, float]:
    """Run a command of iresnet in a process of its own; return (seconds, peak memory in MiB)."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    begun = time.perf_counter()
    command = [sys.executable, "-c", PROGRAM, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))} failed:\n{done.stderr}")
    return time.perf_counter() - begun, int(done.stderr.split("peak ")[-1].split()[0]) / 1024


def measure(folder: Path, rows: int, command: str = "") -> list[dict[str, Any]]:
    """Measure all commands for so many rows, or one of them."""
    model, npy, csv = folder / "model", folder / "rows.npy", folder / "rows.csv"
    write_npy(npy, rows)
    write_csv(csv, rows)
    blocks = ("--set", f"data.in_memory={rows * 16 / 2**30 / 4:.6f}", "--set", "steps=50")
    commands: dict[tuple[str, str], tuple[object, ...]] = {
        ("score", "NPY"): ("score", model, npy, "--out", folder / "a.csv", "--device", "cpu"),
        ("score", "CSV"): ("score", model, csv, "--out", folder / "b.csv", "--device", "cpu"),
        ("evaluate", "NPY"): ("evaluate", model, "--data", npy, "--device", "cpu"),
        ("sample", "CSV"): ("sample", model, "-n", rows, "--out", folder / "samples", "--device", "cpu"),
        ("train in blocks", "NPY"): (
            *("train", "table-density", "--data", npy, "--out", folder / f"train{rows}", "--device", "cpu"),
            *blocks,
        ),
    }
    found = []
    for (name, file), words in commands.items():
        if command not in ("", name):
            continue
        seconds, peak = run(*words)
        speed = None if name.startswith("train") else round(rows / seconds)
        row = {"command": name, "file": file, "rows": rows, "peak MiB": round(peak), "rows/s": speed, "run": 0}
        print(row | {"seconds": round(seconds, 1)}, flush=True)
        found.append(row)
    return found


def main() -> None:
    """Measure every number of rows, and write results/large.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[200_000, 2_000_000])
    parser.add_argument("--scored-rows", type=int, nargs="*", default=[10_000_000], help="for `score` alone")
    parser.add_argument("--out", default="results")
    options = parser.parse_args()
    begun = time.perf_counter()
    require_commit(options.out, provenance(seeds=[0], seconds=0.0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "train.npy", make_rows(TRAINED, -1 % 2**32))
        run("train", "table-density", "--data", folder / "train.npy", "--out", folder / "model", "--device", "cpu",
            "--set", "steps=500")  # fmt: skip
        rows = [row for n in options.rows for row in measure(folder, n)]
        rows += [row for n in options.scored_rows for row in measure(folder, n, "score")]
    made = provenance(seeds=[0], seconds=round(time.perf_counter() - begun, 3))
    print(write(Results("large", rows, [made]), options.out))


if __name__ == "__main__":
    main()
