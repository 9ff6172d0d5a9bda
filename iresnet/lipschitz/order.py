"""The layers of g in the order in which they act on x: along an `nn.Sequential` and the library's own combinators.

Anything else (a forward of the user's own, which may reuse a layer, add a skip or call an unknown function; a hook; a
parametrization of another library: see `trust`) has no order that can be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch import nn

from ..trust import NoBoundKnown, unwrap, why_modified, why_untrusted
from .activations import record_of
from .conditioned import Conditioned
from .dense import Concatenated
from .potential import Potential


def leaves(g: nn.Module, prefix: str = "", *, fresh: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """The layers of g in the order in which they act on x; `NoBoundKnown` where that order cannot be read.

    `fresh` says that x is a tensor of g's own, on which its first step may work in place.
    """
    for name, leaf in leaves_and_shifts(g, prefix, fresh=fresh):
        if type(leaf) is not Conditioned:
            yield name, leaf


def leaves_and_shifts(g: nn.Module, prefix: str = "", *, fresh: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """The same, with a `Conditioned` where it adds its embedding."""
    for name, leaf in _leaves(g, prefix):
        if getattr(leaf, "inplace", False) and not fresh:
            raise NoBoundKnown(f"g must leave x as it is; its first step, {leaf}, works in place. Use inplace=False.")
        fresh = fresh or not may_return_input(leaf)  # those may return x itself
        yield name, leaf


def _leaves(g: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if (reason := why_modified(g)) is not None:
        raise NoBoundKnown(f"{describe_layer(prefix, g)} {reason}")
    wrapped = unwrap(g)
    if wrapped is not g:
        yield from _leaves(wrapped, prefix)
    elif is_sequential(g):
        for name, child in g._modules.items():  # named_children would leave out a layer used twice
            yield from _leaves(cast(nn.Module, child), child_name(prefix, name))
    elif type(g) is Conditioned:
        yield from _leaves(g.first, child_name(prefix, "first"))
        yield prefix, g
        yield from _leaves(g.rest, child_name(prefix, "rest"))
    else:
        yield prefix, g


def may_return_input(leaf: nn.Module) -> bool:
    """Whether a layer may return what it is given, in another shape at most."""
    record = record_of(leaf)
    return record is not None and record.may_return_input


def is_sequential(module: nn.Module) -> bool:
    """Whether a module is an `nn.Sequential` in all but its constructor."""
    return isinstance(module, nn.Sequential) and why_untrusted(module) == ""


def primitives(g: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The linear layers and activations of g in order, those inside of a `Potential` or `Concatenated` too."""
    for name, leaf in leaves(g, prefix):
        if type(leaf) is Concatenated:
            yield from primitives(leaf.f, child_name(name, "f"))
        elif type(leaf) is Potential:
            yield child_name(name, "layer"), leaf.layer
            yield from leaves(leaf.activation, child_name(name, "activation"), fresh=True)
        else:
            yield name, leaf


def child_name(name: str, child: str) -> str:
    """The name of a part of a module."""
    return f"{name}.{child}" if name else child


def describe_layer(name: str, module: nn.Module) -> str:
    """A layer as messages call it."""
    return f"{type(module).__name__} ({name})" if name else type(module).__name__
