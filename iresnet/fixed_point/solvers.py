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
from .affine import Affine

#: g on part of a batch: called with x and the indices of its samples in the batch, in increasing order.
Branch: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class Solver(ABC):
    """An iteration for x = z - g(x) that stops per sample. The caller checks the result."""

    #: The largest number of evaluations of g; None: as many as the Lipschitz constant requires.
    max_iterations: int | None

    #: Whether `run` makes use of an affine approximation of g, where there is one.
    affine: bool = False

    @abstractmethod
    def run(
        self,
        g: Branch,
        z: Tensor,
        x: Tensor,
        target: Tensor,
        contraction: float,
        limit: int,
        affine: Affine | None = None,
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
        self,
        g: Branch,
        z: Tensor,
        x: Tensor,
        target: Tensor,
        contraction: float,
        limit: int,
        affine: Affine | None = None,
    ) -> tuple[Tensor, Tensor]:
        return _simple_steps(g, z, x, target, limit)[:2]


@dataclass(frozen=True)
class Anderson(Solver):
    """Anderson acceleration with `memory` steps, per sample, with Banach steps where they suffice.

    Every sample begins with Banach steps, which need no bookkeeping. Steps are combined once the last reduction of its
    residual, repeated a few times, would not reach the target.

    A combined step must reduce the residual by at least the contraction factor; otherwise it is rejected, which costs
    one evaluation. Rejections are paid from a credit of two evaluations, plus those that accepted combinations have
    saved. So there are at most two evaluations more than the contraction factor guarantees for Banach steps.

    `affine` starts and steps with an affine approximation of g, where there is one (see `fixed_point.affine`): fewer
    evaluations on most blocks. The guarantee then counts from a start that may be a worse one than z.
    """

    memory: int = 5
    max_iterations: int | None = None
    affine: bool = True

    def __post_init__(self) -> None:
        _check_limit(self.max_iterations)
        at_least(1, memory=self.memory)

    def run(
        self,
        g: Branch,
        z: Tensor,
        x: Tensor,
        target: Tensor,
        contraction: float,
        limit: int,
        affine: Affine | None = None,
    ) -> tuple[Tensor, Tensor]:
        result, count, slow = _simple_steps(g, z, x, target, limit, affine, patience=PATIENCE)
        if not slow:
            return result, count
        begun = _SimpleState.join(slow)
        begun = begun.select(begun.rows.argsort())
        shape, rows, memory = z.shape, begun.rows, min(self.memory, z[0].numel())
        state = _AndersonState.after(begun, contraction, memory, affine)
        for _ in range(limit - int(count[rows].min())):
            r = state.z - g(state.x.reshape(-1, *shape[1:]), rows).flatten(1) - state.x
            count[rows] += 1
            state.accept(r, contraction, memory)
            # One Banach step from the best point needs no further evaluation; its residual is at most L times as large.
            result[rows] = (state.best + state.f).reshape(-1, *shape[1:])
            keep = (state.size > _attainable(state.target, state.best)) & (count[rows] < limit)
            state.propose(affine)
            if not bool(keep.all()):
                rows, state = rows[keep], state.select(keep)
            if len(rows) == 0:
                break
        return result, count


#: Up to so many further simple steps are taken where combining steps might save one or two of them.
PATIENCE = 4

#: Samples that have converged are left out as soon as this share of a batch has.
_SHARE = 0.25


