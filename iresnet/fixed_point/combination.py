"""Combinations of steps: Anderson acceleration, for samples whose simple steps are slow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..proof import sample_norms
from .affine import Affine
from .steps import Branch, SimpleState, State, attainable_target, stalls


def combine_steps(
    g: Branch,
    result: Tensor,
    count: Tensor,
    slow: Sequence[SimpleState],
    *,
    memory: int,
    contraction: float,
    limit: int,
    affine: Affine | None,
) -> tuple[Tensor, Tensor]:
    """Continue with the samples of simple steps that were slow; return (x, evaluations) of the whole batch."""
    if not slow:
        return result, count
    begun = SimpleState.join(slow)
    begun = begun.take(begun.rows.argsort())
    shape, rows, memory = result.shape, begun.rows, min(memory, result[0].numel())
    state = AndersonState.after(begun, contraction, memory, affine)
    for _ in range(limit - int(count[rows].min())):
        r = state.z - g(state.x.reshape(-1, *shape[1:]), rows).flatten(1) - state.x
        count[rows] += 1
        stalled = state.accept(r, contraction, memory)
        # One Banach step from the best point needs no further evaluation; its residual is at most L times as large.
        result[rows] = (state.best + state.f).reshape(-1, *shape[1:])
        keep = (state.size > attainable_target(state.target, state.best)) & (count[rows] < limit) & ~stalled
        state.propose(affine)
        if not bool(keep.all()):
            rows, state = rows[keep], state.select(keep)
        if len(rows) == 0:
            break
    return result, count


@dataclass
class AndersonState(State):
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
    def after(cls, begun: SimpleState, contraction: float, memory: int, affine: Affine | None) -> AndersonState:
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

    def accept(self, r: Tensor, contraction: float, memory: int) -> Tensor:
        """Accept x with residual r if it is a Banach step, or reduces the residual by the contraction factor.

        Return which samples have stalled (see `stalls`).
        """
        norm, first = sample_norms(r), bool(torch.isinf(self.size).all())
        stalled = self.plain & stalls(norm / self.size, contraction)
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
        return stalled

    def propose(self, affine: Affine | None) -> None:
        """Choose the next x: the combination of stored steps with the smallest residual, or a Banach step."""
        banach = self.best + self.f
        if self.df.shape[1] == 0:
            self.x, self.plain = banach, torch.ones_like(self.plain)
            return
        gamma = least_squares(self.df, self.f)
        combined = banach - ((self.dx + self.df) * gamma[..., None]).sum(1)
        if affine is not None:
            step = self.f - (self.df * gamma[..., None]).sum(1)
            combined = torch.where(self.trusted[:, None], combined + affine.correct(step) - step, combined)
        self.plain = (self.credit < 1) | ~torch.isfinite(combined).all(1) | (gamma == 0).all(1)
        self.x = torch.where(self.plain[:, None], banach, combined)


def least_squares(df: Tensor, f: Tensor) -> Tensor:
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
