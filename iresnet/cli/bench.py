"""`iresnet bench`: measure speed and memory beside other libraries, all in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..bench import FULL, GPU, METHODS, QUICK, TASKS, check_tasks, missing, title_of
from ..bench import bench as measure
from ..device import choose_device
from ..results import require_commit, write
from .completion import complete_task
from .console import console, result, table, use_threads, waiting
from .options import Device

#: One thread, as for small inputs, unless --threads says otherwise.
SMALL = 1

#: What the numbers are.
LEGEND = (
    "Columns behind ms: the time of that method divided by ours; above 1, iresnet is faster. ± is half the distance "
    "between the quartiles, the largest of the row.",
    "plain: the same network without constraint and log-determinant. floor: its matrix products alone.",
    "The networks: g is d-64-64-64-d in every block, with random weights, or trained for 300 steps; float32. Those of "
    "zuko have as many parameters.",
)


def bench(
    task: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(TASKS)}. May be repeated.", show_default="all", autocompletion=complete_task),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small networks, few rounds: under a minute.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Results file to write, e.g. bench.json.", show_default="none")
    ] = None,
    device: Device = "auto",
) -> None:
    """Measure training steps, likelihoods, inverses, samples and memory beside other libraries, in one run.

    All methods run in turn in one process, with one thread. Compared with: normflows' residual flow, flows of zuko, the
    same network without constraint, and the matrix products alone. It takes fifteen minutes.

    Example: iresnet bench --quick

    Example: iresnet bench --task sample --out bench.json
    """
    screen, tasks, on = console(), check_tasks(task or ()), choose_device(device)
    if out is not None:
        if out.suffix != ".json":
            raise ValueError(f"--out must be a file that ends in .json; got {str(out)!r}. Use e.g. bench.json.")
        require_commit(out.parent)
    use_threads(SMALL)
    with waiting(screen, "Measuring …"):
        sizes = QUICK if quick else FULL if on == "cpu" else GPU
        found = measure("bench" if out is None else out.stem, tasks, device=on, sizes=sizes)
    absent = missing()
    file = None if out is None else write(found, out.parent)
    content = {"rows": found.rows, "runs": found.runs, "missing": absent, "file": file}
    result(content, *_tables(found.rows))
    screen.say(*LEGEND, *_install(absent), *([f"Results in {file}"] if file else []))


def _install(absent: list[str]) -> list[str]:
    """Return how to install the libraries that are missing."""
    if not absent:
        return []
    these = " and ".join(absent)
    return [f"Not installed, so their columns are empty: {these}. Install with: pip install {' '.join(absent)}"]


def _tables(rows: list[dict[str, Any]]) -> list[Table]:
    parts = {name: [row for row in rows if row["table"] == name] for name in ("ratios", "memory", "growth")}
    made = [
        _compared("Time", "ms", parts["ratios"]),
        _compared("Peak memory of a training step", "MiB", parts["memory"]),
        _growth(parts["growth"]),
    ]
    return [one for one in made if one.row_count]


def _compared(title: str, unit: str, rows: list[dict[str, Any]]) -> Table:
    shown = [name for name in METHODS if any(row.get(name) is not None for row in rows)]
    spread = unit == "ms"
    headings = [name.replace(" ", "\n") for name in shown]
    made = table("task", "d", "blocks", unit, *headings, *["±"] * spread, title=title)
    made.padding, made.pad_edge = 0, False
    for row in sorted(rows, key=lambda row: list(TASKS).index(row["task"])):
        last = ["-" if row["spread"] is None else f"{row['spread']:.0%}"] if spread else []
        sizes = (str(row["dimension"]), str(row["blocks"]), _number(row[unit]))
        made.add_row(title_of(row), *sizes, *(_number(row.get(name)) for name in shown), *last)
    return made


def _growth(rows: list[dict[str, Any]]) -> Table:
    made = table("task", "varied", "sizes", "slope", "±", title="Growth: slope of ln time against ln size")
    for row in rows:
        sizes = f"{row['sizes'][0]} to {row['sizes'][-1]}"
        made.add_row(TASKS[row["task"]], row["varied"], sizes, f"{row['slope']:.2f}", _number(row["standard error"]))
    return made


def _number(value: float | None) -> str:
    """Return a number with two or three digits.

    >>> [_number(v) for v in (None, 0.023, 2.345, 23.45, 2345.6)]
    ['-', '0.02', '2.35', '23.4', '2346']
    """
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
