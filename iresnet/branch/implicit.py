"""The gradient of the inverse of F(x) = x + g(x), by the implicit function theorem.

From x + g(x) = z follows dx = (I + J)^-1 (dz - dg). So z - g(x), which equals x, has the right gradient up to the
factor (I + J)^-1. Backward multiplies by its transpose: it solves w + J' w = v with the solver of the inverse. No
iteration is unrolled.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ..fixed_point import Solver, iteration_limit
from ..logdet import Jacobian, attach_gradient, refuse_second_derivative
from ..precision import full_precision
from ..proof import sample_norms


def attach_implicit_gradient(x: Tensor, step: Tensor, jacobian: Jacobian, lipschitz: float, solver: Solver) -> Tensor:
    """Return the solution x with its gradient, where `step` is z - g(x) with a graph, in the dtype of g."""
    corrected = _Adjoint.apply(step, jacobian, lipschitz, solver)  # type: ignore[no-untyped-call]
    return attach_gradient(x, cast(Tensor, corrected).to(x.dtype))


class _Adjoint(torch.autograd.Function):
    """The identity, whose backward solves w + J' w = v."""

    @staticmethod
    def forward(ctx: Any, step: Tensor, jacobian: Any, lipschitz: float, solver: Solver) -> Tensor:
        ctx.jacobian, ctx.lipschitz, ctx.solver = jacobian, lipschitz, solver
        return step.clone()

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()

        def transpose(w: Tensor, rows: Tensor) -> Tensor:
            if len(rows) == len(v):
                return cast(Tensor, ctx.jacobian(w))
            padded = torch.zeros_like(v).index_copy(0, rows, w)
            return cast(Tensor, ctx.jacobian(padded)[rows])

        scale, unit = _normalise(v)
        relative = (1 - ctx.lipschitz) * (1e-12 if v.dtype == torch.float64 else 1e-6)
        relative = max(relative, 4 * torch.finfo(v.dtype).eps)
        limit = iteration_limit(ctx.lipschitz, 1.0, relative)
        with torch.no_grad(), full_precision(v):
            w, _ = ctx.solver.run(transpose, unit, unit, relative * sample_norms(unit), ctx.lipschitz, limit)
        return w * scale, None, None, None


def _normalise(v: Tensor) -> tuple[Tensor, Tensor]:
    """Return (scale, v / scale): powers of two per sample, so that no norm under- or overflows."""
    largest = v.detach().abs().flatten(1).amax(1).double()
    exponent = torch.frexp(largest.clamp_min(torch.finfo(v.dtype).tiny))[1] - 1
    scale = torch.ldexp(torch.ones_like(largest), exponent).where(largest.isfinite(), 1.0)
    scale = scale.to(v.dtype).view(-1, *[1] * (v.dim() - 1))
    return scale, v / scale
