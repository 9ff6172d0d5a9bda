"""Lipschitz-constrained layers and what is proven of them.

In reading order: `activations` (slopes on record), `rules` (how a norm is taken), `constraint` (Eq. 2 as a
parametrization, its refresh), `layers` (what users constrain), `bound` (the constant of a network from its parts),
`program` (g as data),
`jacobian` (v -> J' v).
"""

from .activations import LipSwish, MaxMin, Sine, check_contractive, lipschitz_constant
from .bound import Bound, Conditioned, Part, bound, leaves, nominal, plain, tighten_
from .constraint import SpectralCap, cap_of, frozen, is_frozen, refresh_, release_, together, unsettled
from .jacobian import linearise
from .layers import LipschitzConv2d, LipschitzLinear, constrain_
from .program import Program
from .rules import GramIteration, NormRule, PowerIteration

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
    "Program",
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
    "together",
    "unsettled",
]
