"""The reported bounds of an accelerated inverse: from the residuals of its parts, and the residual of the code.

The bounds are those of `proof`, for all parts and samples at once. If the code residual F(x) - z is evaluated, that
evaluation can prove the blocks of a chain as well (the "forward" proof): each of the states F_1(x), F_2(F_1(x)), ...
solves its block for the next state, with no error but rounding; only the last block, whose code is given, has a
residual. So one evaluation of every g in float64 gives both, and the solves of the single blocks need no proof.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

import torch
from torch import Tensor

from ..branch import to_channels_last
from ..float64 import Rounding
from ..proof import (
    SetAside,
    attainable_tolerance,
    compose_bounds,
    error_bound,
    growth_factors,
    meets_tolerance,
    sample_norms,
)
from ..transform import StackOperation, Transform, run_forward
from ..transforms.elementary import InjectivePad
from .precisions import MixedPrecisionBranch
from .refinement import Schedule


@dataclass
class PreparedPart:
    """One transform of a route; `branch` is the g of a residual block, None for a closed form.

    `goal` is the requested error bound, infinite for a closed form. `rounding` is what float64 can hide of the
    residual. `formula_error`, if not 0, bounds the error of an inverse formula, so that no residual is needed.
    `inverse_weight` is W^-1 of an invertible convolution, computed once: multiplying by it takes few kernels, and its
    rounding shows in the residual like any other error.
    """

    transform: Transform
    inverse_lipschitz: float  # Lip(F^-1)
    rounding: Rounding
    goal: float = math.inf
    lipschitz: float = 0.0
    proven: bool = True
    branch: MixedPrecisionBranch | None = None
    schedule: Schedule = field(default_factory=Schedule)
    formula_error: float = 0.0
    inverse_weight: Tensor | None = None

    def inverse(self, z: Tensor) -> Tensor:
        """Return the x of a closed form."""
        if self.inverse_weight is None:
            return to_channels_last(self.transform.inverse(z))
        columns = z.reshape(len(z), len(self.inverse_weight), -1)
        return to_channels_last((self.inverse_weight @ columns).view(z.shape))

    def reference(self, x: Tensor) -> Tensor:
        """Return F(x) in float64."""
        return to_channels_last(self.transform.reference(x)) if self.branch is None else x + self.branch.exact(x)


#: The steps from code to data.
Route = Sequence[PreparedPart | StackOperation]


class Verifier:
    """Computes the bounds of a route's parts without reading values; `relative`: goals are for codes of norm one.

    `share` is the share of its goal that a bound may reach.
    """

    def __init__(self, route: Route, device: torch.device, *, relative: bool, share: float = 1.0) -> None:
        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

        parts, self.relative = [p for p in route if isinstance(p, PreparedPart)], relative
        self.goals = share * column([p.goal for p in parts])
        self.formula_error = column([p.formula_error for p in parts])
        self.rounding = Rounding(*map(column, zip(*(astuple(p.rounding) for p in parts), strict=True)))
        self.factor = column([0.0 if isinstance(p.transform, InjectivePad) else p.inverse_lipschitz for p in parts])
        steps = [s.inverse_lipschitz if isinstance(s, PreparedPart) else SetAside(s.pushed) for s in reversed(route)]
        self.carried = growth_factors(steps, device).flip(0)

    def __call__(self, residuals: Tensor, z: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (converged, largest bound, composed bound) from norms of shape (parts, samples), last part first."""
        bounds = error_bound(residuals, x, z, rounding=self.rounding, inverse_lipschitz=self.factor)
        bounds = torch.where(self.formula_error > 0, self.formula_error, bounds)
        goals = self.goals
        if self.relative:  # and no smaller than float64 can prove, as in `fixed_point.solve`
            least = attainable_tolerance(
                torch.zeros_like(x), x, z, rounding=self.rounding, inverse_lipschitz=self.factor
            )
            goals = torch.maximum(goals * z.clamp_min(1), least)
        return meets_tolerance(bounds, goals).all(0), bounds.amax(0), compose_bounds(bounds, self.carried)


def code_residual(route: Route, x: Tensor, z: Tensor) -> Tensor:
    """Return ||F(x) - z||, computed in float64."""
    return sample_norms(run_forward(route[::-1], x, lambda part, x: part.reference(to_channels_last(x))) - z)


def forward_residuals(
    parts: Sequence[PreparedPart], x: Tensor, z: Tensor, codes: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Evaluate a chain at x: return residuals, norms of codes and norms of solutions per part, and the code residual.

    `codes` are the codes that the parts were solved for, last part first. The closed forms after the last block are
    proven by their own residuals.
    """
    last = next(i for i, part in enumerate(parts) if part.branch is not None)
    zeros, per_part = torch.zeros_like(sample_norms(x)), list[tuple[Tensor, ...]]()
    size = sample_norms(x)
    for part in reversed(parts[last + 1 :]):
        x, before = part.reference(x), size
        size = sample_norms(x)
        per_part.append((zeros, size, before))
    x = parts[last].reference(x)
    per_part.append((sample_norms(codes[last] - x), sample_norms(codes[last]), size))
    for i in reversed(range(last)):
        x, own = parts[i].reference(x), sample_norms(codes[i] - parts[i].reference(codes[i + 1]))
        per_part.append((own, sample_norms(codes[i]), sample_norms(codes[i + 1])))
    return *(torch.stack(column[::-1]) for column in zip(*per_part, strict=True)), sample_norms(x - z)
