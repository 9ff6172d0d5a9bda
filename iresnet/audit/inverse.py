"""Inverses against rows that are known, refined by Banach's iteration in extended precision."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from ..residual import ResidualBlock
from ..transform import Transform
from .extended import Array, evaluate, extended
from .subject import Skipped, Subject, Verdict, lengths

#: Steps of the iteration at the most, and how close it comes, as a part of the bound that is checked.
STEPS, PART = 300, 1e-3

#: Rows of every block.
FEW = 2


def inverse(s: Subject) -> Verdict:
    """||x - x*|| of every block's solve, in float32 and float64, against its error bound."""
    done, worst = 0, 0.0
    for block in s.contractions(0.2):
        truth = extended(s.states[block.name][:FEW])
        code = torch.from_numpy((truth + evaluate(block.plain.g, truth)).astype(np.float64))
        ratios = [_ratio(b, block.plain.g, z, truth) for b, z in ((block.own, code.float()), (block.plain, code))]
        done, worst = done + 1, max(worst, *ratios)
    words = f"{done} of {len(s.blocks)} blocks in float32 and float64: true errors reach {worst:.3f} of their bounds"
    return worst <= 1, f"{words} ({np.finfo(np.longdouble).nmant + 1} bits)"


def _ratio(block: ResidualBlock, g: nn.Module, z: Tensor, start: Array) -> float:
    """The largest true error, as a part of the bound that `solve` gives; infinite where no solution is found."""
    solution = block.solve(z)
    bound, x = solution.error_bound.numpy(), start
    target = max(PART * float(bound.min()), 64 * float(np.finfo(np.longdouble).eps) * float(extended(z.abs().sum())))
    for _ in range(STEPS):
        x, before = extended(z) - evaluate(g, x), x
        if float(np.sqrt(((x - before) ** 2).sum())) <= target:
            errors = np.sqrt(((extended(solution.x) - x) ** 2).reshape(len(x), -1).sum(1))
            return float((errors / np.maximum(bound, np.finfo(np.float64).tiny)).max())
    return math.inf


@torch.no_grad()
def round_trip(s: Subject) -> Verdict:
    """A row encoded and solved back: its error against the composed bound, F(x) - z against what is reported.

    The code is rounded, so that another row than x belongs to it: at most Lip(F^-1) ||z - F(x)|| away.
    """
    _ = s.blocks
    x, transform = s.rows[:1].float(), cast(Transform, s.model.transform)
    z = transform(x)
    solution = transform.solve(z)
    if not solution.proven or not bool(solution.error_bound.isfinite().all()):
        raise Skipped("no inverse is claimed to be proven")
    rounding = float(lengths(s.transform(x.double()) - z)) + 1e-14 * float(lengths(z.double()))
    bound = float(solution.error_bound) + transform.stretch(s.schema.shape).inverse * rounding
    error, residual = float(lengths(solution.x - x)), float(lengths(s.transform(solution.x.double()) - z))
    reported = float(getattr(solution, "code_residual", torch.tensor(math.inf)))
    words = f"error {error:.1e} of at most {bound:.1e}; ||F(x) - z|| is {residual:.1e}, reported {reported:.1e}"
    return error <= bound and residual <= 1.5 * reported + 1e-9 * float(lengths(z)), words
