"""The interface of all transforms: invertible maps between data x and codes z with a known log-determinant.

The change of variables (Eq. 3 of the paper) needs three things of a map F: its value z = F(x), the natural logarithm of
|det dF/dx|, and its inverse. `Transform` is that interface; `chain` composes transforms. `forward` always maps data to
codes; there is no flag that reverses a transform.

To write a new transform, derive from `Transform` and implement `forward`, `forward_and_logdet`, `inverse` and
`stretch`. Also implement `output_shape` and `data_shape` if the shape changes, and `rounding` if large numbers cancel
in the formula; state in `buffer_rules` what the values of buffers must be.
Set `takes_context = True` if it takes a context. Deriving from `transforms.ClosedForm` is shorter for a map with a
formula in both directions, and from `chain.Composition` for one made of other transforms. Add it to `tests/zoo.py`,
and all tests of the interface run on it.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from .batch import Shape, as_plain, check_is_batch, in_float64
from .fixed_point import ChainSolution, Solution, Solver
from .float64 import Rounding
from .logdet import Estimator
from .opaque import keep_track, outside_graph
from .progress import part
from .proof import LEAST, error_bound, meets_tolerance, nan_to_infinity, sample_norms
from .trust import NoBoundKnown, unwrap, why_modified, why_untrusted

Self = TypeVar("Self", bound="Transform")

#: The name of a buffer, what its values must be ("increase"), and whether they are that.
BufferRule: TypeAlias = tuple[str, str, Callable[[Tensor], bool]]


@dataclass(frozen=True)
class Stretch:
    """Bounds of a transform F: Lip(F) and Lip(F^-1) (Lemma 2), and the range of ln det (Lemma 7).

    `logdet` is None for a map between spaces of different dimension, which has no determinant. `proven` is False if the
    user asserted a constant instead of having it computed, or if the map is not one that `trust` knows.
    """

    forward: float
    inverse: float
    logdet: tuple[float, float] | None
    proven: bool = True

    def __post_init__(self) -> None:
        # No bijection has a constant of zero: it has underflowed, and later factors may be large.
        object.__setattr__(self, "forward", self.forward or LEAST)
        object.__setattr__(self, "inverse", self.inverse or LEAST)

    def then(self, other: Stretch) -> Stretch:
        """Return the bounds of this map followed by another."""
        pair = None
        if self.logdet is not None and other.logdet is not None:
            pair = (self.logdet[0] + other.logdet[0], self.logdet[1] + other.logdet[1])
        return Stretch(self.forward * other.forward, self.inverse * other.inverse, pair, self.proven and other.proven)


ISOMETRY = Stretch(forward=1.0, inverse=1.0, logdet=(0.0, 0.0))

#: The bounds of a map of which nothing is known.
UNKNOWN = Stretch(math.inf, math.inf, (-math.inf, math.inf), proven=False)


def stretch_of(transform: Transform, input_shape: Shape | None = None) -> Stretch:
    """Return `transform.stretch`, marked as not proven if the transform is not one that `trust` knows."""
    stretch = transform.stretch(input_shape)
    return replace(stretch, proven=False) if stretch.proven and why_untrusted(transform) else stretch


def why_unproven(transform: Transform) -> str:
    """Return why nothing is proven of a transform, its parts aside: its class or its values; empty if it is known."""
    return why_untrusted(transform) or type(transform).why_unknown(transform)


def check_unmodified(transform: Transform) -> None:
    """Refuse to invert a transform with hooks or replaced methods: its own inverse may not undo what they do."""
    if (reason := why_modified(transform)) is not None:
        raise NoBoundKnown(f"no inverse is known: {type(transform).__name__} {reason}")


class Transform(nn.Module, ABC):
    """An invertible map from data to codes with its log-determinant. Shapes are (batch, ...); `context` is optional."""

    #: What a part of this transform is called in the message of a failed inverse.
    part_kind = "transform"

    #: What the values of buffers must be: with others this is not the bijection whose bounds `stretch` states.
    buffer_rules: ClassVar[tuple[BufferRule, ...]] = ()

    def __new__(cls: type[Self], *args: Any, **kwargs: Any) -> Self:  # also called for copies and when unpickling
        transform = super().__new__(cls)
        keep_track(transform)
        return transform

    @abstractmethod
    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the code z of x."""

    @abstractmethod
    def forward_and_logdet(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        estimator: Estimator | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the code z of x and ln |det dz/dx| (natural logarithm, shape (batch,))."""

    @abstractmethod
    def inverse(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Tensor:
        """Return the x with code z, differentiable in z and in the parameters. Raises if the error is not proven."""

    @abstractmethod
    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        """Return bounds on Lip(F), Lip(F^-1) and ln det for inputs of this shape (without the batch)."""

    #: Whether the bounds of `stretch` hold for a part of the inputs only, those of `has_bound_at`.
    bound_is_limited: ClassVar[bool] = False

    def has_bound_at(self, x: Tensor) -> Tensor:
        """Whether each sample of x is one of the inputs that the bounds of `stretch` are about; they are convex."""
        return torch.ones(len(x), dtype=torch.bool, device=x.device)

    def why_unknown(self) -> str:
        """Return why this may be no bijection with the bounds of its class; empty if it is one.

        Buffers hold other values than their constructor allows after a load, an assignment, or an average of models.
        """
        for name, rule, holds in type(self).buffer_rules:
            if not holds(getattr(self, name)):
                return (
                    f"{name} of {type(self).__name__} must {rule}. Restore it from a checkpoint; an average of models "
                    "must copy buffers, as AveragedModel does with use_buffers=False."
                )
        return ""

    def why_changing(self) -> str:
        """Return why this may be another map at the next call, such as code of a user's own; empty if it is not."""
        return ""

    def output_shape(self, input_shape: Shape) -> Shape:
        """Return the shape of z, without the batch, for an x of `input_shape`."""
        return input_shape

    def data_shape(self, code_shape: Shape) -> Shape:
        """Return the shape of x, without the batch, for a z of `code_shape`. It undoes `output_shape`."""
        for _, member, _ in reversed(self.parts()):
            code_shape = member.data_shape(code_shape)
        return code_shape

    def parts(self, input_shape: Shape | None = None) -> list[tuple[str, Transform, Shape | None]]:
        """List the parts of this transform, in order: (name, transform, input shape). Empty if it has none."""
        return []

    def steps(self) -> list[Step]:
        """List the steps from data to code: the parts and what happens between them; [self] if it has no parts."""
        return [self]

    @property
    def takes_context(self) -> bool:
        """Whether the map, or any of its parts, depends on a context."""
        return any(part.takes_context for _, part, _ in self.parts())

    def reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the code of x in float64 with the stored weights. Inverses are verified against it."""
        # A closed form of this library computes in the precision of x. A user's transform may compute in that of its
        # weights, so a copy of it is converted.
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
        """Invert and report the error instead of raising; no gradient.

        The error of a closed form is verified like any other (`verify`).
        """
        if torch.compiler.is_compiling():
            return outside_graph(Transform.solve, self, z, context, tolerance=tolerance, solver=solver)
        z, context = as_plain(z), as_plain(context)
        with torch.no_grad():
            x = self.inverse(z, context, tolerance=tolerance, solver=solver)
            if x.untyped_storage().data_ptr() == z.untyped_storage().data_ptr():  # so that no change of z changes it
                x = x.clone()
            bound, proven, reason = type(self).verify(self, x, z, context)
        converged = meets_tolerance(bound, torch.full_like(bound, math.inf if tolerance is None else tolerance))
        return Solution(x, torch.zeros_like(bound).long(), bound, converged, proven=proven, reason=reason)

    def verify(self, x: Tensor, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, bool, str]:
        """Return the error bound of an inverse x of z, per sample, whether it is proven, and if not the reason."""
        bound = nan_to_infinity(type(self).inverse_error_bound(self, x, z, context))
        if type(self).why_unknown(self):
            bound = torch.full_like(bound, math.inf)
        return bound, stretch_of(self, tuple(x.shape[1:])).proven, why_unproven(self)

    def inverse_error_bound(self, x: Tensor, z: Tensor, context: Tensor | None = None) -> Tensor:
        """Bound ||x - x*|| per sample, where x* has the code z.

        The bound is Lip(F^-1) ||F(x) - z||, the residual in float64 plus its `rounding`.
        """
        shape, codes = tuple(x.shape[1:]), z.double()
        sizes = (sample_norms(t) for t in (self.reference(x, context) - codes, x.double(), codes))
        return error_bound(*sizes, rounding=self.rounding(shape), inverse_lipschitz=stretch_of(self, shape).inverse)

    def rounding(self, input_shape: Shape) -> Rounding:
        """Bound the rounding error of `reference` for inputs of this shape (without the batch).

        The default, a few parts in 10^14 of x and z, suits formulas in which no larger numbers cancel. A transform
        with such numbers in its formula states its own bound with `Rounding.of`.
        """
        return Rounding.assumed()


# ---------------------------------------------------------------------------------------------- transforms with parts


class StackOperation(ABC):
    """A step between the parts of a transform that splits or joins tensors, without error or stretch.

    The state between two parts is a stack of tensors. Each part acts on the tensor on top.
    """

    @property
    @abstractmethod
    def pushed(self) -> int:
        """How many tensors this adds to the stack, from data to code; negative if it removes some."""

    @abstractmethod
    def forward(self, stack: list[Tensor]) -> None:
        """Change the stack in place, from data to code."""

    @abstractmethod
    def inverse(self, stack: list[Tensor]) -> None:
        """Change the stack in place, from code to data."""


Step: TypeAlias = Transform | StackOperation
T = TypeVar("T")


def run_forward(steps: Iterable[T | StackOperation], x: Tensor, act: Callable[[T, Tensor], Tensor]) -> Tensor:
    """Take x through all steps, from data to code; `act` applies one part to a tensor."""
    stack = [x]
    for step in steps:
        if isinstance(step, StackOperation):
            step.forward(stack)
        else:
            stack.append(act(step, stack.pop()))
    (z,) = stack
    return z


def run_inverse(steps: Sequence[T | StackOperation], z: Tensor, act: Callable[[T, Tensor], Tensor]) -> Tensor:
    """Take z back through all steps, from code to data, the last first; `act` inverts one part."""
    stack = [z]
    for i, step in enumerate(reversed(steps)):
        with part(i, len(steps)):
            if isinstance(step, StackOperation):
                step.inverse(stack)
            else:
                stack.append(act(step, stack.pop()))
    (x,) = stack
    return x


def flat_steps(transform: Transform) -> Iterator[Step]:
    """Yield the steps of a transform with all nested parts expanded; a part that `trust` does not know is one step."""
    for step in type(transform).steps(transform):
        if step is transform or isinstance(step, StackOperation) or why_untrusted(step):
            yield step
        else:
            yield from flat_steps(step)


# ---------------------------------------------------------------------------------------------- shapes and checks


def check_transform(transform: object, where: str, *, may_be_compiled: bool = False) -> None:
    """Refuse what is not a `Transform`, such as a network; `where` names it in the message."""
    if isinstance(transform, Transform):
        return
    is_wrapped = isinstance(transform, nn.Module) and isinstance(unwrap(transform), Transform)
    if is_wrapped and may_be_compiled and hasattr(transform, "forward_and_logdet"):  # DDP, for one, hides it
        return
    remedy = "Wrap a network g as ResidualBlock(g), and use Chain in place of nn.Sequential."
    raise ValueError(
        f"{where} must be a Transform; got {type(transform).__name__}. "
        f"{'Wrap or compile the whole model, not a part of it.' if is_wrapped else remedy}"
    )


def check_eval(model: nn.Module, what: str) -> None:
    """Refuse a model of which any part is in training mode: its layers may be random, and its norms are estimates."""
    if any(m.training for m in model.modules()):
        raise ValueError(f"{what} needs a model in eval mode; call model.eval() first.")


def check_context(model: Transform, context: Tensor | None) -> None:
    """Refuse a context for a model that takes none and would ignore it."""
    if context is None:
        return
    check_is_batch(context)
    if model.takes_context:
        return
    got = f"shape {tuple(context.shape)}" if isinstance(context, Tensor) else type(context).__name__
    raise ValueError(
        f"context must be None for a {type(model).__name__} that takes no context; got {got}. Leave it out, or build "
        "the model from conditional parts, such as contractive_mlp(2, context=3). (A Transform of your own that takes "
        "a context must set takes_context = True.)"
    )


def context_for(part: Transform, context: Tensor | None) -> Tensor | None:
    """Return the context for a part of a model: None if the part takes none."""
    return context if context is not None and part.takes_context else None
