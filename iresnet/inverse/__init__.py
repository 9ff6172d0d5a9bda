"""The inverse of whole transforms: one function chooses how, and `proof` judges whatever comes of it.

In reading order: `ordinary` (part by part, of anything), `refusal` (what can be inverted faster on a GPU); `arithmetic`
(what is computed how), `precisions` (g in each of them), `refinement` (one block), `verification` (what is reported),
`inverter` (half precision finds, float64 refines and proves, as one CUDA graph); `decoder` (which of them, and what is
kept).
"""

from .arithmetic import Arithmetic
from .decoder import Decoder, invert, solve
from .inverter import Inverter
from .refinement import Schedule

__all__ = ["Arithmetic", "Decoder", "Inverter", "Schedule", "invert", "solve"]
