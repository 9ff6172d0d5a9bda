"""Record reference values for later versions to compare with: python tools/reference.py

Writes tests/reference/, computed on a CPU:

    steps.json      float64: loss and gradients of one training step of eight presets with few blocks
    training.json   float32: the losses of fifty steps, with one thread and with two
    models.json     the shipped models: logits, log-likelihoods, inverses and their bounds
    runs/           small run folders of a flow, a classifier, a hybrid and a table, and an interrupted run
    scores.json     the outputs of those runs on test samples, and the final weights of the interrupted run

`tests/test_reference.py` compares. A gradient is stored as its norm and its products with fixed random vectors.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

import iresnet
from iresnet import evaluate, run
from iresnet.data import Batches, DataSettings, Schema, subsample
from iresnet.data.builtin import schema_of
from iresnet.data.source import load
from iresnet.gpu import Acceleration
from iresnet.lipschitz import defer_norms, refresh_
from iresnet.model import Model
from iresnet.models import build
from iresnet.presets import PRESETS, Experiment
from iresnet.results import provenance
from iresnet.train import train
from iresnet.train.objective import Objective

FOLDER = Path(__file__).parent.parent / "tests" / "reference"

#: One preset for every kind of step: fully connected, convolutional and wide blocks, learned noise, couplings, margins.
STEPS = (
    "points-density", "digits-hybrid", "iresnet164", "cifar10-flow", "cifar10-flow-modern", "mnist-flow-noise",
    "cifar10-glow", "cifar10-certified",
)  # fmt: skip
TRAINED = ("points-density", "digits-hybrid", "digits-classifier")
THREADS = (1, 2)
SHIPPED = ("mnist-flow-noise", "mnist-classifier")

#: Folder name -> preset of the run.
RUNS = {
    "flow": "points-density",
    "classifier": "digits-classifier",
    "hybrid": "digits-hybrid",
    "table": "table-density",
}
STOPPED = "stopped"
TABLE, ROWS = "table.csv", 8
TO_RESUME = ("log.csv", "best.safetensors", "last.safetensors")  # what a finished run does not need


def small(name: str, blocks: int = 2, width: int = 6, **training: Any) -> Experiment:
    """A preset reduced to few and narrow blocks and few steps, with the norm rule of the version that is compared."""
    preset = PRESETS[name]
    few_blocks = tuple(min(b, blocks) for b in preset.network.blocks)
    network = replace(preset.network, blocks=few_blocks, width=width, norm="power-iteration")
    steps = {"steps": 6, "epochs": 0, "batch": 16, "validate_every": 3, "save_every": 3, "warmup": 2} | training
    few = replace(preset.data, validation=48) if preset.data.source == "digits" else preset.data
    return replace(preset, data=few, network=network, training=replace(preset.training, **steps))


# --------------------------------------------------------------------------------------------------------- summaries


def projected(x: Tensor, products: int = 3) -> list[float]:
    """The norm of a tensor and its products with fixed random vectors, in float64."""
    flat = x.detach().double().flatten().numpy()
    return [float(np.linalg.norm(flat)), *map(float, _vectors(len(flat), products) @ flat)]


@cache
def _vectors(length: int, products: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.random.default_rng(length).standard_normal((products, length))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use `count` torch threads within this context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create modules and tensors in this precision within this context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ------------------------------------------------------------------------------------------------------------- values


def objective_of(experiment: Experiment, schema: Schema, x: Tensor) -> Objective:
    """The model and loss of an experiment, built as training builds them."""
    torch.manual_seed(experiment.seed)
    with defer_norms():
        model = build(experiment.network, schema, experiment.objective.kind, x)
    refresh_(model, settle=True)
    return experiment.objective.build_objective(model, schema.levels, experiment.data.augment).train()


def step(name: str) -> dict[str, Any]:
    """Loss and gradients of the second training step of a preset, in float64; the first may initialise layers."""
    experiment = small(name)
    schema, generator = schema_of(experiment.data.source), torch.Generator().manual_seed(1)
    if schema.levels is None:
        x = torch.randn(8, *schema.shape, generator=generator, dtype=torch.float64)
    else:
        x = torch.randint(0, schema.levels, (8, *schema.shape), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, max(2, len(schema.classes)), (8,), generator=generator)
    with default_dtype(torch.float64):
        objective = objective_of(experiment, schema, x)
        for _ in range(2):
            objective.zero_grad()
            loss, metrics = objective(x, y, generator=generator)
            loss.backward()
    gradients = {n: projected(p.grad) for n, p in objective.named_parameters() if p.grad is not None}
    return {
        "loss": float(loss.detach()),
        "figures": {key: float(value) for key, value in metrics.items()},
        "gradients": gradients,
    }


def losses(name: str) -> list[float]:
    """The losses of fifty steps of a preset, in float32, run eagerly."""
    experiment = small(name, steps=50, batch=32)
    splits = load(experiment.data)
    objective = objective_of(experiment, splits.schema, splits.train.x)
    seen: list[float] = []

    def report(step: int, steps: int, metrics: Mapping[str, Tensor]) -> None:
        seen.append(float(next(iter(metrics.values()))))

    rows = Batches(splits.train, experiment.training.batch, seed=0, augment=experiment.data.augment)
    batches = rows.starting_at(0)
    generator = torch.Generator().manual_seed(0)
    plain = Acceleration("off", "off", "float32")
    train(objective, batches, experiment.training, generator=generator, acceleration=plain, report=report)
    return seen


def model_values(model: Model, shape: tuple[int, ...]) -> dict[str, Any]:
    """Outputs of an image model on random images: codes, logits, log-likelihoods, inverses and their bounds."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(0, 256, (2, *shape), generator=generator).float() + 0.5
    transform: Any = model.transform
    with torch.no_grad():
        z = transform(x)
        found: dict[str, Any] = {"code": projected(z)}
        if evaluate.has_head(model):
            found["logits"] = model(x).double().tolist()
        if evaluate.has_density(model):
            found["log_prob"] = model(x).double().tolist()
        solution = transform.solve(z.double())
    found["inverse"] = projected(solution.x)
    found["bounds"] = {
        name: getattr(solution, name).double().tolist() for name in ("largest_block_bound", "composed_bound")
    }
    return found | {"converged": solution.converged.tolist(), "proven": solution.proven}


