"""What is reported of an inverse: bounds from the residuals of its parts, and the residual of the code.

Bounds are those of `proof`, for all parts and samples at once. Where the code residual F(x) - z is evaluated, that
proves the blocks of a chain as well. The states F_1(x), F_2(F_1(x)), ... that x leads to are solutions of every block
for the next state, with no error but rounding; only the last block, whose code is given, has a residual. So one
evaluation of every g in float64 gives both, and the solves on the way to x need no proof.
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
from ..transform import Move, Transform, through
from ..transforms.elementary import InjectivePad
from .precisions import Branch
from .refinement import Schedule


@dataclass
class Part:
    """One transform of a path; `branch` is the g of a residual block, None for a closed form.

    `goal` is the error that is asked for, infinite for a closed form. `rounding` says what float64 can hide of its
    residual. `formula` bounds the error of a formula that is known to be this exact, so that no residual is needed; 0
    elsewhere. `unmixing` is W^-1 of an invertible convolution, made once: products with it are few kernels, and what it
    rounds shows in the residual like anything else.
    """

    transform: Transform
    expansion: float  # Lip(F^-1)
    rounding: Rounding
    goal: float = math.inf
    lipschitz: float = 0.0
    proven: bool = True
    branch: Branch | None = None
    schedule: Schedule = field(default_factory=Schedule)
    formula: float = 0.0
    unmixing: Tensor | None = None

    def inverse(self, z: Tensor) -> Tensor:
        """The x of a closed form."""
        if self.unmixing is None:
            return to_channels_last(self.transform.inverse(z))
        columns = z.reshape(len(z), len(self.unmixing), -1)
        return to_channels_last((self.unmixing @ columns).view(z.shape))

    def reference(self, x: Tensor) -> Tensor:
        """F(x) in float64."""
        return to_channels_last(self.transform.reference(x)) if self.branch is None else x + self.branch.exact(x)


#: A path from code to data.
Route = Sequence[Part | Move]


class Verifier:
    """The bounds of a path's parts, as kernels only; `relative`: goals are for codes with a norm of one.

    `share` is the part of its goal that a bound may reach.
    """

    def __init__(self, route: Route, device: torch.device, *, relative: bool, share: float = 1.0) -> None:
        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

        parts, self.relative = [p for p in route if isinstance(p, Part)], relative
        self.goals = share * column([p.goal for p in parts])
        self.formula = column([p.formula for p in parts])
        self.rounding = Rounding(*map(column, zip(*(astuple(p.rounding) for p in parts), strict=True)))
        self.factor = column([0.0 if isinstance(p.transform, InjectivePad) else p.expansion for p in parts])
        steps = [s.expansion if isinstance(s, Part) else SetAside(s.aside) for s in reversed(route)]
        self.carried = growth_factors(steps, device).flip(0)

    def __call__(self, residuals: Tensor, z: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(converged, largest bound, composed bound) from norms: rows are parts, last to first, columns samples."""
        bounds = error_bound(residuals, x, z, rounding=self.rounding, inverse_lipschitz=self.factor)
        bounds = torch.where(self.formula > 0, self.formula, bounds)
        goals = self.goals
        if self.relative:  # and no less than what float64 can show, as in `fixed_point.solve`
            least = attainable_tolerance(
                torch.zeros_like(x), x, z, rounding=self.rounding, inverse_lipschitz=self.factor
            )
            goals = torch.maximum(goals * z.clamp_min(1), least)
        return meets_tolerance(bounds, goals).all(0), bounds.amax(0), compose_bounds(bounds, self.carried)


def evaluated(route: Route, x: Tensor, z: Tensor) -> Tensor:
    """||F(x) - z||, everything in float64."""
    return sample_norms(through(route[::-1], x, lambda part, x: part.reference(to_channels_last(x))) - z)


def led_to(parts: Sequence[Part], x: Tensor, z: Tensor, codes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """(residuals, norms of codes, norms of solutions; code residual) of the states of a chain that x leads to.

    `codes` are those that the parts were given on the way to x, last to first: what comes after the last block, in
    closed form, is proven by itself.
    """
    last = next(i for i, part in enumerate(parts) if part.branch is not None)
    none, rows = torch.zeros_like(sample_norms(x)), list[tuple[Tensor, ...]]()
    size = sample_norms(x)
    for part in reversed(parts[last + 1 :]):
        x, before = part.reference(x), size
        size = sample_norms(x)
        rows.append((none, size, before))
    x = parts[last].reference(x)
    rows.append((sample_norms(codes[last] - x), sample_norms(codes[last]), size))
    for i in reversed(range(last)):
        x, own = parts[i].reference(x), sample_norms(codes[i] - parts[i].reference(codes[i + 1]))
        rows.append((own, sample_norms(codes[i]), sample_norms(codes[i + 1])))
    return *(torch.stack(column[::-1]) for column in zip(*rows, strict=True)), sample_norms(x - z)
