"""Figure 1: dynamics on the line. Paths of an unconstrained residual network cross; those of an i-ResNet do not.

Both networks map [-2, 2] to a noisy x^3 at half depth and to a noisy identity at full depth. Between two layers a path
is x + tau g(x), tau in [0, 1] (Sec. 4.2). Two paths with gap d before a block and e after it cross between the two if d
and e differ in sign, at tau = d / (d - e); this is computed for every pair of the drawn paths.

For an i-ResNet no paths cross, drawn or not: with Lip(g) <= L < 1

    (x + tau g(x)) - (y + tau g(y))  >=  (1 - tau L) (x - y)  >  0    for x > y,

so the order is kept, and gaps shrink by at most the product of 1 - L over all blocks. L is proven by `certify`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .. import config
from ..certificate import certify, tighten_
from ..chain import Chain
from ..lipschitz import constrain_
from ..logdet import Estimator
from ..models.unconstrained import UnconstrainedBlock
from ..plots import Crossing, Dynamics, plot_paths
from ..residual import ResidualBlock
from ..results import provenance
from ..train import Training, train
from ..train.objective import Loss, Objective
from ..tree import parameter_count
from .cells import NONE, VANILLA
from .job import Job, Stopped, Work
from .record import Entry, new_entry
from .result import Reproduction, Result, budget_costs, columns, refuse_choices, run_items

OURS = "i-ResNet"
#: The interval [-REACH, REACH], its points that are learned, and the paths that are drawn.
REACH, POINTS, PATHS = 2.0, 60, 81
#: The last layer of every block is scaled by this at the start.
START = 0.1
#: The crossings listed in the file, the first ones; all are counted.
LISTED = 200

COLUMNS = columns(
    *("model", ("cros-\nsings", "crossings"), ("first\nafter", "first after block"), "largest Lip(g)"),
    *("smallest gap", ("proven", "smallest gap, proven"), "training s", "paper"),
)
PAPER = {VANILLA: "cross", OURS: "none cross"}


@dataclass(frozen=True)
class Setting:
    """Size and training of the networks, the same for both."""

    blocks: int = 8
    width: int = 32
    noise: float = 0.7
    lipschitz: float = 0.97
    training: Training = field(
        default_factory=lambda: Training(steps=1000, batch=POINTS, learning_rate=3e-3, average=0.9)
    )


def setting(job: Job) -> Setting:
    """Return the setting of a job's budget; the paper does not say how its networks were trained."""
    refuse_choices(job, "figure1 trains two networks of its own on points of a line")
    usual = Setting()
    # Fewer steps at a higher learning rate: enough for paths to cross, for all seeds from 0 to 7.
    few = replace(usual, blocks=4, width=16, training=replace(usual.training, steps=300, learning_rate=2e-2))
    return few if job.budget == "smoke" else usual


