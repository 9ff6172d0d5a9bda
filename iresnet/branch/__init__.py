"""The branch g of a residual block, read once into a program; all that is done with a g is done with its program.

In reading order: `program` (a graph of steps; its value), `derivative` (J v and J' v), `trace` (tr J in closed form),
`constant` (Lip(g), proven), `rounding` (its error in float64), `convolution` (ways to convolve), `form` (g in one
precision), `snapshot` (g as it was at one moment).
"""

from .constant import Bound, Part, bound, nominal, requested_bound, tighten_
from .derivative import linearise
from .form import Form, laid_out
from .program import Program, Reading, Step, StepFunction, read, reading, run
from .snapshot import Live, Snapshot, check_shape, copied, plain, released

__all__ = [
    "Bound",
    "Form",
    "Live",
    "Part",
    "Program",
    "Reading",
    "Snapshot",
    "Step",
    "StepFunction",
    "requested_bound",
    "bound",
    "check_shape",
    "copied",
    "laid_out",
    "linearise",
    "nominal",
    "plain",
    "read",
    "reading",
    "released",
    "run",
    "tighten_",
]
