"""Flows trained on two-dimensional densities, with everything proven about them beside the result.

Log-determinants are exact. The result has the likelihood of test points beside the entropy, a lower bound for any
model; the certificate; the largest inverse error; and one plot.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from .. import atomic
from ..certificate import Certificate, certify, tighten_
from ..data import toy
from ..fixed_point import ChainSolution
from ..flow import Flow
from ..lipschitz import Sine
from ..models import mlp_flow
from ..plots import ToyPanel, plot_toy_flows
from ..spelling import round_up
from ..train import Report, Training, train
from ..train.objective import MaximumLikelihood

TITLES = {"moons": "Two moons", "checkerboard": "Checkerboard"}


@dataclass(frozen=True)
class ToySettings:
    """The settings of the demo's flows and of their training."""

    blocks: int = 16
    width: int = 64
    depth: int = 2
    lipschitz: float = 0.99
    frequency: float = 4.0
    batch: int = 256
    held_out: int = 20_000
    training: Training = field(default_factory=lambda: Training(steps=1200, learning_rate=8e-3))


@dataclass(frozen=True)
class ToyResult:
    """Metrics on one density: likelihoods in nats; l2 inverse errors, the largest of 1,000 points, in float64."""

    density: str
    nats: float
    nats_standard_error: float
    floor: float
    seconds: float
    certified: bool
    largest_lipschitz: float
    largest_block_bound: float
    code_residual: float
    measured_error: float
    tightened_layers: int


def run_density(
    name: str, settings: ToySettings, seed: int = 0, report: Report | None = None
) -> tuple[ToyResult, Flow, Certificate]:
    """Train a flow on one density, tighten and certify it, and evaluate it on test points."""
    torch.manual_seed(seed)  # initial weights; everything else has a generator of its own
    generator = torch.Generator().manual_seed(seed)
    flow = mlp_flow(
        2,
        settings.blocks,
        (settings.width,) * settings.depth,
        lipschitz=settings.lipschitz,
        activation=lambda: Sine(settings.frequency),
    )
    start = time.perf_counter()
    trained = cast(
        Flow,
        train(MaximumLikelihood(flow), _batches(name, settings.batch, generator), settings.training, report=report),
    )
    seconds = time.perf_counter() - start
    changed = tighten_(trained)
    certificate = certify(trained)
    held_out = toy.sample(name, settings.held_out, torch.Generator().manual_seed(seed + 1_000_003))
    with torch.no_grad():
        nats = torch.cat([-trained(part) for part in torch.split(held_out, 5_000)]).double()
        precise, x = copy.deepcopy(trained.transform).double(), held_out[:1_000].double()
        solution = cast(ChainSolution, precise.solve(precise(x)))
    outcome = ToyResult(
        name,
        float(nats.mean()),
        float(nats.std() / len(nats) ** 0.5),
        toy.entropy(name),
        seconds,
        certificate.passed and bool(solution.converged.all()),
        max(certificate.lipschitz.values()),
        float(solution.largest_block_bound.max()),
        float(solution.code_residual.max()),
        float(solution.measured_error(x).max()),
        len(changed),
    )
    return outcome, trained, certificate


def _batches(name: str, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    while True:
        yield toy.sample(name, size, generator)


def run(
    folder: Path,
    names: tuple[str, ...] = ("moons", "checkerboard"),
    settings: ToySettings | None = None,
    *,
    seed: int = 0,
    reporter: Callable[[str], Report] | None = None,
) -> list[ToyResult]:
    """The whole demonstration: trains, then writes `toy.png`, `toy.json` and a certificate for each density."""
    settings = ToySettings() if settings is None else settings
    folder.mkdir(parents=True, exist_ok=True)
    outcomes, panels = [], []
    for name in names:
        outcome, flow, certificate = run_density(name, settings, seed, None if reporter is None else reporter(name))
        certificate.to_json(folder / f"{name}-certificate.json")
        data = toy.sample(name, 4_000, torch.Generator().manual_seed(seed))
        panels.append(
            ToyPanel(TITLES.get(name, name), flow, data, outcome.nats, outcome.floor, _caption(outcome, certificate))
        )
        outcomes.append(outcome)
    plot_toy_flows(panels, folder / "toy.png")
    content = {"seed": seed, "settings": asdict(settings), "outcomes": [asdict(o) for o in outcomes]}
    atomic.write(folder / "toy.json", json.dumps(content, indent=1) + "\n")
    return outcomes


def _caption(o: ToyResult, certificate: Certificate) -> str:
    blocks = len(certificate.blocks)
    verdict = f"{blocks} of {blocks} blocks proven contractive" if o.certified else "NOT certified"
    bound, error = (round_up(value, ".0e") for value in (o.largest_block_bound, o.measured_error))
    return (
        f"{verdict}, Lip(g) ≤ {round_up(o.largest_lipschitz, '.3f')}; every inverse proven to {bound} a block, "
        f"measured error at most {error}"
    )
