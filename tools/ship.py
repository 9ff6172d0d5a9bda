"""Add the model of a run folder to the models that ship with the library: python tools/ship.py RUN NAME

Writes iresnet/weights/NAME: the settings with the default dataset directory, the files that other commands read, and
the final weights without what only training needs (`run.weights.slim_state`). First evaluate the run on all test
samples: its metrics are copied, and added to results/shipped.json. They are bits/dim by the paper's protocol for a
density, the error for a classifier, both for a hybrid:

    iresnet evaluate RUN --protocol                   a density; without --rows the protocol uses all test samples
    iresnet evaluate RUN --rows 10000                 a classifier
    iresnet evaluate RUN --rows 10000 --protocol      a hybrid

To ship weights as float16, round them first (`tools/float16.py`), and evaluate what was rounded.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from iresnet import atomic, config, migration
from iresnet.data import DataSettings
from iresnet.results import Results, require_commit, write
from iresnet.run import Run
from iresnet.run.folder import MODEL_SHA256
from iresnet.run.weights import WEIGHTS, slim_state
from iresnet.train import checkpoint
from iresnet.train.checkpoint import Checkpoint
from iresnet.version import __version__

MODEL = "model.safetensors"
COPIED, SAID = ("schema.json", "data.json", "environment.json"), ("certificate.json", "evaluation.json")
KEPT = (*COPIED, MODEL, *SAID)

#: The folder of the published results.
RESULTS = Path(__file__).resolve().parent.parent / "results"

#: The largest size of a model in bytes.
LARGEST = 16 * 2**20


def ship(run: Run, name: str) -> Path:
    """Copy the model and the files that describe it to iresnet/weights/NAME."""
    missing = [file for file in KEPT if not (run.folder / file).is_file()]
    if missing:
        raise FileNotFoundError(f"{run.folder} has no {', '.join(missing)}. Finish the training and evaluate it.")
    _check_metrics(run)
    model, target = _model(run), WEIGHTS / name
    target.mkdir(parents=True, exist_ok=True)
    header = migration.parse_header_line((run.folder / "config.toml").read_text(encoding="utf-8").partition("\n")[0])
    data = replace(run.experiment.data, folder=DataSettings().folder)
    experiment = replace(run.experiment, name=name, data=data)
    atomic.write(target / "config.toml", f"{migration.header_line(header['iresnet'])}\n{config.dump(experiment)}")
    for file in COPIED:
        shutil.copyfile(run.folder / file, target / file)
    sha256 = checkpoint.sha256(checkpoint.save(model, target / MODEL, version=__version__))
    for file in SAID:  # they describe the same function, but its weights file has changed
        text = json.dumps(migration.with_format({**run.read_json(file), MODEL_SHA256: sha256}), indent=1)
        atomic.write(target / file, text + "\n")
    return target


def _model(run: Run) -> Checkpoint:
    """The model with its final weights; a model that is too large raises ValueError."""
    content = checkpoint.load(run.folder / MODEL)
    made = Checkpoint({**content.tensors, "weights": slim_state(run.model())}, content.state)
    size = sum(t.numel() * t.element_size() for group in made.tensors.values() for t in group.values())
    if size > LARGEST:
        raise ValueError(f"a shipped model must have at most {LARGEST:,} bytes; got {size:,}. Ship a smaller one.")
    return made


def _check_metrics(run: Run) -> None:
    """Raise ValueError unless the run was evaluated on all test samples with the metrics of its kind of model."""
    found, kind, rows = run.read_json("evaluation.json"), run.experiment.objective.kind, _test_rows(run)
    wanted = {"error": kind != "density", "protocol": kind != "classification"}
    missing = [name for name, needed in wanted.items() if needed and found.get(name, {}).get("rows", 0) < rows]
    missing += [] if "inverse" in found else ["inverse"]
    if missing:
        option = " --protocol" if wanted["protocol"] else ""
        raise ValueError(
            f"evaluation.json of {run.folder} must have the metrics of a {kind} model on all {rows:,} test samples; "
            f"it lacks {', '.join(missing)}. Run: iresnet evaluate {run.folder} --rows {rows}{option}"
        )


def _test_rows(run: Run) -> int:
    return int(run.read_json("data.json")["test"]["rows"])


def results() -> Results:
    """The metrics of every shipped model, one row each."""
    runs = [Run.open(path.parent) for path in sorted(WEIGHTS.glob(f"*/{MODEL}"))]
    rows = [{**_row(run), "run": i} for i, run in enumerate(runs)]
    return Results("shipped", rows, [run.read_json("environment.json") for run in runs])


def _row(run: Run) -> dict[str, Any]:
    """The row of one model; a classifier has no bits/dim, a density no error."""
    found, blocks = run.read_json("evaluation.json"), run.read_json("certificate.json")["blocks"]
    error, likelihood, inverse = found.get("error", {}), found.get("protocol", {}), found["inverse"]
    return {
        "model": run.folder.name,
        "kind": run.experiment.objective.kind,
        "dataset": run.experiment.data.source,
        "error %": error.get("value"),
        "low": error.get("low"),
        "high": error.get("high"),
        "bits/dim": likelihood.get("value"),
        "bias bound": likelihood.get("bias_bound"),
        "estimator error": likelihood.get("estimator_error"),
        "error over images": likelihood.get("standard_error"),
        "test images": (likelihood or error)["rows"],
        "epochs": run.experiment.training.epochs or None,
        "parameters": run.read_json("environment.json")["parameters"],
        "weights": _precision(run),
        "MiB": (run.folder / MODEL).stat().st_size / 2**20,
        "blocks proven": f"{sum(b['verdict'] == 'proven' for b in blocks)} of {len(blocks)}",
        "largest Lip(g)": max(b["lipschitz"] for b in blocks),
        "inverse": f"{inverse['proven']} of {inverse['rows']} proven, {inverse['precision']}",
        "largest block bound": inverse["largest_block_bound"],
        "code residual": inverse["code_residual"],
        "measured error": inverse["measured_error"],
        "SHA-256": run.sha256(),
    }


def _precision(run: Run) -> str:
    """The narrowest floating-point type in which weights of a model are stored."""
    stored = checkpoint.load(run.folder / MODEL).tensors["weights"].values()
    return "float16" if any(tensor.dtype == torch.float16 for tensor in stored) else "float32"


if __name__ == "__main__":
    trained = Run.open(sys.argv[1])
    require_commit(RESULTS, trained.read_json("environment.json"))
    print(ship(trained, sys.argv[2]))
    print(write(results(), RESULTS))
