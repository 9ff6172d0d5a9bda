"""Lipschitz-constrained layers and what is proven of them.

In reading order: `activations` (slopes on record), `constraint` (Eq. 2 as a parametrization, its refresh), `bound` (the
constant of a network from its parts), `jacobian` (v -> J' v).
"""

from .activations import LipSwish, MaxMin, Sine, check_contractive, lipschitz_constant
from .bound import Bound, Conditioned, Part, bound, leaves, nominal, plain, tighten_
from .constraint import (
    GramIteration,
    LipschitzConv2d,
    LipschitzLinear,
    NormRule,
    PowerIteration,
    SpectralCap,
    cap_of,
    constrain_,
    frozen,
    is_frozen,
    refresh_,
    release_,
)
from .jacobian import linearise

__all__ = [
    "Bound",
    "Conditioned",
    "GramIteration",
    "LipSwish",
    "LipschitzConv2d",
    "LipschitzLinear",
    "MaxMin",
    "NormRule",
    "Part",
    "PowerIteration",
    "Sine",
    "SpectralCap",
    "bound",
    "cap_of",
    "check_contractive",
    "constrain_",
    "frozen",
    "is_frozen",
    "leaves",
    "linearise",
    "lipschitz_constant",
    "nominal",
    "plain",
    "refresh_",
    "release_",
    "tighten_",
]
