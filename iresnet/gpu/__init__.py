"""How training steps are made fast: compiled blocks, low precision where it is harmless, CUDA graphs.

In reading order: `unit` (an ActNorm and a block as one function), `kernels` (the same by kernels of its own); `maps`
and `neighbours` (the linear maps of g), `dual` (values and tangents), `density` (a unit with its log-determinant);
`wrapper` (a transform that computes another one's code), `plan` (one for a chain: which blocks make units) and
`couplings` (one for those of other flows), `view` (a model with its chains wrapped); `engine` (what is asked for and
what can be had), `step` (the whole of it as one CUDA graph). What a step computes is decided by the training loop.
"""

from .engine import Acceleration, Engine
from .plan import Plan, planned
from .step import FastStep, StepResult

__all__ = ["Acceleration", "Engine", "FastStep", "Plan", "StepResult", "planned"]
