"""Check inverses against known inputs, refined by Banach's iteration in extended precision."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from ..residual import ResidualBlock
from .extended import Array, evaluate_extended, to_extended
from .subject import Skipped, Subject, Verdict, lengths

#: The most steps of the iteration, and its tolerance as a fraction of the bound under test.
STEPS, FRACTION = 300, 1e-3

#: Samples for every block.
PER_BLOCK = 2


def check_inverse(s: Subject) -> Verdict:
    """||x - x*|| of every block's solve, in float32 and float64, against its error bound."""
    done, worst = 0, 0.0
    for block in s.contractions(0.2):
        truth = to_extended(s.block_inputs[block.name][:PER_BLOCK])
        code = torch.from_numpy((truth + evaluate_extended(block.plain.g, truth)).astype(np.float64))
        ratios = [
            _error_to_bound(b, block.plain.g, z, truth) for b, z in ((block.own, code.float()), (block.plain, code))
        ]
        done, worst = done + 1, max(worst, *ratios)
    words = (
        f"{done} of {len(s.blocks)} blocks, float32 and float64: true errors are at most {worst:.3f} of their bounds"
    )
    return worst <= 1, f"{words} ({np.finfo(np.longdouble).nmant + 1} bits)"


def _error_to_bound(block: ResidualBlock, g: nn.Module, z: Tensor, start: Array) -> float:
    """The largest true error as a fraction of the bound from `solve`; infinite if no solution is found."""
    solution = block.solve(z)
    bound, x = solution.error_bound.numpy(), start
    target = max(
        FRACTION * float(bound.min()), 64 * float(np.finfo(np.longdouble).eps) * float(to_extended(z.abs().sum()))
    )
    for _ in range(STEPS):
        x, before = to_extended(z) - evaluate_extended(g, x), x
        if float(np.sqrt(((x - before) ** 2).sum())) <= target:
            errors = np.sqrt(((to_extended(solution.x) - x) ** 2).reshape(len(x), -1).sum(1))
            return float((errors / np.maximum(bound, np.finfo(np.float64).tiny)).max())
    return math.inf


@torch.no_grad()
def check_round_trip(s: Subject) -> Verdict:
    """Encode a sample and invert its code: its error against the composed bound, F(x) - z against the reported one.

    The code is rounded, so its exact inverse is not x, but at most Lip(F^-1) ||z - F(x)|| away from it.
    """
    _ = s.blocks
    x, transform = s.samples[:1].float(), s.model.transform
    z = transform(x)
    solution = transform.solve(z)
    if not solution.proven or not bool(solution.error_bound.isfinite().all()):
        raise Skipped("no inverse is claimed to be proven")
    rounding = float(lengths(s.transform(x.double()) - z)) + 1e-14 * float(lengths(z.double()))
    bound = float(solution.error_bound) + transform.stretch(s.schema.shape).inverse * rounding
    error, residual = float(lengths(solution.x - x)), float(lengths(s.transform(solution.x.double()) - z))
    reported = float(getattr(solution, "code_residual", torch.tensor(math.inf)))
    words = f"error {error:.1e}, bound {bound:.1e}; ||F(x) - z|| is {residual:.1e}, reported {reported:.1e}"
    return error <= bound and residual <= 1.5 * reported + 1e-9 * float(lengths(z)), words
