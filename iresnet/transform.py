"""Transforms: maps between data x and codes z that know their log-determinant and their inverse.

The change of variables (Eq. 3 of the paper) needs three things of a map F: its value z = F(x), the natural logarithm of
|det dF/dx|, and its inverse. `Transform` is that interface and `Chain` composes. `forward` always goes from data to
code; there is no flag that turns a transform around.

How to write one: derive from `Transform`, implement `forward`, `forward_and_logdet`, `inverse` and `stretch`, and
`output_shape` where the shape changes, and `rounding` where large numbers cancel in its formula; one that takes a
context says so by `takes_context = True`. `closed_form.ClosedForm` asks for less of one that is a formula each way, and
`Composition` of one that is made of others. A line in `tests/zoo.py` then earns it every law.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from .compiler import may_read
from .fixed_point import ConvergenceError, Solution, Solver, verdict
from .float64 import UNIT, Rounding
from .logdet import Estimator
from .trust import NoBoundKnown, changed, doubt

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
    return replace(found, proven=False) if found.proven and doubt(transform) else found


def refuse_changed(transform: Transform) -> None:
    """Refuse to invert a transform with hooks or replaced methods: what undoes its formula may not undo it."""
    if (reason := changed(transform)) is not None:
        raise NoBoundKnown(f"no inverse is known: {type(transform).__name__} {reason}")


class Transform(nn.Module, ABC):
    """A map from data to code with log-determinant and inverse. Shapes are (batch, ...); `context` is optional."""

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

    @property
    def takes_context(self) -> bool:
        """Whether a context changes the map; where there are parts, whether it changes any of them."""
        return any(part.takes_context for _, part, _ in self.parts())

    def reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """The code of x in float64 with the stored weights: what an inverse is judged against."""
        # A closed form of this library computes in the precision of x; a user's may have weights of its own.
        exact = copy.deepcopy(self).double() if doubt(self) else self
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
            bound = _infinite_for_nan(self.distance(x, z, context))
            known = stretch_of(self, tuple(x.shape[1:]))
        none = torch.zeros_like(bound).long()
        return Solution(x, none, bound, torch.isfinite(bound), proven=known.proven, reason=doubt(self))

    def distance(self, x: Tensor, z: Tensor, context: Tensor | None = None) -> Tensor:
        """A bound on ||x - x*|| for the x* whose code is z, per sample."""
        shape, codes = tuple(x.shape[1:]), z.double()
        residual = _norm(self.reference(x, context) - codes)
        hidden = self.rounding(shape).residual(residual, _norm(x.double()), _norm(codes))
        return stretch_of(self, shape).inverse * hidden

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
        return _norm(self.x.double() - truth.double())

    def __str__(self) -> str:
        composed = float(self.composed_bound.max())
        scale = float(self.x.double().flatten(1).norm(dim=1).max())
        remark = "" if composed < 0.1 * max(scale, 1e-12) else " (not informative)"
        return (
            f"{int(self.converged.sum())} of {len(self.converged)} samples {verdict(self)}, block by block; "
            f"largest block bound {float(self.largest_block_bound.max()):.1e}, "
            f"code residual {float(self.code_residual.max()):.1e}, composed bound {composed:.1e}{remark}"
        )


class Composition(Transform):
    """Transforms that follow each other. `through` and `back` say how; everything else is written here, once."""

    #: What one of them is called where an inverse fails.
    member = "transform"

    @property
    @abstractmethod
    def members(self) -> nn.ModuleList:
        """The transforms, in order."""

    @abstractmethod
    def through(self, x: Tensor, step: Callable[[Transform, Tensor], Tensor]) -> Tensor:
        """The code of x, where `step` takes a tensor through one of them."""

    @abstractmethod
    def back(self, z: Tensor, step: Callable[[Transform, Tensor], Tensor]) -> Tensor:
        """The x of a code, where `step` takes a tensor back through one of them, the last first."""

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Transform]:
        return iter(cast("list[Transform]", self.members))

    def __getitem__(self, index: int) -> Transform:
        return cast(Transform, self.members[index])

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        check_context(self, context)
        return self.through(x, lambda t, y: t(y, given_to(t, context)))

    def forward_and_logdet(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        estimator: Estimator | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        check_context(self, context)
        total = torch.zeros(len(x), dtype=x.dtype, device=x.device)

        def step(t: Transform, y: Tensor) -> Tensor:
            nonlocal total
            y, logdet = t.forward_and_logdet(y, given_to(t, context), estimator=estimator, generator=generator)
            total = total + logdet
            return y

        return self.through(x, step), total

    def inverse(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Tensor:
        refuse_changed(self)
        check_context(self, context)
        left = len(self)

        def step(t: Transform, y: Tensor) -> Tensor:
            nonlocal left
            left -= 1
            try:
                return t.inverse(y, given_to(t, context), tolerance=tolerance, solver=solver)
            except ConvergenceError as error:
                raise error.at(f"{self.member} {left} of {len(self)}") from None

        return self.back(z, step)

    def reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.through(x.double(), lambda t, y: t.reference(y, given_to(t, context)))

    def solve(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> ChainSolution:
        """The inverse with a report (no gradient): block bounds, code residual and composed bound.

        A sample that leaves all numbers in one of the transforms, which only one without a proof can let happen, is NaN
        in the end; the transforms before it solve 0 in its place.
        """
        check_context(self, context)
        check_finite(z, "z")
        largest = composed = torch.zeros(len(z), dtype=torch.float64, device=z.device)
        iterations = torch.zeros(len(z), dtype=torch.long, device=z.device)
        converged, reason = torch.ones(len(z), dtype=torch.bool, device=z.device), doubt(self)
        diverged = lost = ~converged
        proven = not reason

        def step(t: Transform, y: Tensor) -> Tensor:
            nonlocal largest, composed, iterations, converged, diverged, lost, proven, reason
            s = t.solve(y, given_to(t, context), tolerance=tolerance, solver=solver)
            # An error e in the code becomes at most Lip(F^-1) e in x, on top of this solve's own error. A solve that
            # returns the same numbers for every input has no error to amplify: 0 * inf is 0 here.
            known = stretch_of(t, tuple(s.x.shape[1:]))
            expansion = known.inverse * (1 + 16 * UNIT)  # for the rounding of these products
            composed = s.error_bound + torch.where(composed > 0, composed * expansion, composed)
            own = s.largest_block_bound if isinstance(s, ChainSolution) else s.error_bound
            largest, iterations = torch.maximum(largest, own), iterations + s.iterations
            reason = reason or s.reason or doubt(t)
            converged, proven = converged & s.converged, proven and s.proven and known.proven
            diverged = diverged if s.diverged is None else diverged | s.diverged
            gone = ~torch.isfinite(s.x).flatten(1).all(dim=1)
            lost = lost | gone
            return _filled(s.x, gone, 0.0)

        with torch.no_grad():
            x = self.back(z, step)
            residual = _infinite_for_nan(_norm(self.reference(x, context) - z.double()))
            x, converged, diverged = _filled(x, lost, math.nan), converged & ~lost, diverged | lost
            largest, residual, composed = (e.masked_fill(lost, math.inf) for e in (largest, residual, composed))
        return ChainSolution(x, iterations, converged, largest, residual, composed, diverged, proven, reason)


class Chain(Composition):
    """Transforms applied one after another: F = F_T o ... o F_1, log-determinants added.

    >>> from iresnet import ActNorm, Chain
    >>> len(Chain(ActNorm(2), ActNorm(2)))
    2
    """

    def __init__(self, *transforms: Transform) -> None:
        super().__init__()
        for t in transforms:
            if not isinstance(t, Transform):
                raise ValueError(
                    f"Chain takes Transforms; got {type(t).__name__}. Wrap a network g as ResidualBlock(g)."
                )
        self.transforms = nn.ModuleList(transforms)

    @property
    def members(self) -> nn.ModuleList:
        return self.transforms

    def through(self, x: Tensor, step: Callable[[Transform, Tensor], Tensor]) -> Tensor:
        # Not `in self`, which torch.export of torch 2.7 cannot follow.
        for t in cast("list[Transform]", self.transforms):
            x = step(t, x)
        return x

    def back(self, z: Tensor, step: Callable[[Transform, Tensor], Tensor]) -> Tensor:
        for t in reversed(list(self)):
            z = step(t, z)
        return z

    def trajectory(self, x: Tensor, steps: int = 8, context: Tensor | None = None) -> list[Tensor]:
        """The states x + tau g(x), tau in (0, 1], of every block in turn (Sec. 4.2), the input first.

        Every residual block gives `steps` states, each itself a bijective image of the input; another transform gives
        one. States may differ in shape where a transform changes it.
        """
        if steps < 1:
            raise ValueError(f"steps must be at least 1; got {steps}.")
        check_context(self, context)
        states = [x]
        for t in self:
            path, c = getattr(t, "trajectory", None), given_to(t, context)
            if path is None:
                states.append(t(states[-1], c))
            else:
                states.extend(path(states[-1], steps=steps, context=c)[1:])
        return states

    def parts(self, input_shape: Shape | None = None) -> list[tuple[str, Transform, Shape | None]]:
        listed: list[tuple[str, Transform, Shape | None]] = []
        for position, t in enumerate(cast("list[Transform]", self.transforms)):  # as in forward
            listed.append((str(position), t, input_shape))
            input_shape = None if input_shape is None else t.output_shape(input_shape)
        return listed

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        total = ISOMETRY
        for _, t, shape in self.parts(input_shape):
            total = total.then(stretch_of(t, shape))
        return total

    def output_shape(self, input_shape: Shape) -> Shape:
        for t in self:
            input_shape = t.output_shape(input_shape)
        return input_shape


def _norm(x: Tensor) -> Tensor:
    """The l2 norm of every sample."""
    return cast(Tensor, torch.linalg.vector_norm(x.flatten(1), dim=1))


def _filled(x: Tensor, rows: Tensor, value: float) -> Tensor:
    return x.masked_fill(rows.view(-1, *[1] * (x.dim() - 1)), value)


def _infinite_for_nan(error: Tensor) -> Tensor:
    """Errors of an iteration that has left all bounds are infinite."""
    return torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf)


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
    if not may_read(x):
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
