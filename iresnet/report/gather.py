"""Collect what a report shows from a run folder: read what is written there, draw and solve the rest anew."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from .. import config, evaluation, lipschitz, spectral
from ..certificate import residual_blocks
from ..data import Dataset
from ..data.corruptions import CORRUPTIONS, corrupt
from ..run import Run
from ..transform import Shape
from .material import Anomaly, Material, Reconstruction, SpectrumOfLayer

#: Images of each kind; points of a table; rows whose reconstruction is shown.
IMAGES, POINTS, REBUILT = 64, 2000, 10

#: Layers whose dense matrix has more entries than this are left out of the singular values.
LARGEST_MATRIX = 4_000_000


@torch.no_grad()
def gather(run: Run, *, seed: int = 0, pictures: list[tuple[str, str, str]] | None = None) -> Material:
    """Everything a report shows of a run."""
    model, test = run.model(), run.splits().test
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(seed))
    count = IMAGES if run.schema.is_image else POINTS
    shown = test.take(order[: min(count, len(test))])
    environment = run.read_json("environment.json")
    density = evaluation.has_density(model)
    return Material(
        name=run.experiment.name,
        objective=run.experiment.objective.kind,
        schema=run.schema,
        config=config.dump(run.experiment),
        environment=environment,
        parameters=sum(p.numel() for p in model.parameters()),
        log=run.log(),
        evaluation=run.read_json("evaluation.json"),
        certificate=run.read_json("certificate.json"),
        samples=_samples(model, len(shown), seed) if density else None,
        data=shown.x,
        reconstruction=_rebuilt(model, shown.take(torch.arange(min(REBUILT, len(shown))))),
        interpolation=evaluation.interpolate(model, test, seed=seed) if len(test) > 1 and run.schema.is_image else None,
        spectra=list(spectra(model, run.schema.shape)),
        anomalies=_anomalies(run, model, shown) if density and run.schema.is_image and run.schema.levels else [],
        pictures=list(pictures or []),
    )


def _samples(model: nn.Module, count: int, seed: int) -> Tensor:
    return evaluation.as_flow(model).sample((count,), generator=torch.Generator().manual_seed(seed))


def _rebuilt(model: nn.Module, rows: Dataset) -> Reconstruction:
    solution, x = evaluation.reconstruct(model, rows)
    return Reconstruction(x, solution.x, solution.measured_error(x), solution.iterations, solution.largest_block_bound)


def _anomalies(run: Run, model: nn.Module, rows: Dataset) -> list[Anomaly]:
    """The data as they are and every corruption of them, with their scores."""
    levels, reference, shown = (
        cast(int, run.schema.levels),
        run.reference(),
        rows.take(torch.arange(min(10, len(rows)))),
    )
    versions = {"as they are": shown.x} | {name: corrupt(name, shown.x, levels) for name in CORRUPTIONS}
    found = {e["name"]: e["detection"] for e in run.read_json("evaluation.json").get("anomalies", [])}
    made = []
    for name, x in versions.items():
        values = evaluation.log_likelihood(model, Dataset(x, None, run.schema)).value
        note = f"less likely than a real image in {100 * found[name]:.0f} % of pairs" if name in found else ""
        made.append(Anomaly(name, x, evaluation.anomaly(values, reference), note))
    return made


def spectra(model: nn.Module, shape: Shape) -> Iterator[SpectrumOfLayer]:
    """The singular values of every constrained layer whose matrix can be written out."""
    for name, block, at in residual_blocks(model, shape):
        for part in lipschitz.bound(block.g, at).parts:
            layer = block.g.get_submodule(part.name) if part.name else block.g
            cap = lipschitz.cap_of(layer)
            if cap is None or at is None:
                continue
            weight = cast(Tensor, layer.weight)
            inside = (weight.shape[1], *at[1:])
            if _entries(weight, at) <= LARGEST_MATRIX:
                values = spectral.singular_values(layer, inside).tolist()
                yield SpectrumOfLayer(f"{name}.{part.name}", cap.coefficient, part.bound, values)


def _entries(weight: Tensor, at: Shape) -> int:
    places = math.prod(at[1:])
    return int(weight.shape[0] * weight.shape[1]) * places * places
