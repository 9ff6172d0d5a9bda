"""What a solve reports: x with its error bound and success per sample, or an error with the numbers and the remedy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

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
