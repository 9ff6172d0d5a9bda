"""Ordinary PyTorch tricks on a network: subclasses, hooks, parametrizations, attributes, wrappers, unknown parts.

A trick takes a network g, a sequence of supported parts for vectors or signals, and changes its function, usually so
that it expands. It returns the network, the same object or another. `TRICKS` has all of them by name; those in
`IN_PLACE` can also be applied to the network of an existing block. A trick that does not apply raises `NotApplicable`.

In reading order: `base`, `classes`, `instances`, `weights`, `parts`, `wrappers`.
"""

from . import classes, instances, parts, weights, wrappers
from .base import IN_PLACE, TRICKS, NotApplicable, Scale, Trick, activation, factor, linear, replace, subclassed
from .classes import Twice
from .parts import Hidden
from .weights import Echoing

__all__ = [
    "IN_PLACE",
    "TRICKS",
    "Echoing",
    "Hidden",
    "Scale",
    "Trick",
    "Twice",
    "NotApplicable",
    "activation",
    "classes",
    "factor",
    "instances",
    "linear",
    "parts",
    "replace",
    "subclassed",
    "weights",
    "wrappers",
]
