"""Lipschitz-constrained layers and what is proven of them.

In reading order: `activations` (slopes on record), `rules` (how a norm is taken), `scaling` (many layers at once),
`constraint` (Eq. 2 as a parametrization, its refresh), `potential` (a g that never stretches), `dense` (layers that
keep their input), `bound` (the constant of a network from its parts), `rounding` (its error in float64), `layers` (what
users constrain), `program` (g as data), `trace` (tr J in closed form), `jacobian` (v -> J' v).
"""

from .activations import LipSwish, MaxMin, Sine, check_contractive, is_monotone, lipschitz_constant
from .bound import (
    Bound,
    Conditioned,
    Part,
    asked,
    bound,
    copied,
    leaves,
    nominal,
    plain,
    primitives,
    released,
    tighten_,
)
from .constraint import SpectralCap, cap_of, held, refresh_, release_, together, unsettled
from .dense import Concatenated
from .jacobian import linearise
from .layers import LipschitzConv2d, LipschitzLinear, constrain_
from .potential import Potential
from .program import Program
from .rounding import rounding
from .rules import GramIteration, NormRule, PowerIteration

__all__ = [
    "Bound",
    "Concatenated",
    "Conditioned",
    "GramIteration",
    "LipSwish",
    "LipschitzConv2d",
    "LipschitzLinear",
    "MaxMin",
    "NormRule",
    "Part",
    "Potential",
    "PowerIteration",
    "Program",
    "Sine",
    "SpectralCap",
    "asked",
    "bound",
    "cap_of",
    "check_contractive",
    "constrain_",
    "copied",
    "held",
    "is_monotone",
    "leaves",
    "linearise",
    "lipschitz_constant",
    "nominal",
    "plain",
    "primitives",
    "refresh_",
    "release_",
    "released",
    "rounding",
    "tighten_",
    "together",
    "unsettled",
]
