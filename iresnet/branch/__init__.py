"""The branch g of a residual block, parsed once into a program from which everything else is computed.

Reading order: `program` (a graph of steps, and its value), `derivative` (J' v), `trace` (tr J in closed form),
`constant` (a proven bound on Lip(g)), `rounding` (the rounding error of g in float64), `convolution` (convolution
algorithms), `prepared` (g in one precision, and J v), `snapshot` (a private copy of g, which proofs are about).
"""

from .constant import Bound, LayerBound, lipschitz_bound, nominal_constant, requested_bound, tighten_layers_
from .derivative import linearise
from .prepared import PreparedBranch, to_channels_last
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
