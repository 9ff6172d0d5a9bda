"""The demonstrations: one network with four jobs on `digits`, and flows on densities in the plane (`toy`)."""

from . import digits, toy

__all__ = ["digits", "toy"]
