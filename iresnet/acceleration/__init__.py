"""How training steps are made fast: compiled blocks, low precision where it is harmless, CUDA graphs.

In reading order: `unit` (an ActNorm and a block as one function), `kernels` (the same by kernels of its own); `maps`
and `neighbours` (the linear maps of g), `dual` (values and tangents), `density` (a unit with its log-determinant);
`fused` (which blocks make units), `couplings` (those of other flows), `recording` (CUDA graphs), `step` (the whole of
it as one). `timing` serves them. Inverses have a package of their own, `inversion`, whose names are here as well.
"""

from ..inversion import Arithmetic, Inverter, Schedule
from .fused import fused
from .step import Acceleration, Stepper

__all__ = ["Acceleration", "Arithmetic", "Inverter", "Schedule", "Stepper", "fused"]
