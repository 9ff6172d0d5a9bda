"""Steps of samples that do not depend on each other: Banach's, those with an affine approximation of g, and Newton's.

    Banach      x <- x + r,  r = z - x - g(x)
    affine      x <- x + P r,  P = (I + A)^-1 for the whole batch (see `affine`)
    Newton      x <- x + (I + J)^-1 r,  J per sample, at its first point, and again where steps become slow

Every sample stops on its own: once its residual meets the target, or, but for Banach's steps, once the next one is
expected to. What converges too slowly is handed back with its last two evaluations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from ..proof import sample_norms
from .affine import Affine, Linearise

#: g on part of a batch: called with x and the indices of its samples in the batch, in increasing order.
Branch: TypeAlias = Callable[[Tensor, Tensor], Tensor]

#: Samples that have converged are left out as soon as this share of a batch has.
_SHARE = 0.25

#: How often J is computed for a sample.
_LINEARISATIONS = 4


def simple_steps(
    state: SimpleState,
    g: Branch,
    limit: int,
    affine: Affine | None = None,
    patience: int | None = None,
    contraction: float = 1.0,
) -> tuple[Tensor, Tensor, list[SimpleState]]:
    """Take steps until all samples have converged or stalled; return (x, evaluations, the too slow ones, in parts).

    With `patience`, a sample is slow if it would need more than so many further steps. `contraction` is the factor by
    which a Banach step reduces a residual. With `affine`, the last evaluation, which would only confirm convergence, is
    left out where that is as good as certain.
    """
    parts, slow = list[SimpleState](), list[SimpleState]()
    for evaluations in range(1, limit + 1):
        state.step(g, affine)
        if affine is None and evaluations > 1:
            state.open = state.open & ~stalls(state.rate, contraction)
        left = int(state.open.sum())
        if patience is not None and left and 1 < evaluations < limit:
            left -= _set_aside(slow, state, state.give_up(patience, contraction))
        state.all_open = left == len(state.rows)
        if not left or evaluations == limit:
            break
        if left <= (1 - _SHARE) * len(state.rows):
            parts.append(state)
            state = state.select(state.open)
    return *_assemble([*parts, state]), slow


def _set_aside(slow: list[SimpleState], state: SimpleState, lost: Tensor) -> int:
    """Move these samples of a state to the slow ones; return how many there are."""
    if count := int(lost.sum()):
        slow.append(state.select(lost))
        state.open = state.open & ~lost
    return count


def _assemble(parts: list[SimpleState]) -> tuple[Tensor, Tensor]:
    """Return (x, evaluations) of the whole batch, which the first part is; later ones continue with some samples."""
    (first, *others) = parts
    for part in others:
        first.x[part.rows], first.count[part.rows] = part.x, part.count
    return first.x, first.count


def attainable_target(target: Tensor, x: Tensor) -> Tensor:
    """Return the target per sample, but not less than what rounding x allows.

    A residual of that size, and the rounding of the last step, meet the default tolerance for the largest x.
    """
    return torch.maximum(target, torch.finfo(x.dtype).eps * sample_norms(x))


def stalls(rate: Tensor, contraction: float) -> Tensor:
    """Return where a Banach step has not reduced the residual of a contraction in float32: only rounding is left.

    Such samples would take steps up to the limit; float64 continues with them.
    """
    if contraction >= 1 or rate.dtype == torch.float64:
        return torch.zeros_like(rate, dtype=torch.bool)
    return ~(rate < 1)


S = TypeVar("S", bound="State")


@dataclass
class State:
    """Tensors with one row per sample."""

    def select(self: S, keep: Tensor) -> S:
        """Return the samples in this mask."""
        return self.take(keep.nonzero()[:, 0])

    def take(self: S, rows: Tensor) -> S:
        """Return these samples, in this order."""
        return type(self)(*(getattr(self, field.name).index_select(0, rows) for field in fields(self)))

    @classmethod
    def join(cls: type[S], states: Sequence[S]) -> S:
        return cls(*(torch.cat([getattr(state, field.name) for state in states]) for field in fields(cls)))


@dataclass
class SimpleState(State):
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
    rate: Tensor  # ... divided by the one before; at first a large number
    open: Tensor
    count: Tensor  # evaluations

    #: Whether all samples are open.
    all_open = True

    #: With an approximation, the next residual is expected to be so many times what the last reduction would make it.
    caution = 2.0

    @classmethod
    def start(cls, z: Tensor, x: Tensor, target: Tensor) -> SimpleState:
        rows, size = torch.arange(len(z), device=z.device), torch.full_like(target, torch.finfo(target.dtype).tiny)
        open_ = torch.ones_like(rows, dtype=torch.bool)
        return cls(rows, z, target, x, x, x, x, x, size, size, open_, torch.zeros_like(rows))

    def step(self, g: Branch, affine: Affine | None) -> None:
        """Evaluate g and take a step."""
        self.advance(g(self.x, self.rows), None if affine is None else affine.step)

    def advance(self, y: Tensor, step: Callable[[Tensor, Tensor], Tensor] | None) -> None:
        """Take a step, given y = g(x); `step` takes it from x with the residual, and without it is Banach's."""
        after = self.z - y
        if step is None:
            f = after - self.x
        else:
            f = after.sub_(self.x)
            after = step(self.x, f)
        if not self.all_open:
            after = torch.where(self.open.view(-1, *[1] * (y.dim() - 1)), after, self.x)
        self.earlier, self.f_earlier, self.before, self.f, self.x = self.before, self.f, self.x, f, after
        size = sample_norms(f)
        self.size, self.rate, self.count = size, size / self.size, self.count + self.open
        # This is the residual of the point before the step, which has converged; the step makes it no worse. With an
        # approximation, the residual after the step is expected to shrink once more.
        if step is None:
            converged = size <= attainable_target(self.target, after)
        else:
            converged = size * (self.caution * self.rate).clamp(max=1) <= self.target
        self.open = self.open & ~converged

    def lags(self, patience: int) -> Tensor:
        """Return where the last reduction of the residual, repeated so many times, would not reach the target."""
        return self.open & ~(self.size * self.rate**patience <= self.target)  # NaN lags too

    def give_up(self, patience: int, contraction: float) -> Tensor:
        """Return which samples are left to another method."""
        return self.lags(patience)


