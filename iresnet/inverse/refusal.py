"""What can be inverted in another way than its own: residual blocks and closed forms that can be read."""

from __future__ import annotations

from ..branch import try_parse
from ..residual import ResidualBlock
from ..transform import Transform, path
from ..transforms.elementary import ActNorm, Flatten, InjectivePad, Squeeze
from ..transforms.mixing import InvertibleConv1x1, PrincipalAxes
from ..transforms.preprocess import Logit, Standardise
from ..trust import why_untrusted

#: Transforms whose inverse is a formula.
CLOSED = (ActNorm, Flatten, InjectivePad, InvertibleConv1x1, PrincipalAxes, Squeeze, Standardise, Logit)


def refusal(transform: Transform) -> str:
    """Why this transform takes the ordinary way, or nothing."""
    for t in transform.modules():
        if isinstance(t, Transform) and (reason := why_untrusted(t)):
            return f"not accelerated: {reason}"
    for position, t in enumerate(t for t in path(transform) if isinstance(t, Transform)):
        where = f"not accelerated: transform {position}, {type(t).__name__},"
        if type(t) in CLOSED:
            continue
        if type(t) is not ResidualBlock:
            return f"{where} is neither a residual block nor a closed form that is known here."
        found = try_parse(t.g)
        if found is None or found.program.is_conditional or not all(step.is_plain for step in found.program.steps):
            return f"{where} has a g that cannot be read as linear layers, convolutions and activations in a row."
        if not found.program.has_slopes:
            return f"{where} has an activation without a slope, {found.program.first_without_slope}."
    return ""
