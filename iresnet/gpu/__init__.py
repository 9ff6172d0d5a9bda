"""Fast training steps: compiled blocks, low precision where it is harmless, CUDA graphs.

In reading order: `unit` (an ActNorm and a block as one function), `kernels` (the same with custom Triton kernels);
`maps` and `neighbours` (the linear maps of g), `dual` (values and tangents), `density` (a unit with its
log-determinant); `wrapper` (a transform that computes another one's forward pass), `plan` (a wrapper for a chain: which
blocks become units), `couplings` (a wrapper for the couplings of other flows), `view` (a model with its chains
wrapped); `engine` (the requested and the available acceleration), `step` (the whole step as one CUDA graph). The
training loop defines what a step computes.
"""

from .engine import Acceleration, Engine
from .plan import Plan, planned
from .step import FastStep, StepResult

__all__ = ["Acceleration", "Engine", "FastStep", "Plan", "StepResult", "planned"]
