"""How far J d, computed in a working precision, can lie from g(x + d) - g(x): what a proof by a product has to add.

    ||g(x + d) - g(x) - fl(J d)||  <=  relative ||d|| + floor + curvature / 2 ||d||^2 + tilt e ||d||

J is taken at x, its slopes from float64, where no state is off by more than e (`lipschitz.rounding`). With v = d before
the first layer, m the product of the Lipschitz constants L so far and V the rounded weight W, a layer and an activation
add at most

    layer        || |V - W| || + gamma_n || |V| || + u L           gamma_n = n a / (1 - n a), n products in a sum
    activation   SLOPE u + u, and kappa m^2 ||d||^2 / 2 + kappa m e ||d||           kappa = Lip(phi')

relative to ||v||, and what was there before is carried on by L. The norm of a matrix of absolute values is at most
sqrt(largest column sum x largest row sum). u is the unit of the precision and a that of the sums: 2^-24 in float32, and
2^-22 for half precision, whose products are exact and are summed in single precision by hardware that does not specify
its rounding (truncation would be 2^-23). gamma_n holds for sums in any order; for fast algorithms such as Winograd's it
does not, so convolutions must be matrix products here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..float64 import UNIT, Rounding
from ..lipschitz.activations import LEAST_THRESHOLD, beta_of
from ..lipschitz.program import Program, Step, apply
from ..lipschitz.rounding import Size
from ..spectral import absolute_norm

#: Roundings of a slope, each of at most one unit, as no slope is larger than one; and the unit of sums by precision.
SLOPE = 4
SUMS = {torch.float16: 2.0**-22, torch.bfloat16: 2.0**-22, torch.float32: 2.0**-24}


@dataclass(frozen=True)
class ProductRounding:
    """||g(x + d) - g(x) - fl(J d)|| <= relative ||d|| + floor + curvature / 2 ||d||^2 + tilt e ||d||.

    `floor` is what underflow loses, in the scale in which J d is computed. e = `state`, linear in ||x||, and `residual`
    are what float64 loses of the states and of the residual at x.
    """

    relative: float
    floor: float
    curvature: float
    tilt: float
    state: Size
    residual: Rounding

    def allowance(self, d: Tensor, scale: Tensor, r: Tensor, x: Tensor, z: Tensor) -> Tensor:
        """The bound for z - (x + d) - g(x + d) = r - d - J d, with norms of r, x, z and d; d was computed divided by
        `scale`. Sums of r, x and d are rounded once or twice each."""
        off = self.tilt * (self.state.slope * x + self.state.fixed)
        product = (self.relative + off) * d + self.floor * scale + 0.5 * self.curvature * d.square()
        return product + self.residual.residual(r, x, z) - r + 8 * UNIT * (r + x + d)


def rounding(
    program: Program,
    exact: list[Tensor],
    working: list[Tensor],
    constants: list[float],
    x: Tensor,
    states: list[Size],
) -> ProductRounding:
    """The constants of a branch with these weights and Lipschitz constants of its steps, for inputs like x.

    `states` are the errors of all states in float64, that of g(x) last.
    """
    u, smallest = torch.finfo(working[0].dtype).eps / 2, torch.finfo(working[0].dtype).tiny
    error = floor = curvature = tilt = 0.0
    m, first, one = 1.0, 0, x[:1].double()
    for step, lipschitz in zip(program, constants, strict=True):
        own, rounded = (values[first : first + step.tensors] for values in (exact, working))
        one, first = apply(step, one, own), first + step.tensors
        if step.kind in ("linear", "conv"):
            added, kappa = _layer(step, own[0], rounded[0], lipschitz, u), 0.0
        else:
            added, kappa = SLOPE * u + u * (1 + SLOPE * u), bend(step, own)
        error = (lipschitz + added) * error + added * m
        # Nothing smaller than the smallest normal number is counted on, in the result or in a product of float32.
        floor = (lipschitz + added) * floor + (1 + 2.0**-20) * smallest * math.sqrt(one.numel())
        curvature = lipschitz * curvature + kappa * m**2
        tilt = lipschitz * tilt + kappa * m
        m *= lipschitz
    worst = Size(max(s.slope for s in states), max(s.fixed for s in states))
    residual = Rounding.of(states[-1].slope, states[-1].fixed, x[0].numel())
    return ProductRounding(error, floor, curvature, tilt, worst, residual)


def _layer(step: Step, exact: Tensor, working: Tensor, lipschitz: float, u: float) -> float:
    sums = exact[0].numel() * SUMS[working.dtype]
    if sums > 0.5:
        return math.inf
    groups = step.geometry.groups if step.geometry is not None else 1
    error = absolute_norm(working.double() - exact, groups)
    error += sums / (1 - sums) * absolute_norm(working.double(), groups)
    return error + u * (lipschitz + error)


def bend(step: Step, values: list[Tensor]) -> float:
    """Lip(phi') of an activation; infinite where the slope jumps."""
    match step.kind:
        case "identity":
            return 0.0
        case "elu" if step.constant == 1:
            return 1.0
        case "tanh":
            return 4 / (3 * math.sqrt(3))
        case "sine":
            return abs(step.constant)
        case "lipswish":
            return float(beta_of(values[0].double()).max()) / 2.2
        case "softplus" if step.threshold >= LEAST_THRESHOLD:
            return abs(step.constant) / 4
        case _:
            return math.inf
