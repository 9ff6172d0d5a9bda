"""What compiled code calls as a whole (`opaque`): log-determinants that rely on a proven bound, and inverses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from .batch import dimension
from .logdet import EVAL_SEED, EXACT_UP_TO, AdaptiveRoulette, CertifiedSeries, Estimator, RussianRoulette
from .opaque import Function, call
from .transform import Transform


def is_logdet_opaque(transform: Transform, x: Tensor, estimator: Estimator | None) -> bool:
    """Whether compiled code calls a log-determinant as a whole (`opaque`): one that relies on a proven bound."""
    if transform.training or not torch.compiler.is_compiling():
        return False
    return dimension(x) > EXACT_UP_TO if estimator is None else estimator.needs_lipschitz


def opaque_logdet(
    name: str,
    transform: Transform,
    x: Tensor,
    context: Tensor | None,
    estimator: Estimator | None,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Return z and ln det of x, as a whole, in compiled code; `name` is that of an `opaque_logdet_function`."""
    if generator is not None:
        raise ValueError(
            "generator must be None in compiled code, for a log-determinant that relies on a proven bound; got one. "
            "Set torch.manual_seed, or call it outside of the compiled code."
        )
    seed = torch.full((), EVAL_SEED) if estimator is None else torch.randint(2**63 - 1, ())
    settings = {"estimator": estimator, "differentiable": torch.is_grad_enabled()}
    z, logdet = call(name, transform, x, context, None, seed, settings)
    return z, logdet


def opaque_logdet_function(forward_and_logdet: Callable[..., tuple[Tensor, Tensor]]) -> Function:
    """Return a function for `opaque_logdet`, given (transform, x, context, estimator=, generator=) -> (z, ln det)."""

    def compute(
        transform: Transform,
        x: Tensor,
        context: Tensor | None,
        *,
        tolerance: None,
        differentiable: bool,
        **options: Any,
    ) -> Sequence[Tensor]:
        with torch.set_grad_enabled(differentiable):  # some estimators compute less without
            return forward_and_logdet(transform, x, context, **options)

    def empty(transform: Transform, x: Tensor) -> Sequence[Tensor]:
        return x.new_empty(x.shape[0], *transform.output_shape(tuple(x.shape[1:]))), x.new_empty(x.shape[0])

    return Function(compute, empty, (RussianRoulette, CertifiedSeries, AdaptiveRoulette))


def empty_inverse(transform: Transform, z: Tensor) -> Sequence[Tensor]:
    """Return an uninitialised tensor like the inverse of z; of any shape where that of z is wrong.

    The inverse itself says so then; `data_shape` does not check its argument.
    """
    shape = tuple(z.shape[1:])
    with suppress(ValueError, IndexError):
        shape = transform.data_shape(shape)
    return (z.new_empty(z.shape[0], *shape),)
