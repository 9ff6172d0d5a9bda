"""Put the model of a run folder among those that come with the library: python tools/ship.py RUN NAME

Writes iresnet/weights/NAME: the settings with a data folder that holds anywhere, and what the other commands read.
Evaluate the run first: its figures go along, and into results/shipped.json.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from iresnet import atomic, config
from iresnet.data import DataSettings
from iresnet.results import Results, write
from iresnet.run import Run
from iresnet.run.weights import WEIGHTS

KEPT = ("schema.json", "data.json", "environment.json", "model.safetensors", "certificate.json", "evaluation.json")

#: What one model may take, in bytes.
LARGEST = 16 * 2**20


def ship(run: Run, name: str) -> Path:
    """Copy what a reader of the model needs to iresnet/weights/NAME."""
    missing = [file for file in KEPT if not (run.folder / file).is_file()]
    if missing:
        raise FileNotFoundError(f"{run.folder} has no {', '.join(missing)}. Train it to the end, and evaluate it.")
    size = (run.folder / "model.safetensors").stat().st_size
    if size > LARGEST:
        raise ValueError(f"a model must take at most {LARGEST:,} bytes; got {size:,}. Ship a smaller one.")
    target = WEIGHTS / name
    target.mkdir(parents=True, exist_ok=True)
    header = (run.folder / "config.toml").read_text(encoding="utf-8").partition("\n")[0]
    data = replace(run.experiment.data, folder=DataSettings().folder)
    experiment = replace(run.experiment, name=name, data=data)
    atomic.write(target / "config.toml", f"{header}\n{config.dump(experiment)}")
    for file in KEPT:
        shutil.copyfile(run.folder / file, target / file)
    return target


def results() -> Results:
    """What is known of every model that ships, one row each."""
    runs = [Run.open(path.parent) for path in sorted(WEIGHTS.glob("*/model.safetensors"))]
    rows = [{**_row(run), "run": i} for i, run in enumerate(runs)]
    return Results("shipped", rows, [run.read_json("environment.json") for run in runs])


def _row(run: Run) -> dict[str, Any]:
    found, blocks = run.read_json("evaluation.json"), run.read_json("certificate.json")["blocks"]
    error, inverse = found["error"], found["inverse"]
    return {
        "model": run.folder.name,
        "dataset": run.experiment.data.source,
        "error %": error["value"],
        "low": error["low"],
        "high": error["high"],
        "test images": error["rows"],
        "epochs": run.experiment.training.epochs,
        "parameters": run.read_json("environment.json")["parameters"],
        "MiB": (run.folder / "model.safetensors").stat().st_size / 2**20,
        "blocks proven": f"{sum(b['verdict'] == 'proven' for b in blocks)} of {len(blocks)}",
        "largest Lip(g)": max(b["lipschitz"] for b in blocks),
        "inverse": f"{inverse['proven']} of {inverse['rows']} proven, {inverse['precision']}",
        "largest block bound": inverse["largest_block_bound"],
        "code residual": inverse["code_residual"],
        "measured error": inverse["measured_error"],
    }


if __name__ == "__main__":
    print(ship(Run.open(sys.argv[1]), sys.argv[2]))
    print(write(results(), Path(__file__).resolve().parent.parent / "results"))
