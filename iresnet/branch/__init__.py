"""The branch g of a residual block, read once into a program; all that is done with a g is done with its program.

In reading order: `program` (a graph of steps; its value), `derivative` (J v and J' v), `trace` (tr J in closed form),
`constant` (Lip(g), proven), `rounding` (its error in float64), `convolution` (ways to convolve), `form` (g in one
precision), `snapshot` (g as it was at one moment).
"""

from .constant import Bound, LayerBound, lipschitz_bound, nominal_constant, requested_bound, tighten_layers_
from .derivative import linearise
from .form import PreparedBranch, to_channels_last
from .program import ParsedBranch, Program, Step, StepFunction, parse, run_program, try_parse
from .snapshot import Snapshot, UncopiedBranch, check_same_shape, copy_branch, remove_constraints_, unconstrained_copy

__all__ = [
    "Bound",
    "PreparedBranch",
    "UncopiedBranch",
    "LayerBound",
    "Program",
    "ParsedBranch",
    "Snapshot",
    "Step",
    "StepFunction",
    "requested_bound",
    "lipschitz_bound",
    "check_same_shape",
    "copy_branch",
    "to_channels_last",
    "linearise",
    "nominal_constant",
    "unconstrained_copy",
    "try_parse",
    "parse",
    "remove_constraints_",
    "run_program",
    "tighten_layers_",
]
