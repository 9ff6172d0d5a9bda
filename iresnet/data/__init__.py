"""Data sets. `toy` holds two-dimensional densities whose entropy is known, for demonstrations and tests."""

from . import toy

__all__ = ["toy"]
