"""Rounding errors in float64, where one operation has a relative error of at most u = 2^-53.

A residual proves ||x - x*|| <= Lip(F^-1) ||F(x) - z|| for the residual in real arithmetic. So each transform states the
error of its evaluation in float64, ||fl(F(x)) - F(x)|| <= relative ||x|| + absolute, including large intermediate
values (`Transform.rounding`; `branch.rounding` for a network g), and that is added to the computed residual.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

#: The unit roundoff of float64: the largest relative error of one operation.
UNIT = 2.0**-53

#: The relative error of an elementary function such as exp: four units in the last place, each at most two of `UNIT`.
ELEMENTARY = 8 * UNIT

#: Covers the rounding of the few operations and norms from which a bound is computed.
OUTWARD = 1 + 2.0**-28

#: The error assumed for functions that cannot be parsed, and of which nothing is called proven: this fraction of
#: ||x|| + ||F(x)|| + ||z|| in float64.
RESIDUAL_ROUNDING = 2.0**-46


def gamma(products: int) -> float:
    """Return n u / (1 - n u) for n products and one more summand in any order: the error relative to the sum of their
    absolute values.

    >>> gamma(100) < 1.2e-14
    True
    """
    lost = (products + 2) * UNIT
    return lost / (1 - lost) if lost < 0.5 else math.inf


@dataclass(frozen=True)
class Rounding:
    """A bound on the exact residual, given the computed norms r, x and z of F(x) - z, x and z:

        ||F(x) - z||  <=  scale r + relative x + code z + absolute.

    Use `Rounding.of` to make one. For many transforms at once, each field is a column with an entry per transform.
    """

    relative: float | Tensor
    absolute: float | Tensor
    code: float | Tensor
    scale: float | Tensor

    @classmethod
    def of(cls, relative: float, absolute: float | Tensor, dimension: int, *, result: float = UNIT) -> Rounding:
        """Make the bound for ||fl(F(x)) - F(x)|| <= relative ||x|| + absolute + result ||F(x)||, x of this dimension.

        For x + g(x), `relative` and `absolute` are those of g, and the sum is one rounding of its `result`. The bound
        also covers the difference to z and the norms, sums of `dimension` squares in any order; squares of numbers
        below 2^-511 underflow.
        """
        outward = 1 + (dimension + 32) * UNIT
        lost = math.sqrt(dimension) * 2.0**-508 * (1 + relative)
        return cls(outward * relative, outward * absolute + lost, 2 * outward * result, outward * (1 + 2 * result))

    @classmethod
    def assumed(cls) -> Rounding:
        """Make the bound assumed for an F that cannot be parsed: realistic unless large numbers cancel in it."""
        twice = 2 * RESIDUAL_ROUNDING
        return cls(twice, RESIDUAL_ROUNDING, twice, 1 + twice)

    def residual_bound(self, r: Tensor, x: Tensor, z: Tensor) -> Tensor:
        """Bound ||F(x) - z|| of every sample from the computed norms."""
        return self.scale * r + self.relative * x + self.code * z + self.absolute
