"""The demos: one network for four tasks on `digits`, and flows on two-dimensional densities (`toy`)."""

from . import digits, toy

__all__ = ["digits", "toy"]
