"""Put the model of a run folder among those that come with the library: python tools/ship.py RUN NAME

Writes iresnet/weights/NAME: the settings with a data folder that holds anywhere, and what the other commands read.
Evaluate the run first: its figures go along.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from iresnet import atomic, config
from iresnet.data import DataSettings
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


if __name__ == "__main__":
    print(ship(Run.open(sys.argv[1]), sys.argv[2]))
