"""The branch g of a residual block, parsed once into a program from which everything else is computed.

Reading order: `program` (a graph of steps, and its value), `derivative` (J' v), `trace` (tr J in closed form),
`products`, `explicit` and `factors` (g, J v, ln det and their gradients on vectors, without a graph), `constant` (a
proven bound on Lip(g)), `rounding` (the rounding error of g in float64), `convolution` (convolution algorithms),
`prepared` (g in one precision, and J v), `snapshot` (a private copy of g, which proofs are about), `implicit` (the
gradient of the inverse), `input_spec` (the input shape that g expects).
"""

from .constant import Bound, LayerBound, lipschitz_bound, requested_bound, requested_constant, tighten_layers_
from .derivative import linearise
from .implicit import attach_implicit_gradient
from .input_spec import InputSpec
from .prepared import PreparedBranch, to_channels_last
from .program import ParsedBranch, Program, Step, StepFunction, parse, run_program, try_parse
from .snapshot import (
    Snapshot,
    UncopiedBranch,
    check_same_shape,
    copy_branch,
    remove_constraints_,
    take_snapshot,
    unconstrained_copy,
)

__all__ = [
    "Bound",
    "InputSpec",
    "LayerBound",
    "ParsedBranch",
    "PreparedBranch",
    "Program",
    "Snapshot",
    "Step",
    "StepFunction",
    "UncopiedBranch",
    "attach_implicit_gradient",
    "check_same_shape",
    "copy_branch",
    "linearise",
    "lipschitz_bound",
    "requested_constant",
    "parse",
    "remove_constraints_",
    "requested_bound",
    "run_program",
    "take_snapshot",
    "tighten_layers_",
    "to_channels_last",
    "try_parse",
    "unconstrained_copy",
]