@dataclass
class NewtonState(SimpleState):
    """The same with a matrix P = (I + J)^-1 per sample."""

    inverse: Tensor  # P
    stale: Tensor  # whether P is computed at the next point
    uses: Tensor  # how often it was

    #: The steps after one with a new J reduce the residual less than that one.
    caution = 8.0

    @classmethod
    def begin(cls, z: Tensor, x: Tensor, target: Tensor) -> NewtonState:
        inverse = torch.empty(*x.shape, x.shape[1], dtype=x.dtype, device=x.device)
        stale = torch.ones(len(x), dtype=torch.bool, device=x.device)
        begun = vars(SimpleState.start(z, x, target))
        return cls(**begun, inverse=inverse, stale=stale, uses=torch.zeros_like(begun["count"]))

    def step(self, g: Branch, affine: Affine | None) -> None:
        assert affine is not None
        assert affine.linearise is not None
        y = self._linearise(g, affine.linearise) if bool(self.stale.any()) else g(self.x, self.rows)
        self.advance(y, lambda x, r: torch.baddbmm(x[..., None], self.inverse, r[..., None])[..., 0])

    def _linearise(self, g: Branch, linearise: Linearise) -> Tensor:
        """Return g(x), and compute P where it is stale."""
        if bool(self.stale.all()):
            y, self.inverse = linearise(self.x)
        else:
            y, kept = torch.empty_like(self.x), ~self.stale
            y[self.stale], self.inverse[self.stale] = linearise(self.x[self.stale])
            y[kept] = g(self.x[kept], self.rows[kept])
        self.uses, self.stale = self.uses + self.stale, torch.zeros_like(self.stale)
        return y

    def give_up(self, patience: int, contraction: float) -> Tensor:
        """Compute P again where steps with it reduced the residual by what a Banach step does; leave the others."""
        lagging = self.lags(patience)
        self.stale = lagging & (self.rate <= contraction) & (self.uses < _LINEARISATIONS)
        return lagging & ~self.stale