class Waypoints(Objective):
    """Mean squared distance of a chain's states at half and full depth from the two columns of y."""

    model: Chain

    def __init__(self, model: Chain) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor | None = None, *, estimator: Estimator | None = None,
                generator: torch.Generator | None = None) -> Loss:  # fmt: skip
        if y is None:
            raise ValueError("y must hold the two states to reach, (n, 2); got none. Train on batches (x, y).")
        states = block_states(self.model, x)
        reached = torch.cat([states[len(states) // 2], states[-1]], dim=1)
        loss = (reached - y).square().mean()
        return loss, {"squared error": loss.detach()}


def block_states(chain: Chain, x: Tensor) -> list[Tensor]:
    """Return x and its state after every block."""
    states = [x]
    for block in chain:
        states.append(block(states[-1]))
    return states


def noisy_targets(points: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return sorted points of the interval, (n, 1), and their noisy targets at half and full depth, (n, 2)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.linspace(-REACH, REACH, points)[:, None]
    return x, torch.cat([x**3, x], dim=1) + noise * torch.randn(points, 2, generator=generator)


def build_network(name: str, s: Setting, seed: int) -> Chain:
    """Build residual blocks on the line, with or without the constraint, close to the identity."""
    torch.manual_seed(seed)
    return Chain(*(_block(name, s) for _ in range(s.blocks)))


def _block(name: str, s: Setting) -> ResidualBlock:
    layers = (nn.Linear(1, s.width), nn.ELU(), nn.Linear(s.width, s.width), nn.ELU(), nn.Linear(s.width, 1))
    with torch.no_grad():
        for p in layers[-1].parameters():
            p.mul_(START)
    g = nn.Sequential(*layers)
    return ResidualBlock(constrain_(g, lipschitz=s.lipschitz)) if name == OURS else UnconstrainedBlock(g)


def find_crossings(paths: NDArray[np.float64]) -> list[Crossing]:
    """Find all crossings of paths (layers + 1, paths), straight between layers, ordered by depth.

    Paths that meet at a layer and then change order cross there; paths that only touch do not.

    >>> find_crossings(np.array([[0.0, 1.0], [2.0, 1.0]]))
    [Crossing(depth=0.5, value=1.0, pair=(0, 1))]
    """
    n, found = paths.shape[1], list[Crossing]()
    i, j = np.triu_indices(n, 1)
    order = np.sign(paths[0, j] - paths[0, i])
    for t in range(len(paths) - 1):
        before, after = paths[t, j] - paths[t, i], paths[t + 1, j] - paths[t + 1, i]
        side = np.sign(after)
        for k in np.flatnonzero((side != 0) & (order != 0) & (side != order)):
            tau = before[k] / (before[k] - after[k])
            value = paths[t, i[k]] + tau * (paths[t + 1, i[k]] - paths[t, i[k]])
            found.append(Crossing(float(t + tau), float(value), (int(i[k]), int(j[k]))))
        order = np.where(side != 0, side, order)
    return sorted(found, key=lambda c: c.depth)


@torch.no_grad()
def measure_crossings(name: str, s: Setting, trained: Chain) -> tuple[dict[str, Any], Dynamics]:
    """Count crossings of the drawn paths, in float64, and bound the gaps of all paths."""
    certificate = certify(trained, (1,))
    precise = trained.double()
    x = torch.linspace(-REACH, REACH, PATHS, dtype=torch.float64)[:, None]
    states = block_states(precise, x)
    paths = torch.cat(states, dim=1).T.numpy()
    found = find_crossings(paths)
    gaps = np.diff(paths, axis=1) / np.diff(paths[0])
    constants = list(certificate.lipschitz.values())
    proven = certificate.passed
    per_block = np.bincount([int(c.depth) for c in found], minlength=s.blocks) if found else np.zeros(s.blocks, int)
    row = {
        "paths": PATHS,
        "crossings": len(found),
        "first after block": found[0].depth if found else None,
        "first pair": list(paths[0, list(found[0].pair)]) if found else None,
        "most in one block": int(per_block.max()),
        "blocks": s.blocks,
        "largest Lip(g)": max(constants),
        "proven free of crossings": proven,
        "smallest gap": float(gaps.min()),
        "smallest gap, proven": math.prod(1 - c for c in constants) if proven else None,
        "off x^3": float((states[s.blocks // 2] - x**3).square().mean().sqrt()),
        "off identity": float((states[-1] - x).square().mean().sqrt()),
        "parameters": parameter_count(trained),
        "steps": s.training.steps,
        "paper": PAPER[name],
    }
    return row, Dynamics(_title(row, name), paths, found)


def _title(row: dict[str, Any], name: str) -> str:
    if row["proven free of crossings"]:
        return f"{name}: no crossings, proven for all paths (Lip(g) ≤ {row['largest Lip(g)']:.3f})"
    count = row["crossings"]
    return f"{'Residual network' if name == VANILLA else name}: {count:,} crossings of {row['paths']} paths"


def _measure_network(work: Work, name: str, s: Setting, seed: int, drawn: list[Dynamics]) -> tuple[Entry, str]:
    """Train one network and find its crossings; append its paths to `drawn`."""
    begun, what = time.perf_counter(), f"figure1 {name}"
    objective = Waypoints(build_network(name, s, seed))
    batches = repeat(noisy_targets(POINTS, s.noise, seed))
    options: Any = {"report": work.report(what), "callback": lambda state: work.stop()}
    trained = cast(Chain, train(objective, batches, s.training, **options))
    if work.stop():
        raise Stopped(f"{what} was stopped and nothing of it was saved: it takes seconds")
    seconds = time.perf_counter() - begun
    if name == OURS:
        tighten_(trained, (1,))
    row, dynamics = measure_crossings(name, s, trained)
    row["training s"] = round(seconds, 3)
    drawn.append(dynamics)
    precision, parameters = "float32; paths in float64", row["parameters"]
    made = provenance(seeds=[seed], seconds=seconds, precision=precision, parameters=parameters)
    details = {
        "setting": config.dump(s).splitlines(),
        "paths": dynamics.paths.round(6).tolist(),
        "crossings": [[c.depth, c.value, *c.pair] for c in dynamics.crossings[:LISTED]],
    }
    sentence = dynamics.title.partition(": ")[2]
    return new_entry(work.job, NONE, name, row, details, made, seed=seed), sentence


def run(work: Work) -> Reproduction:
    """Train both networks, find the crossings, and plot the paths."""
    s, seed, drawn = setting(work.job), work.job.seeds[0], list[Dynamics]()
    items = [(name, partial(_measure_network, work, name, s, seed, drawn)) for name in (VANILLA, OURS)]
    results = run_items(work, "figure1", items)
    path = plot_paths(drawn, work.job.out / "figure1.png")
    notes = (
        f"crossings: of any two of the {PATHS} drawn paths; smallest gap: of neighbours, relative to their first gap, "
        "negative where they have changed sides; proven: a lower bound of all gaps",
        "no two paths of the i-ResNet cross, drawn or not, since every 1 - Lip(g) is above zero",
    )
    return Reproduction(results, COLUMNS, (work.job.out / "figure1.json", path), notes)


RESULT = Result(
    name="figure1",
    about="dynamics on the line: paths of an unconstrained network, which cross, and of an i-ResNet",
    says="paths of a standard ResNet cross and collapse; those of an i-ResNet do not",
    costs=budget_costs(
        "two networks of 4 blocks, 300 steps: seconds",
        "two networks of 8 blocks, 1,000 steps: seconds",
        "the same: the paper does not say how its networks were trained",
    ),
    run=run,
    check=setting,
)
