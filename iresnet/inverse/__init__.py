"""Inverts whole transforms: one function chooses the method, and `proof` verifies the result of each.

In reading order: `ordinary` (part by part, for any transform), `refusal` (which transforms can be accelerated);
`arithmetic` (precisions), `precisions` (g in each precision), `refinement` (one block), `verification` (the reported
bounds), `inverter` (half precision approximates, float64 refines and proves, as one CUDA graph); `decoder` (chooses the
method and keeps what is prepared).
"""

from .arithmetic import Arithmetic
from .decoder import Decoder, invert, solve
from .inverter import Inverter
from .refinement import Schedule

__all__ = ["Arithmetic", "Decoder", "Inverter", "Schedule", "invert", "solve"]
