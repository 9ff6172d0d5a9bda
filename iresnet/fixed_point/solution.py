"""What a solve reports: x with its errors and success per sample, or an exception with the numbers and the remedy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..proof import sample_norms
from ..spelling import counted, round_up


@dataclass(frozen=True)
class Solution:
    """The result of a solve, one entry per sample: x, evaluations of g, the bound on ||x - x*||_2, and success.

    `proven` is False if the bound relies on an asserted Lipschitz constant, or if the block is not trusted; `reason`
    then says why. `diverged` is set if no contraction is proven: the last step x <- z - g(x) is longer than the first,
    or numbers overflowed.
    """

    x: Tensor
    iterations: Tensor
    error_bound: Tensor
    converged: Tensor
    proven: bool = True
    diverged: Tensor | None = None
    reason: str = ""

    def __str__(self) -> str:
        bound, effort = round_up(float(self.error_bound.max()), ".1e"), counted(int(self.iterations.max()), "iteration")
        return (
            f"{int(self.converged.sum())} of {len(self.converged)} samples {describe_proof(self)}, largest error bound "
            f"{bound}, at most {effort}"
        )


@dataclass(frozen=True)
class ChainSolution:
    """The inverse of a chain with its errors, per sample: several numbers with different meanings, never merged.

    `largest_block_bound` is the largest of the error bounds that each block's solve has by itself. `code_residual` is
    ||F(x) - z|| in float64. `measured_error` needs the true x. `composed_bound` carries the block bounds through all
    later inverses; it grows like the product of Lip(F_t^-1) and is not informative for deep chains. `diverged` is True
    if the steps grew or numbers overflowed in some block, which can happen only in a block without a proof. `reason`
    says which part is unknown, if nothing is proven for that reason.
    """

    x: Tensor
    iterations: Tensor
    converged: Tensor
    largest_block_bound: Tensor
    code_residual: Tensor
    composed_bound: Tensor
    diverged: Tensor
    proven: bool = True
    reason: str = ""

    @property
    def error_bound(self) -> Tensor:
        """The composed bound: the only end-to-end proof."""
        return self.composed_bound

    def measured_error(self, truth: Tensor) -> Tensor:
        """Return ||x - truth|| per sample."""
        return sample_norms(self.x.double() - truth.double())

    def __str__(self) -> str:
        composed = float(self.composed_bound.max())
        scale = float(self.x.double().flatten(1).norm(dim=1).max())
        remark = "" if composed < 0.1 * max(scale, 1e-12) else " (not informative)"
        return (
            f"{int(self.converged.sum())} of {len(self.converged)} samples {describe_proof(self)}, block by block; "
            f"largest block bound {round_up(float(self.largest_block_bound.max()), '.1e')}, "
            f"code residual {float(self.code_residual.max()):.1e}, composed bound {round_up(composed, '.1e')}{remark}"
        )


class ProofStatus(Protocol):
    """The part of a report that says whether it is proven."""

    @property
    def proven(self) -> bool: ...

    @property
    def reason(self) -> str: ...


def describe_proof(report: ProofStatus) -> str:
    """Describe a sample that met its tolerance: proven, on which condition, or why it is not proven."""
    if report.proven:
        return "proven"
    if report.reason:
        return f"solved, not proven ({report.reason.rstrip('.')})"
    return "solved, if the asserted constant holds"


class ConvergenceError(RuntimeError):
    """A solve did not reach its tolerance with a proof. The message has the numbers and the remedy."""

    def __init__(self, solution: Solution, tolerance: float, lipschitz: float | None, where: str = "") -> None:
        self.solution, self.tolerance, self.lipschitz, self.where = solution, tolerance, lipschitz, where
        if solution.reason:
            super().__init__(f"the inverse{where and ' of ' + where} is not proven: {solution.reason}")
            return
        bad = ~solution.converged
        worst = round_up(float(solution.error_bound[bad].max()), ".1e")
        sentence = (
            f"the inverse{where and ' of ' + where} is not proven to {tolerance:.1e} for {int(bad.sum())} of "
            f"{len(bad)} samples: error bound {worst} after {counted(int(solution.iterations.max()), 'iteration')}."
        )
        if lipschitz is None or not lipschitz < 1:
            remedy = (
                f"No contraction is proven ({_describe_constant(lipschitz)}): see certify(model). tighten_(model) "
                "repairs it where the layers of g are constrained; where they are not, use constrain_(g) and train."
            )
        elif solution.x.dtype == torch.float64:
            remedy = "Allow a larger tolerance or more iterations."
        else:
            remedy = (
                "Allow a larger tolerance, or call .double() on model and code; raise max_iterations if you set it."
            )
        super().__init__(f"{sentence} {remedy}")

    def at(self, where: str) -> ConvergenceError:
        """Return the same error with the place where it occurred, outermost first."""
        place = f"{where}, {self.where}" if self.where else where
        return ConvergenceError(self.solution, self.tolerance, self.lipschitz, place)


def _describe_constant(lipschitz: float | None) -> str:
    if lipschitz is None or not math.isfinite(lipschitz):
        return "no bound of Lip(g) is known"
    return f"Lip(g) <= {round_up(lipschitz, '.4g')}"
