"""Inverses made fast: half precision finds, float32 and float64 refine, float64 proves; on a GPU one CUDA graph.

In reading order: `convolution` (in float64), `arithmetic` (precisions), `reading` (g as steps), `branch` (g in each
precision), `rounding` (what a product proves), `refinement` (one block), `path` (a transform as a path), `judgement`
(what is reported), `inverter` (the whole), `unwinding` (on a CPU), `decoder` (whichever applies, prepared once).
"""

from .arithmetic import Arithmetic
from .decoder import Decoder
from .inverter import Inverter
from .refinement import Schedule

__all__ = ["Arithmetic", "Decoder", "Inverter", "Schedule"]
