"""A transform as a `torch.distributions.Transform`, for code that is written for those: torch's distributions, Pyro.

iresnet maps data to codes, z = F(x), and so does a `Bijector`. A `TransformedDistribution` pushes its base to the data,
which is the other direction, `.inv`:

    TransformedDistribution(base, [flow.bijector().inv])     log p(x) = log p_base(F(x)) + ln |det dF/dx|    (Eq. 3)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .batch import Shape
from .distribution import check_contexts, is_single, leading_shape, real_values
from .inverse import Decoder
from .lipschitz import freeze_norms
from .logdet import Estimator
from .model import code_and_logdet
from .outermost import outermost_call
from .spelling import quoted
from .transform import Transform, check_transform
from .transforms.first_batch import check_initialised

T = TypeVar("T")


class Bijector(torch.distributions.Transform):
    """A transform as a `torch.distributions.Transform`, from data to codes; `.inv` maps codes to data.

    `event_shape` is the shape of one sample, an integer for vectors. Values have the shape (..., *event_shape), where
    ... is broadcast with the contexts, if `given` any. Inverses are proven, and gradients reach the weights, in both
    directions. `flow.bijector()` is that of a flow. In training beyond 64 dimensions it needs an `estimator`.

    A cached pair (`with_cache`) is used only while it, the weights and the mode are unchanged, and with gradients if it
    was computed with them.

    >>> from torch.distributions import Independent, Normal, TransformedDistribution
    >>> from iresnet import ResidualBlock, contractive_mlp
    >>> bijector = Bijector(ResidualBlock(contractive_mlp(2)).eval(), event_shape=2)
    >>> base = Independent(Normal(torch.zeros(2), torch.ones(2)), 1)
    >>> law = TransformedDistribution(base, [bijector.inv])
    >>> law.log_prob(law.sample((5,))).shape
    torch.Size([5])
    """

    bijective = True

    def __init__(
        self,
        transform: Transform,
        event_shape: Shape | int,
        context: Tensor | None = None,
        *,
        estimator: Estimator | None = None,
        decoder: Decoder | None = None,
        cache_size: int = 0,
    ) -> None:
        super().__init__(cache_size)
        if callable(getattr(transform, "bijector", None)):
            name = type(transform).__name__
            raise ValueError(f"the transform must be a Transform; got {name}. Use flow.bijector() for that of a flow.")
        check_transform(transform, "the transform", may_be_compiled=True)
        if context is not None:
            check_contexts(transform, context[None] if is_single(context) else context)
        self.transform, self.context, self.estimator = transform, context, estimator
        self.event_shape: Shape = _checked_shape(event_shape)
        #: The shape of one code, without the batch.
        self.code_shape: Shape = tuple(transform.output_shape(self.event_shape))
        if (d := math.prod(self.event_shape)) != (codes := math.prod(self.code_shape)):
            raise ValueError(
                f"a bijector must keep the dimension; got {d} numbers, whose codes have {codes}. Leave padding out."
            )
        self._decoder = Decoder() if decoder is None else decoder
        self._batch = torch.Size(() if context is None or is_single(context) else (len(context),))
        self._cached_for: tuple[bool, list[Tensor], Any] | None = None

    def given(self, context: Tensor | None) -> Bijector:
        """Return the same map for another context: a batch of them, or a single one without a batch dimension."""
        return self._with(context, self._cache_size)

    def with_cache(self, cache_size: int = 1) -> Bijector:
        """Return the same map, which keeps the latest pair of a value and its image if `cache_size` is 1."""
        return self if cache_size == self._cache_size else self._with(self.context, cache_size)

    def _with(self, context: Tensor | None, cache_size: int) -> Bijector:
        options: dict[str, Any] = {"estimator": self.estimator, "decoder": self._decoder, "cache_size": cache_size}
        return Bijector(self.transform, self.event_shape, context, **options)

    # ------------------------------------------------------------------ domains and shapes

    @property
    def domain(self) -> Any:  # type: ignore[override]
        return real_values(self.event_shape)

    @property
    def codomain(self) -> Any:  # type: ignore[override]
        return real_values(self.code_shape)

    @property
    def sign(self) -> int:
        raise NotImplementedError(
            "a sign is defined for maps of single numbers; got vectors. Use log_abs_det_jacobian."
        )

    def forward_shape(self, shape: Shape) -> torch.Size:
        return torch.Size((*leading_shape("x", shape, self.event_shape, self._batch), *self.code_shape))

    def inverse_shape(self, shape: Shape) -> torch.Size:
        return torch.Size((*leading_shape("z", shape, self.code_shape, self._batch), *self.event_shape))

    # ------------------------------------------------------------------ values

    def _call(self, x: Tensor) -> Tensor:
        return self._in_one_batch(self._encode, x, "x", self.event_shape)

    def _inverse(self, y: Tensor) -> Tensor:
        return self._in_one_batch(self._decode, y, "z", self.code_shape)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ln |det dz/dx|, of the shape of the batch. In training, the norms are those of the latest value."""
        return self._in_one_batch(self._logdet, x, "x", self.event_shape)

    def _encode(self, x: Tensor, context: Tensor | None) -> Tensor:
        with outermost_call(self.transform, x):
            return cast(Tensor, self.transform(x, context))

    def _decode(self, z: Tensor, context: Tensor | None) -> Tensor:
        check_initialised(self.transform)
        with outermost_call(self.transform, z.new_zeros(1, 1)):  # the inverse checks z
            return self._decoder(self.transform, z, context)

    def _logdet(self, x: Tensor, context: Tensor | None) -> Tensor:
        estimator = self.estimator if self.transform.training else None
        with freeze_norms(self.transform):
            return code_and_logdet(self.transform, x, context, estimator, None)[1]

    def _in_one_batch(
        self, function: Callable[[Tensor, Tensor | None], Tensor], value: Tensor, name: str, event: Shape
    ) -> Tensor:
        """Apply a function of (batch, ...) and its contexts to values of any batch shape."""
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor; got {type(value).__name__}. Convert it with torch.tensor.")
        lead = leading_shape(name, value.shape, event, self._batch)
        result = function(value.expand(*lead, *event).reshape(-1, *event), self._contexts(lead))
        return result.reshape((*lead, *result.shape[1:]))

    def _contexts(self, lead: torch.Size) -> Tensor | None:
        """Return one context per sample of a batch."""
        if self.context is None:
            return None
        own = self.context.shape[len(self._batch) :]
        return self.context.expand(*lead, *own).reshape(-1, *own)

    # ------------------------------------------------------------------ the cache

    def __call__(self, x: Tensor) -> Tensor:
        return self._cached(super().__call__, x, self.event_shape, self.code_shape)

    def _inv_call(self, y: Tensor) -> Tensor:
        return self._cached(super()._inv_call, y, self.code_shape, self.event_shape)

    def _cached(self, call: Callable[[Tensor], Tensor], value: Tensor, event: Shape, image: Shape) -> Tensor:
        """Call with torch's cache, emptied if the pair is that of other weights, was changed, or lost its gradients."""
        if self._cache_size == 0:
            return call(value)
        if not self._is_current():
            self._cached_x_y = None, None
        before = self._cached_x_y
        result = call(value)
        if value.shape[: value.dim() - len(event)] != result.shape[: result.dim() - len(image)]:
            self._cached_x_y = None, None  # broadcast with the contexts: it is not the inverse of the result
        elif self._cached_x_y is not before:
            kept = [t.detach().clone() for t in self._tensors()]
            self._cached_for = torch.is_grad_enabled(), kept, self._state()
        return result

    def _is_current(self) -> bool:
        if self._cached_for is None:
            return False
        has_graph, kept, state = self._cached_for
        if has_graph < torch.is_grad_enabled() or state != self._state():
            return False
        tensors = self._tensors()
        return len(kept) == len(tensors) and all(map(_is_same, kept, tensors))

    def _state(self) -> Any:
        """Return the modes, how often the cached pair was changed in place, and what has a gradient."""
        pair = [t for t in cast("tuple[Tensor | None, ...]", self._cached_x_y) if t is not None]
        versions = [None if t.is_inference() else t._version for t in pair]
        gradients = [t.requires_grad for t in (*pair, *self._tensors())]
        return [m.training for m in self.transform.modules()], versions, gradients

    def _tensors(self) -> list[Tensor]:
        own = [] if self.context is None else [self.context]
        return [*self.transform.parameters(), *self.transform.buffers(), *own]

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "_cached_x_y": (None, None), "_cached_for": None}

    def __repr__(self) -> str:
        context = "" if self.context is None else f", context={tuple(self.context.shape)}"
        return f"Bijector({type(self.transform).__name__}, event_shape={self.event_shape}{context})"


def _checked_shape(shape: Shape | int) -> Shape:
    sizes = (shape,) if isinstance(shape, Integral) else shape
    if not isinstance(sizes, tuple | list) or not sizes or not all(isinstance(n, Integral) and n > 0 for n in sizes):
        raise ValueError(
            f"event_shape must be the shape of one sample, at least one positive integer; got {quoted(shape)}. "
            "Use 2 for points in the plane, (3, 32, 32) for images."
        )
    return tuple(int(n) for n in sizes)


def _is_same(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b)
