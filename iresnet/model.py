"""Model: an invertible transform with what computes from its codes: a base, a head, or both.

`Flow`, `Classifier` and `Hybrid` derive from it. All of them encode samples, and decode codes with every solve proven.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from .batch import dimension
from .compiled import is_logdet_opaque, opaque_logdet, opaque_logdet_function
from .fixed_point import Solver
from .inverse import Decoder
from .logdet import EVAL_SEED, EXACT_UP_TO, Estimator
from .opaque import define
from .outermost import outermost_call
from .transform import Transform, check_context, check_transform


class Model(nn.Module):
    """Base class of models. `encode` maps samples to codes, and `decode` maps codes to samples."""

    transform: Transform

    def __init__(self, transform: Transform) -> None:
        super().__init__()
        check_transform(transform, "the transform", may_be_compiled=True)
        self.transform = transform
        #: Inverts codes into samples; `decoder.reason` says why the last ones were not accelerated.
        self.decoder = Decoder()

    def encode(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the code of x, which the base and the head compute from."""
        check_context(self.transform, context)
        with outermost_call(self, x):
            return cast(Tensor, self.transform(x, context))

    def decode(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Tensor:
        """Return the sample with code z, with every block's solve proven."""
        check_context(self.transform, context)
        return self.decoder(self.transform, z, context, tolerance=tolerance, solver=solver)


def code_and_logdet(
    transform: Transform,
    x: Tensor,
    context: Tensor | None,
    estimator: Estimator | None,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Return (z, ln |det dz/dx|). Without an estimator, probes in eval are drawn from a fixed seed."""
    seeded = not transform.training and estimator is None and generator is None and dimension(x) > EXACT_UP_TO
    if seeded and not torch.compiler.is_compiling():
        generator = torch.Generator(device=x.device).manual_seed(EVAL_SEED)
    if is_logdet_opaque(transform, x, estimator):
        return opaque_logdet("log-determinant", transform, x, context, estimator, generator)
    return transform.forward_and_logdet(x, context, estimator=estimator, generator=generator)


define(
    "log-determinant",
    opaque_logdet_function(lambda transform, *x, **options: transform.forward_and_logdet(*x, **options)),
)
