"""Iterations for x = z - g(x): Algorithm 1 (Banach), and Anderson acceleration. They iterate and prove nothing.

Every sample stops on its own, so its result does not depend on the rest of the batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from ..proof import sample_norms
from ..spelling import at_least

#: g on part of a batch: called with x and the indices of its samples in the batch, in increasing order.
Branch: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class Solver(ABC):
    """An iteration for x = z - g(x) that stops per sample. The caller checks the result."""

    #: The largest number of evaluations of g; None: as many as the Lipschitz constant requires.
    max_iterations: int | None

    @abstractmethod
    def run(
        self, g: Branch, z: Tensor, x: Tensor, target: Tensor, contraction: float, limit: int
    ) -> tuple[Tensor, Tensor]:
        """Iterate from x until ||x + g(x) - z|| <= target per sample, or `limit` evaluations; return (x, evaluations).

        `contraction` bounds ||g(a) - g(b)|| / ||a - b||; it may be one or more if no contraction is known.
        """


def _check_limit(max_iterations: int | None) -> None:
    if max_iterations is not None:
        at_least(1, max_iterations=max_iterations)


@dataclass(frozen=True)
class Banach(Solver):
    """Algorithm 1: x <- z - g(x)."""

    max_iterations: int | None = None

    def __post_init__(self) -> None:
        _check_limit(self.max_iterations)

    def run(
        self, g: Branch, z: Tensor, x: Tensor, target: Tensor, contraction: float, limit: int
    ) -> tuple[Tensor, Tensor]:
        return _banach_steps(g, z, x, target, limit)[:2]


@dataclass(frozen=True)
class Anderson(Solver):
    """Anderson acceleration with `memory` steps, per sample, with Banach steps where they suffice.

    Every sample begins with Banach steps, which need no bookkeeping. Steps are combined once the last reduction of its
    residual, repeated a few times, would not reach the target.

    A combined step must reduce the residual by at least the contraction factor; otherwise it is rejected, which costs
    one evaluation. Rejections are paid from a credit of two evaluations, plus those that accepted combinations have
    saved. So there are at most two evaluations more than the contraction factor guarantees for Banach steps.
    """

    memory: int = 5
    max_iterations: int | None = None

    def __post_init__(self) -> None:
        _check_limit(self.max_iterations)
        at_least(1, memory=self.memory)

    def run(
        self, g: Branch, z: Tensor, x: Tensor, target: Tensor, contraction: float, limit: int
    ) -> tuple[Tensor, Tensor]:
        result, count, slow = _banach_steps(g, z, x, target, limit, patience=PATIENCE)
        if not slow:
            return result, count
        begun = _BanachState.join(slow)
        begun = begun.select(begun.rows.argsort())
        shape, rows, memory = z.shape, begun.rows, min(self.memory, z[0].numel())
        state = _AndersonState.after(begun, contraction, memory)
        for _ in range(limit - int(count[rows].min())):
            r = state.z - g(state.x.reshape(-1, *shape[1:]), rows).flatten(1) - state.x
            count[rows] += 1
            state.accept(r, contraction, memory)
            # One Banach step from the best point needs no further evaluation; its residual is at most L times as large.
            result[rows] = (state.best + state.f).reshape(-1, *shape[1:])
            keep = (state.size > _attainable(state.target, state.best)) & (count[rows] < limit)
            state.propose()
            if not bool(keep.all()):
                rows, state = rows[keep], state.select(keep)
            if len(rows) == 0:
                break
        return result, count


#: Up to so many further Banach steps are taken where combining steps might save one or two of them.
PATIENCE = 4

#: Samples that have converged are left out as soon as this share of a batch has.
_SHARE = 0.25


def _banach_steps(
    g: Branch, z: Tensor, x: Tensor, target: Tensor, limit: int, patience: int | None = None
) -> tuple[Tensor, Tensor, list[_BanachState]]:
    """Iterate x <- z - g(x); return (x, evaluations, the samples that converge slowly, in parts)."""
    result, count, slow = x.clone(), torch.zeros(len(z), dtype=torch.long, device=z.device), list[_BanachState]()
    state = _BanachState.start(z, x, target)
    for evaluations in range(1, limit + 1):
        state.advance(g(state.x, state.rows))
        last = evaluations == limit
        if patience is not None and not last and bool((lagging := state.lags(patience)).any()):
            slow.append(state.select(lagging))
            state.open = state.open & ~lagging
        left = int(state.open.sum())
        if last or left <= (1 - _SHARE) * len(state.rows):
            result[state.rows], count[state.rows] = state.x, state.count
            state = state.select(state.open)
        if not left:
            break
    return result, count, slow


def _attainable(target: Tensor, x: Tensor) -> Tensor:
    """Return the target per sample, but not less than what rounding x allows."""
    return torch.maximum(target, 2 * torch.finfo(x.dtype).eps * sample_norms(x))


S = TypeVar("S", bound="_State")


@dataclass
class _State:
    """Tensors with one row per sample."""

    def select(self: S, keep: Tensor) -> S:
        return type(self)(*(getattr(self, field.name)[keep] for field in fields(self)))

    @classmethod
    def join(cls: type[S], states: Sequence[S]) -> S:
        return cls(*(torch.cat([getattr(state, field.name) for state in states]) for field in fields(cls)))


@dataclass
class _BanachState(_State):
    """The state of Banach steps, one row per sample; those that are not open any more keep their x."""

    rows: Tensor  # the indices of the samples in the batch
    z: Tensor
    target: Tensor
    earlier: Tensor  # the last three iterates
    before: Tensor
    x: Tensor
    size: Tensor  # the norm of the residual at the last but one, ...
    rate: Tensor  # ... divided by the one before
    open: Tensor
    count: Tensor  # evaluations

    @classmethod
    def start(cls, z: Tensor, x: Tensor, target: Tensor) -> _BanachState:
        rows, size = torch.arange(len(z), device=z.device), torch.full_like(target, torch.inf)
        open_ = torch.ones_like(rows, dtype=torch.bool)
        return cls(rows, z, target, x, x, x, size, size, open_, torch.zeros_like(rows))

    def advance(self, y: Tensor) -> None:
        """Take a step, given y = g(x)."""
        x = self.z - y
        size = sample_norms(x - self.x)
        x = torch.where(self.open.view(-1, *[1] * (x.dim() - 1)), x, self.x)
        self.earlier, self.before, self.x = self.before, self.x, x
        self.size, self.rate, self.count = size, size / self.size, self.count + self.open
        # The length of the step from x is the residual AT x, so x has converged; the next iterate is no worse.
        self.open = self.open & ~(size <= _attainable(self.target, x))

    def lags(self, patience: int) -> Tensor:
        """Whether the last reduction of the residual, repeated so many times, would not reach the target."""
        return self.open & (self.size * self.rate**patience > self.target)


@dataclass
class _AndersonState(_State):
    """The state of Anderson acceleration, one row per sample that has not converged."""

    z: Tensor
    x: Tensor  # the point at which g is evaluated next
    target: Tensor
    best: Tensor  # the last accepted point ...
    f: Tensor  # ... its residual z - g(best) - best ...
    size: Tensor  # ... and that residual's norm
    dx: Tensor  # differences of accepted points, (batch, memory, d)
    df: Tensor  # differences of their residuals
    credit: Tensor  # how many rejected steps can still be afforded
    plain: Tensor  # whether x is a Banach step

    @classmethod
    def after(cls, begun: _BanachState, contraction: float, memory: int) -> _AndersonState:
        """Return the state after the last two Banach steps, whose residuals are known."""
        z, x, before, after = (t.flatten(1) for t in (begun.z, begun.earlier, begun.before, begun.x))
        size, none = torch.full_like(begun.target, torch.inf), x.new_zeros(len(x), 0, x.shape[1])
        plain = torch.ones_like(begun.open)
        state = cls(z, x, begun.target, x, torch.zeros_like(x), size, none, none, torch.full_like(size, 2.0), plain)
        for residual in (before - x, after - before):
            state.accept(residual, contraction, memory)
            state.propose()
        return state

    def accept(self, r: Tensor, contraction: float, memory: int) -> None:
        """Accept x with residual r if it is a Banach step, or reduces the residual by the contraction factor."""
        norm, first = sample_norms(r), bool(torch.isinf(self.size).all())
        good = self.plain | (norm <= contraction * self.size) | (norm <= self.target)
        # A combination saves the number of Banach steps with the same reduction, minus its own evaluation.
        log_factor = math.log(min(max(contraction, 1e-3), 0.9999))
        saved = torch.where(good, (norm / self.size).clamp(1e-30, 1.0).log() / log_factor, 0.0) - 1
        self.credit = torch.where(self.plain, self.credit, self.credit + saved)
        if not first:  # rejected points carry information about g as well
            self.dx = torch.cat([self.dx, (self.x - self.best)[:, None]], 1)[:, -memory:]
            self.df = torch.cat([self.df, (r - self.f)[:, None]], 1)[:, -memory:]
        self.best = torch.where(good[:, None], self.x, self.best)
        self.f = torch.where(good[:, None], r, self.f)
        self.size = torch.where(good, norm, self.size)

    def propose(self) -> None:
        """Choose the next x: the combination of stored steps with the smallest residual, or a Banach step."""
        banach = self.best + self.f
        if self.df.shape[1] == 0:
            self.x, self.plain = banach, torch.ones_like(self.plain)
            return
        gamma = _least_squares(self.df, self.f)
        combined = banach - ((self.dx + self.df) * gamma[..., None]).sum(1)
        self.plain = (self.credit < 1) | ~torch.isfinite(combined).all(1) | (gamma == 0).all(1)
        self.x = torch.where(self.plain[:, None], banach, combined)


def _least_squares(df: Tensor, f: Tensor) -> Tensor:
    """Minimise ||f - sum_i gamma_i df_i|| over gamma, (batch, memory), by regularised normal equations in float64."""
    if df.shape[1] <= 2 and f.shape[1] <= _NARROW:
        return _cramer(df, f).to(df.dtype)
    a, b = df.double(), f.double()
    gram, right = a @ a.mT, (a @ b[..., None])[..., 0]
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    ridge = diagonal.amax(-1, keepdim=True) * 1e-13 + (diagonal == 0) * 1.0
    solution, info = torch.linalg.solve_ex(gram + torch.diag_embed(ridge), right[..., None])
    solution = torch.where(info[..., None, None] == 0, solution, torch.zeros_like(solution))
    return solution[..., 0].to(df.dtype)


#: Up to this dimension two unknowns are computed with the batch as the innermost axis.
_NARROW = 64


def _cramer(df: Tensor, f: Tensor) -> Tensor:
    """Solve the same equations for one or two unknowns, all samples at once, without factorising small matrices."""
    a = torch.empty(*df.shape[1:], len(df), dtype=torch.float64, device=df.device).copy_(df.permute(1, 2, 0))
    diagonal, right = a.square().sum(1), (a * f.t().double()).sum(1)
    diagonal += diagonal.amax(0) * 1e-13 + (diagonal == 0)
    if len(a) == 1:
        return (right / diagonal).t()
    off = (a[0] * a[1]).sum(0)
    det = diagonal[0] * diagonal[1] - off.square()
    gamma = (right * diagonal.flip(0) - right.flip(0) * off) / det
    return torch.where(det > 0, gamma, 0.0).t()
