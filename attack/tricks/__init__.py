"""What honest PyTorch can do to a network: subclasses, hooks, parametrizations, attributes, wrappers, unknown parts.

A trick takes a network g, a sequence of supported parts for rows or signals, and changes its function, most often so
that it expands. It returns the network, the same object or another. `TRICKS` has them all by name; those of
`AFTERWARDS` can be played on the network of a block that exists. A trick that does not fit a network raises `Unfit`.

In reading order: `base`, `classes`, `instances`, `weights`, `parts`, `wrappers`.
"""

from . import classes, instances, parts, weights, wrappers
from .base import AFTERWARDS, TRICKS, Times, Trick, Unfit, act, factor, linear, replace, subclassed
from .classes import Twice
from .parts import Hidden
from .weights import Echoing

__all__ = [
    "AFTERWARDS",
    "TRICKS",
    "Echoing",
    "Hidden",
    "Times",
    "Trick",
    "Twice",
    "Unfit",
    "act",
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
