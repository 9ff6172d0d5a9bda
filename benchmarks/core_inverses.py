"""True errors of inverses, compared with the reported bounds; and what Anderson's and Newton's steps save."""

from __future__ import annotations

import copy
import math
from collections import Counter
from statistics import median

import torch
from core_blocks import families
from core_results import Row, row
from torch import Tensor

from iresnet import Anderson, Banach, Newton, ResidualBlock
from iresnet.audit.extended import evaluate_extended, to_extended
from iresnet.fixed_point import FEW_DIMENSIONS


def measure_inverses(inputs: int) -> list[Row]:
    """Compare true errors with reported bounds, and evaluations of g with those of Banach's steps, for each family."""
    rows, violations, unproven, trials, tightness = [], 0, 0, 0, []
    solvers, others = (Banach(), Anderson(), Newton()), ("Anderson", "Newton")
    worst = dict.fromkeys(others, -(10**9))
    for lipschitz in (0.3, 0.5, 0.7, 0.9, 0.97):
        torch.manual_seed(0)
        named = families(lipschitz)
        for name, (block, shape) in named.items():
            count, evaluations = math.ceil(inputs / len(named)), Counter[str]()
            extra = dict.fromkeys(others, -(10**9))
            for dtype in (torch.float32, torch.float64):
                block.to(dtype)
                z = 2 * torch.randn(count, *shape, dtype=dtype)
                exact, missing = truth(block, z)
                iterations = {}
                for solver in solvers:
                    s = block.solve(z, solver=solver)
                    error = (s.x.double() - exact - missing).flatten(1).norm(dim=1)
                    violations += int((error > s.error_bound).sum())
                    unproven += int((~s.converged).sum())
                    trials += count
                    tightness.append(float((s.error_bound / error.clamp_min(1e-300)).median()))
                    iterations[type(solver).__name__] = s.iterations
                    evaluations[type(solver).__name__] += int(s.iterations.sum())
                for other in others:
                    extra[other] = max(extra[other], int((iterations[other] - iterations["Banach"]).max()))
            block.float()
            wanted = name.startswith("2-D") or "trained" in name
            target = "<= 0.5" if wanted and lipschitz == 0.9 else "reported"
            for other in others if math.prod(shape) <= FEW_DIMENSIONS else others[:1]:
                pair, ratio = f"{other} / Banach", evaluations[other] / evaluations["Banach"]
                rows.append(row(pair, name, "evaluations of g, ratio", ratio, target, L=lipschitz))
                what = "evaluations of g, worst sample"
                rows.append(row(f"{other} - Banach", name, what, extra[other], "<= 2", detail=True, L=lipschitz))
                worst[other] = max(worst[other], extra[other])
    head = f"{trials} solves: 5 L x 8 families x 3 solvers x 2 precisions"
    return [
        row("inverse error <= bound", head, "violations", violations, "0"),
        row("inverse error <= bound", head, "not proven to the default tolerance", unproven, "0"),
        row("inverse error <= bound", head, "median of bound / true error", median(tightness)),
        row("Anderson - Banach", "all families, all L", what, worst["Anderson"], "<= 2"),
        row("Newton - Banach", "2-D families, all L", what, worst["Newton"], "<= 2"),
        *rows,
    ]


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
