"""Draw the plots of docs/results/speed.md from results/bench-*.json: `python -m tools.speed`, or `make speed`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from iresnet.bench import METHODS, TASKS, title_of
from iresnet.plots import GrowthLine, RatioRow, plot_growth, plot_ratios
from iresnet.results import Results, read

ROOT = Path(__file__).resolve().parent.parent

#: The devices, by the end of the name of their results file.
DEVICES = {"cpu": "one thread of a CPU", "h200": "one H200"}


def ratio_rows(results: Results) -> list[RatioRow]:
    """The rows of the plot: every task at the sizes with the fewest blocks."""
    rows = [row for row in results.rows if row["table"] == "ratios"]
    fewest = min(row["blocks"] for row in rows)
    chosen = [row for task in TASKS for row in rows if row["task"] == task and row["blocks"] == fewest]
    usual = rows[0]["batch"]
    more = {row["batch"]: f", {row['batch']:,} rows" for row in rows if row["batch"] != usual}
    return [
        RatioRow(f"{title_of(row)}, d = {row['dimension']}{more.get(row['batch'], '')}", _ratios(row)) for row in chosen
    ]


def _ratios(row: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    known = [name for name in METHODS if row.get(name) is not None]
    return {name: (row[name], *row[f"{name}, quartiles"]) for name in known}


def growth_lines(results: Results) -> list[GrowthLine]:
    """The lines of the plot of growth."""
    return [
        GrowthLine(TASKS[r["task"]], r["varied"], r["sizes"], r["ms"], r["slope"], r["standard error"])
        for r in results.rows
        if r["table"] == "growth"
    ]


def main(root: Path = ROOT) -> None:
    """Draw the plots of every device that was measured."""
    for device, words in DEVICES.items():
        if (file := root / "results" / f"bench-{device}.json").exists():
            results, images = read(file), root / "docs" / "images"
            about = f"{words}; median of rounds in turn, and quartiles; batch {results.rows[0]['batch']}, float32"
            print(plot_ratios(ratio_rows(results), images / f"speed-{device}.png", about=about))
            about = f"{words}; numbers below: slopes of ln time against ln size, with their standard errors"
            print(plot_growth(growth_lines(results), images / f"growth-{device}.png", about=about))


if __name__ == "__main__":
    main()