def scores(folder: Path) -> dict[str, Any]:
    """Outputs of a run's model on its first test samples."""
    opened = run.Run.open(folder)
    model, rows = opened.model(), subsample(opened.splits().test, ROWS)
    found: dict[str, Any] = {}
    if evaluate.has_head(model):
        found["logits"] = evaluate.logits(model, rows).double().tolist()
    if evaluate.has_density(model):
        found["log_likelihood"] = evaluate.log_likelihood(model, rows).value.double().tolist()
    return found


def resumed(folder: Path) -> dict[str, list[float]]:
    """Resume an interrupted run and summarise its final weights."""
    run.resume(folder)
    return {
        name: projected(t) for name, t in run.Run.open(folder).model().state_dict().items() if t.is_floating_point()
    }


def placed(kind: str, place: Path, source: Path = FOLDER) -> Path:
    """A copy of a run folder to work on; the source of a table is made absolute."""
    folder = Path(shutil.copytree(source / "runs" / kind, place / kind))
    settings = folder / "config.toml"
    settings.write_text(settings.read_text().replace(f'"{TABLE}"', json.dumps(str(source / TABLE))))
    return folder


# ---------------------------------------------------------------------------------------------------------- run folders


def write_runs(target: Path) -> None:
    """Train the small runs; the interrupted one is a hybrid after three of its six steps."""
    x = np.random.default_rng(0).normal(size=(160, 3)) @ np.array([[1.0, 0.4, 0], [0, 1, 0.3], [0, 0, 1]])
    np.savetxt(target / TABLE, x, fmt="%.5f", delimiter=",", header="a,b,c", comments="")
    for kind, name in RUNS.items():
        experiment = small(name)
        if kind == "table":
            experiment = replace(experiment, data=replace(experiment.data, source=str(target / TABLE)))
        folder = target / "runs" / kind
        run.start(experiment, folder)
        for file in TO_RESUME:
            (folder / file).unlink()
        _tidy(folder, target)
    steps = iter(range(6))
    run.start(small("digits-hybrid"), target / "runs" / STOPPED, stop=lambda: next(steps) >= 2)
    _tidy(target / "runs" / STOPPED, target)


def _tidy(folder: Path, target: Path) -> None:
    """Remove paths of this machine from a run folder."""
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    settings, default = folder / "config.toml", DataSettings().folder
    text = settings.read_text().replace(json.dumps(str(target / TABLE)), f'"{TABLE}"')
    settings.write_text(text.replace(json.dumps(str(Path(default).resolve())), f'"{default}"'))


def write(target: Path) -> None:
    """Compute all reference values and write them into a folder."""
    with threads(1):
        found: dict[str, Any] = {"steps": {name: step(name) for name in STEPS}}
        shapes = {name: run.Run.open(name).schema.shape for name in SHIPPED}
        found["models"] = {name: model_values(iresnet.load(name), shapes[name]) for name in SHIPPED}
        write_runs(target)
        with TemporaryDirectory() as place:
            found["scores"] = {kind: scores(placed(kind, Path(place), target)) for kind in RUNS}
            found["scores"][STOPPED] = resumed(placed(STOPPED, Path(place), target))
    found["training"] = {name: {} for name in TRAINED}
    for count in THREADS:
        with threads(count):
            for name in TRAINED:
                found["training"][name][count] = losses(name)
    found["made"] = provenance(seeds=[0, 1, 2], seconds=time.process_time(), precision="float32, float64")
    for name, content in found.items():
        (target / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def main() -> int:
    """Replace tests/reference, once all new values are computed."""
    with TemporaryDirectory() as place:
        write(Path(place))
        shutil.rmtree(FOLDER, ignore_errors=True)
        shutil.copytree(place, FOLDER)
    print(FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
