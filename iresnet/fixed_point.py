"""Solving x + g(x) = z for a contraction g: the inverse of a residual block (Theorem 1, Algorithm 1).

    Banach      x <- z - g(x)                                     ||x_k - x*|| <= L^k / (1 - L) ||x_1 - x_0||   (Eq. 1)
    Anderson    the combination of the last steps with the smallest residual, falling back to Banach

What is proven: for ANY x, ||x - x*|| <= ||x + g(x) - z|| / (1 - L), because x -> x + g(x) expands distances by at
least 1 - L. That holds for every solver and precision, provided that the residual is evaluated exactly enough: it is
evaluated once more in float64 at the end, with a bound of what rounding can hide (`Rounding`), and where float32 stalls
above the tolerance, the last steps run in float64. (The textbook bound by the last step fails in float32 and for
accelerated iterates.)

Algorithm 1 as printed runs n + 1 steps; here an iteration is one evaluation of g.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from .float64 import Rounding
from .proof import attainable_tolerance, error_bound, meets_tolerance, sample_norms
from .spelling import counted

#: g on a part of the batch: called with x and the indices of its rows in the batch (a context must be cut alike).
Branch: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class ConvergenceError(RuntimeError):
    """A solve ended without the proof that was asked for. The message has the numbers and the remedy."""

    def __init__(self, solution: Solution, tolerance: float, lipschitz: float | None, where: str = "") -> None:
        self.solution, self.tolerance, self.lipschitz, self.where = solution, tolerance, lipschitz, where
        if solution.reason:
            super().__init__(f"the inverse{where and ' of ' + where} is not proven: {solution.reason}")
            return
        bad = ~solution.converged
        worst = float(solution.error_bound[bad].max())
        sentence = (
            f"the inverse{where and ' of ' + where} is not proven to {tolerance:.1e} for {int(bad.sum())} of "
            f"{len(bad)} samples: error bound {worst:.1e} after {counted(int(solution.iterations.max()), 'iteration')}."
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
        """The same error, naming the place, outermost first."""
        place = f"{where}, {self.where}" if self.where else where
        return ConvergenceError(self.solution, self.tolerance, self.lipschitz, place)


def _describe_constant(lipschitz: float | None) -> str:
    known = lipschitz is not None and math.isfinite(lipschitz)
    return f"Lip(g) <= {lipschitz:.4g}" if known else "no bound of Lip(g) is known"


@dataclass(frozen=True)
class Solution:
    """What a solve achieved, one entry per sample: x, evaluations of g, the bound on ||x - x*||_2, success.

    `proven` is False where the bound rests on a Lipschitz constant that was asserted, or where nothing is known of what
    was solved for, which `reason` says. `diverged`, where no contraction is proven: the last step x <- z - g(x) is
    longer than the first, or numbers overflowed.
    """

    x: Tensor
    iterations: Tensor
    error_bound: Tensor
    converged: Tensor
    proven: bool = True
    diverged: Tensor | None = None
    reason: str = ""

    def __str__(self) -> str:
        return (
            f"{int(self.converged.sum())} of {len(self.converged)} samples {describe_proof(self)}, largest error bound "
            f"{float(self.error_bound.max()):.1e}, at most {counted(int(self.iterations.max()), 'iteration')}"
        )


class ProofStatus(Protocol):
    """What a solve says of its proof."""

    @property
    def proven(self) -> bool: ...

    @property
    def reason(self) -> str: ...


def describe_proof(report: ProofStatus) -> str:
    """How a report calls a sample that met its tolerance."""
    if report.reason:
        return f"proven ({report.reason.rstrip('.')})"
    return "proven" if report.proven else "solved, if the asserted constant holds"


class Solver(ABC):
    """An iteration for x = z - g(x). It stops sample by sample; whoever calls it judges the result."""

    #: Evaluations of g at the most; None takes what the Lipschitz constant says is enough.
    max_iterations: int | None

    @abstractmethod
    def run(
        self, g: Branch, z: Tensor, x: Tensor, target: Tensor, contraction: float, limit: int
    ) -> tuple[Tensor, Tensor]:
        """(x, evaluations): iterate from x until ||x + g(x) - z|| <= target per sample, or `limit` evaluations.

        `contraction` bounds ||g(a) - g(b)|| / ||a - b||; it may be one or more where nothing is known.
        """


def _check_limit(max_iterations: int | None) -> None:
    if max_iterations is not None and max_iterations < 1:
        raise ValueError(f"max_iterations must be at least 1; got {max_iterations}.")


@dataclass(frozen=True)
class Banach(Solver):
    """Algorithm 1: x <- z - g(x)."""

    max_iterations: int | None = None

    def __post_init__(self) -> None:
        _check_limit(self.max_iterations)

    def run(
        self, g: Branch, z: Tensor, x: Tensor, target: Tensor, contraction: float, limit: int
    ) -> tuple[Tensor, Tensor]:
        result, count = x.clone(), torch.zeros(len(z), dtype=torch.long, device=z.device)
        rows = torch.arange(len(z), device=z.device)
        for _ in range(limit):
            following = z - g(x, rows)
            count[rows] += 1
            done = sample_norms(following - x) <= target
            # The step from x has the length of the residual AT x, so x itself has arrived; its successor is no worse.
            result[rows] = following
            if bool(done.any()):
                keep = ~done
                rows, z, following, target = rows[keep], z[keep], following[keep], target[keep]
            x = following
            if len(rows) == 0:
                break
        return result, count


@dataclass(frozen=True)
class Anderson(Solver):
    """Anderson acceleration with `memory` steps, per sample, falling back to Banach where it does not pay.

    A combined step that does not reduce the residual at least as well as the contraction promises is taken back, at the
    price of one evaluation. Prices are paid from a credit: two evaluations, and all that good combinations have saved.
    So there are never more than two evaluations beyond what the contraction promises of plain steps.
    """

    memory: int = 5
    max_iterations: int | None = None

    def __post_init__(self) -> None:
        _check_limit(self.max_iterations)
        if self.memory < 1:
            raise ValueError(f"memory must be at least 1; got {self.memory}.")

    def run(
        self, g: Branch, z: Tensor, x: Tensor, target: Tensor, contraction: float, limit: int
    ) -> tuple[Tensor, Tensor]:
        shape, rows = z.shape, torch.arange(len(z), device=z.device)
        result, count = x.clone(), torch.zeros(len(z), dtype=torch.long, device=z.device)
        state = _AndersonState.start(z.flatten(1), x.flatten(1), target)
        for _ in range(limit):
            r = state.z - g(state.x.reshape(-1, *shape[1:]), rows).flatten(1) - state.x
            count[rows] += 1
            state.accept(r, contraction, min(self.memory, r.shape[1]))
            # One plain step from the best point costs nothing: its residual is at most L times as large.
            result[rows] = (state.best + state.f).reshape(-1, *shape[1:])
            keep = state.size > state.target
            state.propose()
            if not bool(keep.all()):
                rows, state = rows[keep], state.cut(keep)
            if len(rows) == 0:
                break
        return result, count


@dataclass
class _AndersonState:
    """The state of Anderson acceleration, one row per sample still under way."""

    z: Tensor
    x: Tensor  # where g is evaluated next
    target: Tensor
    best: Tensor  # the last accepted point ...
    f: Tensor  # ... its residual z - g(best) - best ...
    size: Tensor  # ... and that residual's norm
    dx: Tensor  # differences of accepted points, (batch, memory, d)
    df: Tensor  # differences of their residuals
    credit: Tensor  # evaluations that may still be lost to combined steps that are taken back
    plain: Tensor  # whether x is a plain Banach step

    @classmethod
    def start(cls, z: Tensor, x: Tensor, target: Tensor) -> _AndersonState:
        size = torch.full_like(target, torch.inf)
        none = x.new_zeros(len(x), 0, x.shape[1])
        plain = torch.ones(len(x), dtype=torch.bool, device=x.device)
        return cls(z, x, target, x, torch.zeros_like(x), size, none, none, torch.full_like(target, 2.0), plain)

    def cut(self, keep: Tensor) -> _AndersonState:
        return _AndersonState(*(getattr(self, field.name)[keep] for field in fields(self)))

    def accept(self, r: Tensor, contraction: float, memory: int) -> None:
        """Accept x, whose residual is r, if it is a plain step or does at least what a plain step promises."""
        norm, first = sample_norms(r), bool(torch.isinf(self.size).all())
        good = self.plain | (norm <= contraction * self.size) | (norm <= self.target)
        # A combination was worth as many evaluations as plain steps would need for the same, less its own.
        promised = math.log(min(max(contraction, 1e-3), 0.9999))
        saved = torch.where(good, (norm / self.size).clamp(1e-30, 1.0).log() / promised, 0.0) - 1
        self.credit = torch.where(self.plain, self.credit, self.credit + saved)
        if not first:  # what was tried in vain says something about g as well
            self.dx = torch.cat([self.dx, (self.x - self.best)[:, None]], 1)[:, -memory:]
            self.df = torch.cat([self.df, (r - self.f)[:, None]], 1)[:, -memory:]
        self.best = torch.where(good[:, None], self.x, self.best)
        self.f = torch.where(good[:, None], r, self.f)
        self.size = torch.where(good, norm, self.size)

    def propose(self) -> None:
        """The next x: the combination of the remembered steps with the smallest residual, or a plain step."""
        following = self.best + self.f
        if self.df.shape[1] == 0:
            self.x, self.plain = following, torch.ones_like(self.plain)
            return
        gamma = _least_squares(self.df, self.f)
        combined = following - ((self.dx + self.df) * gamma[..., None]).sum(1)
        self.plain = (self.credit < 1) | ~torch.isfinite(combined).all(1) | (gamma == 0).all(1)
        self.x = torch.where(self.plain[:, None], following, combined)


def _least_squares(df: Tensor, f: Tensor) -> Tensor:
    """The gamma minimising ||f - sum_i gamma_i df_i||, (batch, memory): regularised normal equations in float64."""
    a, b = df.double(), f.double()
    gram, right = a @ a.mT, (a @ b[..., None])[..., 0]
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    ridge = diagonal.amax(-1, keepdim=True) * 1e-13 + (diagonal == 0) * 1.0
    solution, info = torch.linalg.solve_ex(gram + torch.diag_embed(ridge), right[..., None])
    solution = torch.where(info[..., None, None] == 0, solution, torch.zeros_like(solution))
    return solution[..., 0].to(df.dtype)


def _relative_tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """(residual to aim at, rounding of x) relative to the code, in this precision."""
    return (1e-11, 5e-14) if dtype == torch.float64 else (1e-6, max(2e-7, 1.5 * torch.finfo(dtype).eps))


def default_tolerance(z: Tensor, lipschitz: float) -> Tensor:
    """The tolerances when none is given: what the precision of z can hold, for each code and this contraction.

    x can be 1 / (1 - L) times as large as z, and its rounding counts 1 / (1 - L) times in the bound. That is the worst
    case, by which a solve is judged; it aims lower. Where g(0) is far from zero, x is larger, and so is what its
    precision and the float64 evaluation of g can hold: `solve` allows twice that.
    """
    gap = max(1 - lipschitz, 1e-3)
    relative, rounding = _relative_tolerances(z.dtype)
    return max(relative / gap, rounding / gap**2) * sample_norms(z.detach().double()).clamp_min(1.0)


def iteration_limit(contraction: float, start: float, target: float) -> int:
    """Evaluations after which a contraction must have reached the target, with a few to spare."""
    if not contraction < 1:
        return 200
    if contraction <= 0 or start <= target:
        return 10
    # Norms of huge codes overflow, and tiny tolerances underflow.
    least, largest = math.log(max(target, sys.float_info.min)), math.log(min(start, sys.float_info.max))
    return 10 + math.ceil((least - largest) / math.log(contraction))


def solve(
    g: Branch,
    z: Tensor,
    *,
    lipschitz: float | None,
    tolerance: float | None,
    solver: Solver,
    reference: Branch,
    rounding: Rounding | None = None,
) -> Solution:
    """Solve x + g(x) = z and prove it. `reference` is g in float64; `lipschitz` its bound, None where there is none.

    The tolerance is absolute, in the l2 norm of a sample; None takes `default_tolerance`. Works in the precision of z;
    samples whose float64 residual is still too large go on in float64. `rounding` bounds the error of `reference`;
    None assumes one.
    """
    rounding = Rounding.assumed() if rounding is None else rounding
    contraction = 1.0 if lipschitz is None else lipschitz
    gap = 1 - contraction if contraction < 1 else 1.0  # nothing is proven without a contraction: see below
    working = torch.promote_types(z.dtype, torch.float32)
    zw = z.to(working)
    # Aim below the tolerance, as the final x is rounded, and no lower than rounding in this precision allows.
    if tolerance is None:
        goal = default_tolerance(z, contraction)
        aim = 0.5 * _relative_tolerances(working)[0] * sample_norms(zw).clamp_min(1.0)
    else:
        goal = torch.full((len(z),), tolerance, dtype=torch.float64, device=z.device)
        aim = (0.5 * gap * goal).to(working)
    floor = 4 * torch.finfo(working).eps * sample_norms(zw)
    target = torch.maximum(aim, floor)
    limit = _evaluation_limit(solver, contraction, zw, float(target.min()))
    x, count = solver.run(g, zw, zw, target, contraction, limit)
    x = x.to(z.dtype)

    def proven(x: Tensor) -> Tensor:
        return error_bound(*_residual_norms(reference, x, z), rounding=rounding, inverse_lipschitz=1 / gap)

    error = proven(x)
    if tolerance is None and contraction < 1 and bool((error > goal).any()):
        # As far as x can be: ||x - z|| = ||g(x)|| <= ||g(z)|| / (1 - L). What is farther off refutes an asserted L.
        near = sample_norms(x.double()) <= (1 + 1e-3) * (sample_norms(z.double()) + proven(z))
        least = attainable_tolerance(
            *_attainable_norms(x, z, contraction), rounding=rounding, inverse_lipschitz=1 / gap
        )
        goal = torch.where(near, torch.maximum(goal, least), goal)
    finite = torch.isfinite(x).flatten(1).all(1)
    behind = ((error > goal) & finite).nonzero()[:, 0]
    remaining = limit - int(count[behind].max()) if len(behind) and solver.max_iterations else limit
    if len(behind) and working != torch.float64 and remaining > 0:
        part = z[behind].double()
        better, more = solver.run(
            lambda t, rows: reference(t, behind[rows]),
            part,
            x[behind].double(),
            (0.5 * gap * goal)[behind],
            contraction,
            remaining,
        )
        x[behind] = better.to(z.dtype)
        count[behind] += more
        error = proven(x)
    if lipschitz is not None and lipschitz < 1:
        return Solution(x, count, error, meets_tolerance(error, goal))
    # Without a contraction these are residuals, and bound nothing.
    grown = error > (1 + 1e-6) * proven(z)
    none = torch.full_like(error, torch.inf)
    return Solution(x, count, none, torch.zeros_like(grown), diverged=grown | ~error.isfinite())


def _evaluation_limit(solver: Solver, contraction: float, z: Tensor, target: float) -> int:
    if solver.max_iterations is not None:
        return solver.max_iterations
    # ||g(z)|| is the first residual; it is not known yet. Four orders above the code cost nothing but patience.
    return iteration_limit(contraction, 1e4 * max(1.0, float(sample_norms(z).max())), target)


def _residual_norms(reference: Branch, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The norms of x + g(x) - z, of x and of z, per sample in float64."""
    x64, z64 = x.double(), z.double()
    y = reference(x64, torch.arange(len(x), device=x.device))
    return sample_norms(x64 + y - z64), sample_norms(x64), sample_norms(z64)


def _attainable_norms(x: Tensor, z: Tensor, contraction: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same with the residual of the best x of this precision."""
    size = sample_norms(x.double())
    return (1 + contraction) * torch.finfo(x.dtype).eps / 2 * size, size, sample_norms(z.double())
