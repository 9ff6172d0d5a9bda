"""Transforms: maps between data x and codes z that know their log-determinant and their inverse.

The change of variables (Eq. 3 of the paper) needs three things of a map F: its value z = F(x), the natural logarithm of
|det dF/dx|, and its inverse. `Transform` is that interface; `chain` composes. `forward` always goes from data to code;
there is no flag that turns a transform around.

How to write one: derive from `Transform`, implement `forward`, `forward_and_logdet`, `inverse` and `stretch`, and
`output_shape` where the shape changes, and `rounding` where large numbers cancel in its formula; one that takes a
context says so by `takes_context = True`. `transforms.ClosedForm` asks for less of one that is a formula each way, and
`chain.Composition` of one that is made of others. A line in `tests/zoo.py` then earns it every law.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Reversible
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from .compiler import can_read_values
from .fixed_point import Solution, Solver, describe_proof
from .float64 import Rounding
from .logdet import Estimator
from .proof import error_bound, sample_norms
from .trust import NoBoundKnown, why_modified, why_untrusted

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Stretch:
    """How far a transform can stretch: Lip(F) and Lip(F^-1) (Lemma 2) and the range of ln det (Lemma 7).

    `logdet` is None for a map between spaces of different dimension, which has no determinant. `proven` is False where
    a constant was asserted by the user instead of computed, or where the map is not known (`trust`).
    """

    forward: float
    inverse: float
    logdet: tuple[float, float] | None
    proven: bool = True

    def then(self, other: Stretch) -> Stretch:
        """The stretch of this map followed by another."""
        pair = None
        if self.logdet is not None and other.logdet is not None:
            pair = (self.logdet[0] + other.logdet[0], self.logdet[1] + other.logdet[1])
        return Stretch(self.forward * other.forward, self.inverse * other.inverse, pair, self.proven and other.proven)


ISOMETRY = Stretch(forward=1.0, inverse=1.0, logdet=(0.0, 0.0))


def stretch_of(transform: Transform, input_shape: Shape | None = None) -> Stretch:
    """What a transform says of itself, proven only where it is known to be what it says (`trust`)."""
    found = transform.stretch(input_shape)
    return replace(found, proven=False) if found.proven and why_untrusted(transform) else found


def refuse_changed(transform: Transform) -> None:
    """Refuse to invert a transform with hooks or replaced methods: what undoes its formula may not undo it."""
    if (reason := why_modified(transform)) is not None:
        raise NoBoundKnown(f"no inverse is known: {type(transform).__name__} {reason}")


class Transform(nn.Module, ABC):
    """A map from data to code with log-determinant and inverse. Shapes are (batch, ...); `context` is optional."""

    #: What one of those it is made of is called where an inverse fails.
    member = "transform"

    @abstractmethod
    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """The code z of x."""

    @abstractmethod
    def forward_and_logdet(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        estimator: Estimator | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The code z of x and ln |det dz/dx|, natural logarithm, shape (batch,)."""

    @abstractmethod
    def inverse(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Tensor:
        """The x whose code is z, differentiable in z and in the parameters. Raises where no proof is reached."""

    @abstractmethod
    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        """Bounds on Lip(F), Lip(F^-1) and ln det for inputs of this shape (without the batch)."""

    def output_shape(self, input_shape: Shape) -> Shape:
        """The shape of z, without the batch, for an x of `input_shape`."""
        return input_shape

    def parts(self, input_shape: Shape | None = None) -> list[tuple[str, Transform, Shape | None]]:
        """The transforms this one is made of, in order, with the input shape of each; none for an elementary one."""
        return []

    def steps(self) -> list[Step]:
        """What a state goes through in turn, from data to code; itself alone where it is not made of others."""
        return [self]

    @property
    def takes_context(self) -> bool:
        """Whether a context changes the map; where there are parts, whether it changes any of them."""
        return any(part.takes_context for _, part, _ in self.parts())

    def reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """The code of x in float64 with the stored weights: what an inverse is judged against."""
        # A closed form of this library computes in the precision of x; a user's may have weights of its own.
        exact = copy.deepcopy(self).double() if why_untrusted(self) else self
        return cast(Tensor, exact(x.double(), in_float64(context)))

    def solve(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Solution | ChainSolution:
        """The inverse with a report instead of an exception; no gradient.

        A closed form is judged like any other: `distance` is Lip(F^-1) ||F(x) - z||, the residual in float64 with what
        `rounding` says of it.
        """
        with torch.no_grad():
            x = self.inverse(z, context, tolerance=tolerance, solver=solver)
            bound = type(self).distance(self, x, z, context)
            known = stretch_of(self, tuple(x.shape[1:]))
        none = torch.zeros_like(bound).long()
        return Solution(x, none, bound, torch.isfinite(bound), proven=known.proven, reason=why_untrusted(self))

    def distance(self, x: Tensor, z: Tensor, context: Tensor | None = None) -> Tensor:
        """A bound on ||x - x*|| for the x* whose code is z, per sample."""
        shape, codes = tuple(x.shape[1:]), z.double()
        sizes = (sample_norms(t) for t in (self.reference(x, context) - codes, x.double(), codes))
        return error_bound(*sizes, rounding=self.rounding(shape), inverse_lipschitz=stretch_of(self, shape).inverse)

    def rounding(self, input_shape: Shape) -> Rounding:
        """How far `reference` can be off, for inputs of this shape (without the batch).

        What is assumed here, a few parts in 10^14 of x and z, does for formulas in which no larger numbers cancel. A
        transform whose formula has such numbers states a bound of its own: `Rounding.of`.
        """
        return Rounding.assumed()


@dataclass(frozen=True)
class ChainSolution:
    """What inverting a chain achieved, per sample: three numbers that say different things and are never merged.

    `largest_block_bound` proves every block's own solve. `code_residual` is ||F(x) - z|| in float64. The measured error
    needs the true x: `measured_error`. `composed_bound` carries the block bounds through all later inverses; it grows
    like the product of Lip(F_t^-1) and says little for deep chains. `diverged`: in some block, of which nothing is
    proven, the steps grew or numbers overflowed. `reason`: why a part is not known, where nothing is proven for that.
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
        """The only end-to-end proof there is: the composed bound."""
        return self.composed_bound

    def measured_error(self, truth: Tensor) -> Tensor:
        """||x - truth|| per sample."""
        return sample_norms(self.x.double() - truth.double())

    def __str__(self) -> str:
        composed = float(self.composed_bound.max())
        scale = float(self.x.double().flatten(1).norm(dim=1).max())
        remark = "" if composed < 0.1 * max(scale, 1e-12) else " (not informative)"
        return (
            f"{int(self.converged.sum())} of {len(self.converged)} samples {describe_proof(self)}, block by block; "
            f"largest block bound {float(self.largest_block_bound.max()):.1e}, "
            f"code residual {float(self.code_residual.max()):.1e}, composed bound {composed:.1e}{remark}"
        )


# ---------------------------------------------------------------------------------------------- what is made of others


class Move(ABC):
    """What happens between the parts of a transform: numbers are moved about, without error or stretch.

    The state on the way is a stack of tensors, and a part acts on the top one.
    """

    @property
    @abstractmethod
    def aside(self) -> int:
        """How many tensors are laid aside; taken up again where it is negative."""

    @abstractmethod
    def forward(self, stack: list[Tensor]) -> None:
        """From data to code."""

    @abstractmethod
    def inverse(self, stack: list[Tensor]) -> None:
        """From code to data."""


Step: TypeAlias = Transform | Move
T = TypeVar("T")


def through(steps: Iterable[T | Move], x: Tensor, act: Callable[[T, Tensor], Tensor]) -> Tensor:
    """From data to code, where `act` takes a tensor through one part."""
    stack = [x]
    for step in steps:
        if isinstance(step, Move):
            step.forward(stack)
        else:
            stack.append(act(step, stack.pop()))
    (z,) = stack
    return z


def back(steps: Reversible[T | Move], z: Tensor, act: Callable[[T, Tensor], Tensor]) -> Tensor:
    """From code to data, where `act` takes a tensor back through one part, the last first."""
    stack = [z]
    for step in reversed(steps):
        if isinstance(step, Move):
            step.inverse(stack)
        else:
            stack.append(act(step, stack.pop()))
    (x,) = stack
    return x


def path(transform: Transform) -> Iterator[Step]:
    """The steps of a transform and of those it is made of, however they are nested; one that is not known is one."""
    for step in type(transform).steps(transform):
        if step is transform or isinstance(step, Move) or why_untrusted(step):
            yield step
        else:
            yield from path(step)


# ---------------------------------------------------------------------------------------------- sizes and checks


def check_batch(x: Tensor, name: str = "x", shape: Shape | None = None) -> None:
    """Refuse what cannot be a batch of numbers: wrong type, no batch dimension, empty, wrong shape."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be a floating-point tensor; got {got}. Convert it with {name}.float() first.")
    if x.dim() < 2:
        raise ValueError(
            f"{name} must have a batch dimension, shape (batch, ...); got {tuple(x.shape)}. "
            f"Use {name}[None] for one sample."
        )
    if x.numel() == 0:
        raise ValueError(f"{name} must hold at least one sample; got an empty batch of shape {tuple(x.shape)}.")
    if shape is not None and tuple(x.shape[1:]) != shape:
        raise ValueError(f"{name} must have shape (batch, {', '.join(map(str, shape))}); got {tuple(x.shape)}.")


def check_context(model: Transform, context: Tensor | None) -> None:
    """Refuse a context that nothing takes: it would be ignored."""
    if context is None or model.takes_context:
        return
    got = f"shape {tuple(context.shape)}" if isinstance(context, Tensor) else type(context).__name__
    raise ValueError(
        f"a context is for a model that takes one; got one of {got} for a {type(model).__name__} that takes none. "
        "Leave it out, or make conditional parts, such as contractive_mlp(2, context=3). (A Transform of your own that "
        "takes one says so: takes_context = True.)"
    )


def given_to(part: Transform, context: Tensor | None) -> Tensor | None:
    """What a part of a model gets of its context: nothing where it takes none."""
    return context if context is not None and part.takes_context else None


def in_float64(context: Tensor | None) -> Tensor | None:
    """A context for a network in float64; integers, which may be indices, stay as they are."""
    return context.double() if context is not None and context.is_floating_point() else context


def check_finite(x: Tensor, name: str) -> None:
    """Refuse NaN and infinity, naming the first sample that has them."""
    if not can_read_values(x):
        return
    bad = ~torch.isfinite(x).flatten(1).all(dim=1)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise ValueError(
            f"{name} must be finite; sample {first} of {len(x)} holds NaN or infinity. Remove it or repair the data."
        )


def dimension(x: Tensor) -> int:
    """The number of elements of one sample."""
    return math.prod(x.shape[1:])
