"""How training steps and inverses are made fast: compiled blocks, low precision where it is harmless, CUDA graphs.

A training step, in reading order: `unit` (an ActNorm and a block as one function), `kernels` (the same by kernels of
its own), `fused` (which blocks make units), `step` (the whole of it as one graph). An inverse: `convolution` (in
float64), `arithmetic` (precisions), `branch` (g in each of them), `rounding` (what a product proves), `refinement` (one
block), `inverse`.
"""

from .arithmetic import Arithmetic
from .fused import fused
from .inverse import Inverter
from .refinement import Schedule
from .step import Acceleration, Stepper

__all__ = ["Acceleration", "Arithmetic", "Inverter", "Schedule", "Stepper", "fused"]
