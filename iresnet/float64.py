"""The arithmetic of a proof: what rounding in float64 can hide, u = 2^-53 being what one operation can be wrong by.

A residual F(x) - z proves ||x - x*|| <= Lip(F^-1) ||F(x) - z||, where the residual is that of real numbers. So each
transform says how far its evaluation in float64 can be off, ||fl(F(x)) - F(x)|| <= relative ||x|| + absolute, with all
sizes that occur on the way (`Transform.rounding`; `branch.rounding` for a network g), and that is added to what was
computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

#: Half the distance from one to the next number of float64: what one operation can be wrong by, relatively.
UNIT = 2.0**-53

#: The relative error of an elementary function such as exp: four units in the last place, each at most two of `UNIT`.
ELEMENTARY = 8 * UNIT

#: Covers the rounding of the few operations that lead to a bound, and of the norms it is made of.
OUTWARD = 1 + 2.0**-28

#: What is assumed of functions whose arithmetic cannot be read, and for which nothing is called proven: an error in
#: float64 of this many parts of ||x|| + ||F(x)|| + ||z||.
RESIDUAL_ROUNDING = 2.0**-46


def gamma(products: int) -> float:
    """n u / (1 - n u) for n products and one more summand, added in any order: their error, relative to the sum of
    their absolute values.

    >>> gamma(100) < 1.2e-14
    True
    """
    lost = (products + 2) * UNIT
    return lost / (1 - lost) if lost < 0.5 else math.inf


@dataclass(frozen=True)
class Rounding:
    """What rounding in float64 can hide of a residual: with r, x and z the computed norms of F(x) - z, x and z,

        ||F(x) - z||  <=  scale r + relative x + code z + absolute.

    Make one with `Rounding.of`; of many transforms at once it has a column for each.
    """

    relative: float | Tensor
    absolute: float | Tensor
    code: float | Tensor
    scale: float | Tensor

    @classmethod
    def of(cls, relative: float, absolute: float, dimension: int, *, result: float = UNIT) -> Rounding:
        """Where ||fl(F(x)) - F(x)|| <= relative ||x|| + absolute + result ||F(x)||, for inputs of this dimension.

        For x + g(x), with the first two for g, the sum is one rounding of its `result`. The difference to z is another,
        and so are norms of so many squares, added in any order; squares that underflow are those of numbers below
        2^-511.
        """
        outward = 1 + (dimension + 32) * UNIT
        lost = math.sqrt(dimension) * 2.0**-508 * (1 + relative)
        return cls(outward * relative, outward * absolute + lost, 2 * outward * result, outward * (1 + 2 * result))

    @classmethod
    def assumed(cls) -> Rounding:
        """For an F that cannot be read: what evaluations lose in practice, unless large numbers cancel in them."""
        twice = 2 * RESIDUAL_ROUNDING
        return cls(twice, RESIDUAL_ROUNDING, twice, 1 + twice)

    def residual_bound(self, r: Tensor, x: Tensor, z: Tensor) -> Tensor:
        """A bound of ||F(x) - z|| from the norms that were computed, one for each sample."""
        return self.scale * r + self.relative * x + self.code * z + self.absolute
