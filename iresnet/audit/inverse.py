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
    done, worst, proven = 0, 0.0, 0
    for block in s.some(s.certified(), 0.2):
        truth = extended(s.states[block.name][:FEW])
        code = torch.from_numpy((truth + evaluate(block.plain.g, truth)).astype(np.float64))
        ratios = [_ratio(block.own, block.plain.g, code.float(), truth), _ratio(block.plain, block.plain.g, code, truth)]
        done, proven = done + 1, proven + sum(r is not None for r in ratios)
        worst = max([worst, *(r for r in ratios if r is not None)])
    if not proven:
        raise Skipped("no inverse is claimed to be proven")
    words = f"{done} of {len(s.blocks)} blocks in float32 and float64: true errors reach {worst:.3f} of their bounds"
    return worst <= 1, f"{words} ({np.finfo(np.longdouble).nmant + 1} bits)"


def _ratio(block: ResidualBlock, g: nn.Module, z: Tensor, start: Array) -> float | None:
    """The largest true error, as a part of the bound that `solve` gives; None where it gives none."""
    solution = block.solve(z)
    bound = solution.error_bound.numpy()
    if not solution.proven or not np.isfinite(bound).all():
        return None
    truth = _settled(g, extended(z), start, PART * float(bound.min()))
    if truth is None:
        return math.inf
    errors = np.sqrt(((extended(solution.x) - truth) ** 2).reshape(len(truth), -1).sum(1))
    return float((errors / np.maximum(bound, np.finfo(np.float64).tiny)).max())


def _settled(g: nn.Module, z: Array, x: Array, target: float) -> Array | None:
    """The solution of x + g(x) = z, from a start that is close; None where the iteration does not settle."""
    floor = 64 * float(np.finfo(np.longdouble).eps) * float(np.abs(z).sum())
    for _ in range(STEPS):
        x, before = z - evaluate(g, x), x
        if float(np.sqrt(((x - before) ** 2).sum())) <= max(target, floor):
            return x
    return None


@torch.no_grad()
def round_trip(s: Subject) -> Verdict:
    """A row encoded and solved back: its error against the composed bound, F(x) - z against what is reported.

    The code is rounded, so that another row than x belongs to it: at most Lip(F^-1) ||z - F(x)|| away.
    """
    s.certified()
    x, transform = s.rows[:1].float(), cast(Transform, s.model.transform)
    z = transform(x)
    solution = transform.solve(z)
    if not solution.proven or not bool(solution.error_bound.isfinite().all()):
        raise Skipped("no inverse is claimed to be proven")
    rounding = float(lengths(s.transform(x.double()) - z)) + 1e-14 * float(lengths(z.double()))
    bound = float(solution.error_bound) + transform.stretch(s.schema.shape).inverse * rounding
    error, residual = float(lengths(solution.x - x)), float(lengths(s.transform(solution.x.double()) - z))
    reported = float(getattr(solution, "code_residual", torch.tensor(math.inf)))
    words = f"error {error:.1e} of at most {bound:.1e}; F(x) - z is {residual:.1e}, reported {reported:.1e}"
    return error <= bound and residual <= 1.5 * reported + 1e-9 * float(lengths(z)), words
