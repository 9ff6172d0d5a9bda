"""A flow as a `torch.distributions.Distribution`."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.distributions import constraints

from .batch import Shape, check_batch
from .logdet import Estimator
from .transform import Transform, check_context


def is_single(context: Tensor | None) -> bool:
    """Whether this is one context without a batch dimension; of integers, such as classes, it is a batch."""
    return isinstance(context, Tensor) and context.is_floating_point() and context.dim() == 1


def check_contexts(transform: Transform, context: Tensor) -> None:
    """Refuse a context that is not a batch of vectors, or of integers (such as classes), one or more per sample."""
    check_context(transform, context)
    if isinstance(context, Tensor) and not (context.is_floating_point() or context.is_complex()):
        context = context[..., None].double()
    check_batch(context, "context")


def real_values(shape: Shape) -> Any:
    """Return the constraint of values of this shape that may be any real numbers."""
    return constraints.independent(constraints.real, len(shape))  # type: ignore[no-untyped-call]


def leading_shape(name: str, shape: Shape, event: Shape, batch: Shape, remedy: str = "") -> torch.Size:
    """Return the leading dimensions of values of this shape, broadcast with the batch of contexts."""
    at = len(shape) - len(event)
    try:
        if at >= 0 and tuple(shape[at:]) == tuple(event):
            return cast(torch.Size, torch.broadcast_shapes(shape[:at], batch))  # type: ignore[no-untyped-call]
    except RuntimeError:  # torch's own message does not name the shapes
        pass
    sizes, contexts = (", ".join(map(str, each)) for each in (event, batch))
    where = f", where ... is broadcast with the {contexts} contexts" if batch else ""
    raise ValueError(f"{name} must have shape (..., {sizes}){where}; got {tuple(shape)}.{remedy}")


class FlowDistribution(torch.distributions.Distribution):
    """A flow, given contexts if it takes any, as a torch distribution: x is broadcast with the batch of contexts."""

    arg_constraints: ClassVar[dict[str, Any]] = {}
    has_rsample = True

    def __init__(self, flow: Any, context: Tensor | None) -> None:
        if context is not None:
            check_contexts(flow.transform, context[None] if is_single(context) else context)
        self.flow, self.context = flow, context
        batch = torch.Size(() if context is None or is_single(context) else (len(context),))
        super().__init__(batch, torch.Size(flow.event_shape or flow.base.shape), validate_args=False)

    @property
    def support(self) -> Any:
        return real_values(self.event_shape)

    def expand(self, batch_shape: Any, _instance: Any = None) -> FlowDistribution:
        expanded = self._get_checked_instance(FlowDistribution, _instance)  # type: ignore[no-untyped-call]
        batch = torch.Size(batch_shape)
        expanded.flow, expanded.context = self.flow, self._expand_context(batch)
        torch.distributions.Distribution.__init__(expanded, batch, self.event_shape, validate_args=False)
        return cast(FlowDistribution, expanded)

    def log_prob(
        self, value: Tensor, *, estimator: Estimator | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        lead = leading_shape("x", value.shape, self.event_shape, self.batch_shape, self._remedy)
        x = value.expand(*lead, *self.event_shape).reshape(-1, *self.event_shape)
        context = self._expand_context(lead)
        c = None if context is None else context.flatten(0, len(lead) - 1) if lead else context[None]
        return cast(Tensor, self.flow(x, c, estimator=estimator, generator=generator)).reshape(lead)

    def _expand_context(self, batch: torch.Size) -> Tensor | None:
        own = () if self.context is None else self.context.shape[len(self.batch_shape) :]
        return None if self.context is None else self.context.expand(*batch, *own)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        return self._unflatten(self.flow.sample(self._codes(sample_shape), self._contexts), sample_shape)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        x, _ = self.flow.rsample_and_log_prob(self._codes(sample_shape), self._contexts)
        return self._unflatten(x, sample_shape)

    @property
    def _remedy(self) -> str:
        return "" if self.flow.event_shape else " (If codes and data differ in shape, build it with event_shape=.)"

    def _codes(self, sample_shape: Any) -> tuple[int, ...]:
        """The shape to draw beside the contexts; an expanded distribution without contexts draws all its batch."""
        return (*sample_shape, *(self.batch_shape if self.context is None else ()))

    @property
    def _contexts(self) -> Tensor | None:
        """The contexts in one batch, as the flow takes them."""
        if self.context is None:
            return None
        return self.context.flatten(0, len(self.batch_shape) - 1) if self.batch_shape else self.context[None]

    def _unflatten(self, x: Tensor, sample_shape: Any) -> Tensor:
        drawn = len(self._codes(sample_shape)) + (self.context is not None)
        return x.reshape(*sample_shape, *self.batch_shape, *x.shape[drawn:])
