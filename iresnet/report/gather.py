"""Collect the content of a report from a run folder: read its files; draw samples and solve inverses again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from .. import config, evaluate, lipschitz, spectral
from ..batch import Shape
from ..branch import lipschitz_bound
from ..certificate import residual_blocks
from ..data import Dataset, DataSettings, Schema, subsample
from ..data.corruptions import CORRUPTIONS, corrupt
from ..evaluate.solving import decode
from ..model import Model
from ..run import Run
from ..tree import parameter_count
from .material import Anomaly, Material, Reconstruction, SpectrumOfLayer, UnusualRows
from .words import last_name, without_folders

#: Images shown; points of a table; reconstructions shown; images corrupted.
IMAGES, POINTS, REBUILT, STRANGE = 64, 2000, 10, 10

#: Rows of a table that are scored, and those with the highest scores that are shown.
SCORED, UNUSUAL = 5000, 10

#: Layers whose dense matrix has more entries than this are left out of the singular values.
LARGEST_MATRIX = 4_000_000


@torch.no_grad()
def gather(
    run: Run,
    *,
    device: str = "cpu",
    seed: int = 0,
    data: Dataset | None = None,
    evaluation: dict[str, Any] | None = None,
) -> Material:
    """Return everything a report shows of a run, computed on a device and returned on the CPU.

    `data`, with their `evaluation`, take the place of the run's test split and what is saved about it.
    """
    model, test = run.model(device=device), run.splits().test if data is None else data
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(seed))
    shown = test.take(order[: IMAGES if run.schema.is_image else POINTS])
    density = evaluate.has_density(model)
    decodes = _is_proven(run) and evaluate.has_inverse(model)
    return Material(
        name=run.experiment.name,
        objective=run.experiment.objective.kind,
        schema=run.schema,
        config=config.dump(replace(run.experiment, data=_local(run.experiment.data))),
        environment=_local_environment(run.read_json("environment.json")),
        parameters=parameter_count(model),
        log=run.log(),
        evaluation=run.read_json("evaluation.json") if evaluation is None else evaluation,
        certificate=run.read_json("certificate.json"),
        samples=run.schema.restore(_samples(model, len(shown), device, seed)) if density and decodes else None,
        data=shown.x,
        reconstruction=_rebuilt(model, _first(shown, REBUILT).to(device)),
        interpolation=_lines(model, test.to(device), seed) if decodes and len(test) > 1 else None,
        spectra=list(spectra(model, run.schema.shape)),
        anomalies=_anomalies(run, model, shown, device) if density and run.schema.levels else [],
        family=run.experiment.network.family,
        sha256=run.sha256(),
        source=last_name(run.experiment.data.source),
        sizes={name: part["rows"] for name, part in run.read_json("data.json").items() if "rows" in part},
        unusual=_unusual(run, model, test, device) if density and not run.schema.is_image else None,
        released=_released_step(run),
    )


def _released_step(run: Run) -> int | None:
    """Return the step whose weights are the model's; None for a model that comes with the library."""
    return int(run.best_metrics()["step"]) if (run.folder / "best.safetensors").is_file() else None


def _unusual(run: Run, model: Model, test: Dataset, device: str) -> UnusualRows:
    """Score the rows of a table; return the scores, and what is known of the highest few."""
    rows = subsample(test, SCORED)
    values = evaluate.log_likelihood(model, rows.to(device)).value.cpu()
    scores = evaluate.anomaly(values, run.reference())
    order = values.argsort()[:UNUSUAL]
    top = rows.take(order)
    gains = evaluate.column_gains(model, top.to(device)).cpu() if _is_proven(run) else torch.zeros(top.x.shape)
    names = top.names or tuple(str(i) for i in (top.rows or _places(test, rows)[order].tolist()))
    return UnusualRows(scores, values, names, top.x, scores[order], values[order], gains)


def _places(test: Dataset, rows: Dataset) -> Tensor:
    """Return the place of every row in the dataset that it was drawn from."""
    places = torch.arange(len(test), dtype=torch.float32)[:, None]
    return subsample(Dataset(places, None, Schema((1,))), len(rows)).x[:, 0].long()


def _local(data: DataSettings) -> DataSettings:
    """Return the settings with file and folder names only: paths on the disk are private."""
    return replace(data, source=last_name(data.source), folder=last_name(data.folder))


def _local_environment(content: dict[str, Any]) -> dict[str, Any]:
    command = content.get("command")
    return {**content, "command": without_folders(command)} if isinstance(command, str) else content


def _samples(model: Model, count: int, device: str, seed: int) -> Tensor:
    flow = evaluate.as_flow(model)
    return decode(flow.transform, flow.base.rsample(count, torch.Generator(device).manual_seed(seed))).cpu()


def _is_proven(run: Run) -> bool:
    """Whether the inverse is proven: yes, unless there is a certificate that does not pass."""
    return bool(run.read_json("certificate.json").get("passed", True))


def _lines(model: Model, rows: Dataset, seed: int) -> Tensor:
    return evaluate.interpolate(model, rows, seed=seed).cpu()


def _rebuilt(model: Model, rows: Dataset) -> Reconstruction | None:
    if not evaluate.has_inverse(model):
        return None
    solution, x = evaluate.reconstruct(model, rows)
    made = (x, solution.x, solution.measured_error(x), solution.iterations, solution.largest_block_bound)
    return Reconstruction(*(tensor.cpu() for tensor in made))


def _anomalies(run: Run, model: Model, rows: Dataset, device: str) -> list[Anomaly]:
    """Return the data and every corruption of them, with their anomaly scores."""
    levels = cast(int, run.schema.levels)
    reference = run.reference()
    few = _first(rows, STRANGE)
    versions = {"original": few.x} | {name: corrupt(name, few.x, levels) for name in CORRUPTIONS}
    found = {e["name"]: e["detection"] for e in run.read_json("evaluation.json").get("anomalies", [])}
    made = []
    for name, x in versions.items():
        values = evaluate.log_likelihood(model, Dataset(x, None, run.schema).to(device)).value.cpu()
        note = f"less likely than an original in {100 * found[name]:.0f} % of pairs" if name in found else ""
        made.append(Anomaly(name, x, evaluate.anomaly(values, reference), note))
    return made


def _first(rows: Dataset, count: int) -> Dataset:
    return rows.take(torch.arange(min(count, len(rows))))


def spectra(model: Model, shape: Shape) -> Iterator[SpectrumOfLayer]:
    """Yield the singular values of every constrained layer whose dense matrix is small enough."""
    for name, block, at in residual_blocks(model, shape):
        if not any(lipschitz.cap_of(layer) is not None for layer in block.g.modules()):
            continue
        for part in lipschitz_bound(block.g, at).parts:
            layer = block.g.get_submodule(part.name) if part.name else block.g
            cap = lipschitz.cap_of(layer)
            if cap is None or at is None:
                continue
            weight = cast(Tensor, layer.weight)
            places = () if weight.dim() == 2 else at[1:]  # a linear layer of images stands behind Flatten
            if weight.shape[0] * weight.shape[1] * math.prod(places) ** 2 <= LARGEST_MATRIX:
                values = spectral.singular_values(layer, (weight.shape[1], *places)).tolist()
                yield SpectrumOfLayer(f"{name}.{part.name}", cap.coefficient, part.bound, values)
