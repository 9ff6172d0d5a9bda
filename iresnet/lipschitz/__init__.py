"""Lipschitz-constrained layers, and the building blocks of a residual branch g (Sec. 2.1).

Reading order: `activations` (one record each), `rules` (how to compute a norm), `scaling` (many layers at once),
`group` (the norms of layers of one shape), `constraint` (Eq. 2 as a parametrization), `refresh` (when norms are
updated, and when frozen), `parametrized` (installing it on a layer), `potential` (x + g(x) never expands), `dense`
(layers that keep their input), `conditioned` (a g with a context), `order` (the layers of g in execution order),
`layers` (what users call). Proofs about g are in `iresnet.branch`.
"""

from .activations import ACTIVATIONS, LipSwish, MaxMin, Sine, check_contractive, is_monotone, lipschitz_constant
from .conditioned import Conditioned
from .constraint import SpectralCap, cap_of, defer_norms
from .dense import Concatenated
from .layers import LipschitzConv2d, LipschitzLinear, constrain_
from .order import leaves, primitives
from .parametrized import release_
from .potential import Potential
from .refresh import batched_refresh, freeze_norms, refresh_, scale_weights_in
from .rules import GramIteration, NormRule, PowerIteration

__all__ = [
    "ACTIVATIONS",
    "Concatenated",
    "Conditioned",
    "GramIteration",
    "LipSwish",
    "LipschitzConv2d",
    "LipschitzLinear",
    "MaxMin",
    "NormRule",
    "Potential",
    "PowerIteration",
    "Sine",
    "SpectralCap",
    "cap_of",
    "check_contractive",
    "constrain_",
    "freeze_norms",
    "is_monotone",
    "leaves",
    "lipschitz_constant",
    "scale_weights_in",
    "primitives",
    "refresh_",
    "release_",
    "batched_refresh",
    "defer_norms",
]
