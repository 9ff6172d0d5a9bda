"""Iterations for x = z - g(x): Algorithm 1 (Banach), Anderson acceleration, Newton. They iterate and prove nothing.

Every sample stops on its own, so its result does not depend on the rest of the batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from ..spelling import at_least
from .affine import Affine
from .combination import combine_steps
from .steps import Branch, NewtonState, SimpleState, attainable_target, simple_steps

#: Up to so many further simple steps are taken where combining steps, or computing J, might save one or two of them.
PATIENCE = 4

#: The same for steps with an affine approximation, of which two take less time than one combination.
AFFINE_PATIENCE = 8


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

        `contraction` bounds ||g(a) - g(b)|| / ||a - b||; it may be one or more if no contraction is known. With
        `affine` the last residual may be expected, not evaluated: `solve` continues where that was wrong.
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
        return simple_steps(SimpleState.start(z, x, target), g, limit, contraction=contraction)[:2]


@dataclass(frozen=True)
class Anderson(Solver):
    """Anderson acceleration with `memory` steps, per sample, with Banach steps where they suffice.

    Every sample begins with single steps, which need no bookkeeping. Steps are combined once the last reduction of its
    residual, repeated a few times, would not reach the target.

    A combined step must reduce the residual by at least the contraction factor; otherwise it is rejected, which costs
    one evaluation. Rejections are paid from a credit of two evaluations, plus those that accepted combinations have
    saved. So there are at most two evaluations more than the contraction factor guarantees for Banach steps.

    `affine` starts and steps with an affine approximation of g, where there is one (see `fixed_point.affine`): fewer
    evaluations on most blocks, and none that would only confirm what the last two predict. The guarantee then counts
    from a start that may be a worse one than z.
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
        patience = PATIENCE if affine is None else AFFINE_PATIENCE
        start = SimpleState.start(z, x, target if affine is None else attainable_target(target, x))
        begun = simple_steps(start, g, limit, affine, patience, contraction)
        return combine_steps(g, *begun, memory=self.memory, contraction=contraction, limit=limit, affine=affine)


@dataclass(frozen=True)
class Newton(Solver):
    """Newton's method, x <- x + (I + J)^-1 (z - x - g(x)), per sample, for vectors of few dimensions on a CPU.

    J is computed at the first point, and again where steps with it become slow. A sample whose residual shrinks by less
    than a Banach step guarantees continues with the steps of `Anderson`; so do all where g has no known Jacobian. An
    evaluation of g together with its Jacobian counts as one.
    """

    affine = True
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
        other = Anderson()
        if affine is None or affine.linearise is None:
            return other.run(g, z, x, target, contraction, limit, affine)
        begun = simple_steps(
            NewtonState.begin(z, x, attainable_target(target, x)), g, limit, affine, PATIENCE, contraction
        )
        return combine_steps(g, *begun, memory=other.memory, contraction=contraction, limit=limit, affine=affine)


def default_solver(affine: Affine | None) -> Solver:
    """Return the solver for a g with this approximation, where none was given."""
    return Newton() if affine is not None and affine.needs_jacobians else Anderson()
