"""Which transforms an `Inverter` can invert: known residual blocks and closed forms."""

from __future__ import annotations

from torch import nn

from ..branch import try_parse
from ..residual import ResidualBlock
from ..transform import Transform, flat_steps, why_unproven
from ..transforms.elementary import ActNorm, Flatten, InjectivePad, Squeeze
from ..transforms.mixing import InvertibleConv1x1, PrincipalAxes
from ..transforms.preprocess import Logit, Standardise
from ..transforms.spline import ColumnSpline
from ..trust import why_untrusted

#: Transforms whose inverse is a formula.
CLOSED_FORMS = (
    ActNorm, Flatten, InjectivePad, InvertibleConv1x1, PrincipalAxes, Squeeze, Standardise, Logit, ColumnSpline,
)  # fmt: skip


def why_not_accelerated(transform: Transform) -> str:
    """Return why an `Inverter` cannot invert this transform; empty if it can."""
    for t in transform.modules():
        if isinstance(t, Transform) and (reason := why_untrusted(t)):
            return f"not accelerated: {reason}"
    for position, t in enumerate(t for t in flat_steps(transform) if isinstance(t, Transform)):
        where = f"not accelerated: transform {position}, {type(t).__name__},"
        if type(t) in CLOSED_FORMS:
            continue
        if type(t) is not ResidualBlock:
            return f"{where} is neither a residual block nor a closed form with a known inverse."
        if reason := _why_not_branch(t.g):
            return f"{where} {reason}."
    return ""


def why_values_unknown(transform: Transform) -> str:
    """Return why the values of buffers or settings leave nothing to prove; read once, when an inverse is prepared."""
    reasons = (why_unproven(t) for t in transform.modules() if isinstance(t, Transform))
    return next((f"not accelerated: {reason}" for reason in reasons if reason), "")


def _why_not_branch(g: nn.Module) -> str:
    """Why a branch g cannot be evaluated in several precisions, to follow the name of its block; empty if it can."""
    if (parsed := try_parse(g)) is None:
        return "has a g that is not made of known layers"
    program = parsed.program
    if program.is_conditional:
        return "has a g that takes a context"
    if not all(step.is_plain for step in program.steps):
        return "has a g with circular or asymmetric padding"
    return f"has an activation without a slope, {activation}" if (activation := program.first_without_slope) else ""
