"""True errors of inverses, compared with the reported bounds; and what Anderson's and Newton's steps save."""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import dataclass, field
from statistics import median

import torch
from core_blocks import families
from core_results import Row, row
from torch import Tensor

from iresnet import Anderson, Banach, Newton, ResidualBlock
from iresnet.audit.extended import evaluate_extended, to_extended
from iresnet.fixed_point import FEW_DIMENSIONS

LIPSCHITZ = (0.3, 0.5, 0.7, 0.9, 0.97)
SOLVERS = (Banach(), Anderson(), Newton())

#: The solvers that are compared with Banach's steps.
OTHERS = ("Anderson", "Newton")

WORST = "evaluations of g, worst sample"


@dataclass
class Solves:
    """What the solves of one block show, in both precisions and by all solvers.

    `extra` is by how many evaluations of g a solver exceeds Banach's steps, for the worst sample.
    """

    dimension: int
    trials: int = 0
    violations: int = 0
    unproven: int = 0
    tightness: list[float] = field(default_factory=list)
    evaluations: Counter[str] = field(default_factory=Counter)
    extra: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OTHERS, -(10**9)))


def measure_inverses(inputs: int) -> list[Row]:
    """Compare true errors with reported bounds, and evaluations of g with those of Banach's steps, for each family."""
    found: list[Solves] = []
    rows: list[Row] = []
    for lipschitz in LIPSCHITZ:
        torch.manual_seed(0)
        named = families(lipschitz)
        for name, (block, shape) in named.items():
            solves = solve_all(block, shape, math.ceil(inputs / len(named)))
            rows += evaluation_rows(solves, name, lipschitz)
            found.append(solves)
    trials = sum(s.trials for s in found)
    head = f"{trials} solves: 5 L x 8 families x 3 solvers x 2 precisions"
    bounds = "inverse error <= bound"
    tightness = median(t for s in found for t in s.tightness)
    # Newton's steps are for few dimensions; elsewhere it takes those of Anderson.
    newton = max(s.extra["Newton"] for s in found if s.dimension <= FEW_DIMENSIONS)
    return [
        row(bounds, head, "violations", sum(s.violations for s in found), "0"),
        row(bounds, head, "not proven to the default tolerance", sum(s.unproven for s in found), "0"),
        row(bounds, head, "median of bound / true error", tightness),
        row("Anderson - Banach", "all families, all L", WORST, max(s.extra["Anderson"] for s in found), "<= 2"),
        row("Newton - Banach", "2-D families, all L", WORST, newton, "<= 2"),
        *rows,
    ]


def solve_all(block: ResidualBlock, shape: tuple[int, ...], count: int) -> Solves:
    """Solve for `count` random codes in both precisions, by every solver."""
    found = Solves(math.prod(shape))
    for dtype in (torch.float32, torch.float64):
        block.to(dtype)
        z = 2 * torch.randn(count, *shape, dtype=dtype)
        exact, missing = truth(block, z)
        iterations = {}
        for solver in SOLVERS:
            s = block.solve(z, solver=solver)
            error = (s.x.double() - exact - missing).flatten(1).norm(dim=1)
            found.trials += count
            found.violations += int((error > s.error_bound).sum())
            found.unproven += int((~s.converged).sum())
            found.tightness.append(float((s.error_bound / error.clamp_min(1e-300)).median()))
            found.evaluations[type(solver).__name__] += int(s.iterations.sum())
            iterations[type(solver).__name__] = s.iterations
        for other in OTHERS:
            found.extra[other] = max(found.extra[other], int((iterations[other] - iterations["Banach"]).max()))
    block.float()
    return found


def evaluation_rows(solves: Solves, name: str, lipschitz: float) -> list[Row]:
    """Compare the evaluations of g that the solvers take for one block."""
    headline = name.startswith("2-D") or "trained" in name
    target = "<= 0.5" if headline and lipschitz == 0.9 else "reported"
    rows = []
    for other in OTHERS if solves.dimension <= FEW_DIMENSIONS else OTHERS[:1]:
        ratio = solves.evaluations[other] / solves.evaluations["Banach"]
        rows.append(row(f"{other} / Banach", name, "evaluations of g, ratio", ratio, target, L=lipschitz))
        rows.append(row(f"{other} - Banach", name, WORST, solves.extra[other], "<= 2", detail=True, L=lipschitz))
    return rows


def truth(block: ResidualBlock, z: Tensor) -> tuple[Tensor, Tensor]:
    """The solution for z with the stored weights, as a float64 number and what it lacks.

    The iteration ends where float64 does, with an error that can exceed a bound; so it is corrected by its residual in
    extended precision, and the Jacobian there.
    """
    z = z.double()
    x = z
    for _ in range(5_000):
        following = z - (block.reference(x) - x)
        if bool((following - x).abs().max() <= 1e-15 * z.abs().max()):
            break
        x = following
    exact = to_extended(x)
    residual = torch.from_numpy((to_extended(z) - exact - evaluate_extended(block.g, exact)).astype(float))
    g, d = copy.deepcopy(block.g).double(), residual[0].numel()
    jacobian = torch.func.vmap(torch.func.jacrev(lambda v: g(v[None])[0]))(x).reshape(-1, d, d).detach()
    missing = torch.linalg.solve(torch.eye(d, dtype=torch.float64) + jacobian, residual.reshape(-1, d, 1))
    return x, missing.reshape(x.shape)