def _simple_steps(
    g: Branch,
    z: Tensor,
    x: Tensor,
    target: Tensor,
    limit: int,
    affine: Affine | None = None,
    patience: int | None = None,
) -> tuple[Tensor, Tensor, list[_SimpleState]]:
    """Take Banach steps, or those of an affine approximation; return (x, evaluations, the slow samples, in parts)."""
    result, count, slow = x.clone(), torch.zeros(len(z), dtype=torch.long, device=z.device), list[_SimpleState]()
    state = _SimpleState.start(z, x, target)
    for evaluations in range(1, limit + 1):
        state.advance(g(state.x, state.rows), affine)
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
    """Return the target per sample, but not less than what rounding x allows.

    A residual of that size, and the rounding of the last step, meet the default tolerance for the largest x.
    """
    return torch.maximum(target, torch.finfo(x.dtype).eps * sample_norms(x))


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
class _SimpleState(_State):
    """The state of simple steps, one row per sample; those that are not open any more keep their x."""

    rows: Tensor  # the indices of the samples in the batch
    z: Tensor
    target: Tensor
    earlier: Tensor  # the last but one point at which g was evaluated, ...
    f_earlier: Tensor  # ... and its residual
    before: Tensor  # the last such point, ...
    f: Tensor  # ... and its residual
    x: Tensor  # the point at which g is evaluated next
    size: Tensor  # the norm of the last residual, ...
    rate: Tensor  # ... divided by the one before
    open: Tensor
    count: Tensor  # evaluations

    @classmethod
    def start(cls, z: Tensor, x: Tensor, target: Tensor) -> _SimpleState:
        rows, size = torch.arange(len(z), device=z.device), torch.full_like(target, torch.inf)
        open_ = torch.ones_like(rows, dtype=torch.bool)
        return cls(rows, z, target, x, x, x, x, x, size, size, open_, torch.zeros_like(rows))

    def advance(self, y: Tensor, affine: Affine | None) -> None:
        """Take a step, given y = g(x)."""
        after = self.z - y
        f = after - self.x
        if affine is not None:
            after = self.x + affine.correct(f)
        after = torch.where(self.open.view(-1, *[1] * (y.dim() - 1)), after, self.x)
        self.earlier, self.f_earlier, self.before, self.f, self.x = self.before, self.f, self.x, f, after
        size = sample_norms(f)
        self.size, self.rate, self.count = size, size / self.size, self.count + self.open
        # This is the residual of the point before the step, which has converged; the step makes it no worse.
        self.open = self.open & ~(size <= _attainable(self.target, after))

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
    trusted: Tensor  # whether no step with the affine approximation has been rejected yet

    @classmethod
    def after(cls, begun: _SimpleState, contraction: float, memory: int, affine: Affine | None) -> _AndersonState:
        """Return the state after the last two evaluations; the second is of a Banach step if there is no `affine`."""
        z, x, f, before, last = (t.flatten(1) for t in (begun.z, begun.earlier, begun.f_earlier, begun.before, begun.f))
        size, none = torch.full_like(begun.target, torch.inf), x.new_zeros(len(x), 0, x.shape[1])
        yes = torch.ones_like(begun.open)
        state = cls(z, x, begun.target, x, f, size, none, none, torch.full_like(size, 2.0), yes, yes)
        state.accept(f, contraction, memory)
        state.x, state.plain = before, yes if affine is None else ~yes
        state.accept(last, contraction, memory)
        state.propose(affine)
        return state

    def accept(self, r: Tensor, contraction: float, memory: int) -> None:
        """Accept x with residual r if it is a Banach step, or reduces the residual by the contraction factor."""
        norm, first = sample_norms(r), bool(torch.isinf(self.size).all())
        good = self.plain | (norm <= contraction * self.size) | (norm <= self.target)
        # A combination saves the number of Banach steps with the same reduction, minus its own evaluation.
        log_factor = math.log(min(max(contraction, 1e-3), 0.9999))
        saved = torch.where(good, (norm / self.size).clamp(1e-30, 1.0).log() / log_factor, 0.0) - 1
        self.credit = torch.where(self.plain, self.credit, self.credit + saved)
        self.trusted = self.trusted & good
        if not first:  # rejected points carry information about g as well
            self.dx = torch.cat([self.dx, (self.x - self.best)[:, None]], 1)[:, -memory:]
            self.df = torch.cat([self.df, (r - self.f)[:, None]], 1)[:, -memory:]
        self.best = torch.where(good[:, None], self.x, self.best)
        self.f = torch.where(good[:, None], r, self.f)
        self.size = torch.where(good, norm, self.size)

    def propose(self, affine: Affine | None) -> None:
        """Choose the next x: the combination of stored steps with the smallest residual, or a Banach step."""
        banach = self.best + self.f
        if self.df.shape[1] == 0:
            self.x, self.plain = banach, torch.ones_like(self.plain)
            return
        gamma = _least_squares(self.df, self.f)
        combined = banach - ((self.dx + self.df) * gamma[..., None]).sum(1)
        if affine is not None:
            step = self.f - (self.df * gamma[..., None]).sum(1)
            combined = torch.where(self.trusted[:, None], combined + affine.correct(step) - step, combined)
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
