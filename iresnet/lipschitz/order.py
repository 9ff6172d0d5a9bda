"""The layers of g in execution order, through `nn.Sequential` and the library's own combinators.

For anything else the order is unknown: a custom forward may reuse a layer, add a skip connection or call an unknown
function; for hooks and parametrizations of other libraries see `trust`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch import nn

from ..trust import NoBoundKnown, known_type, why_modified, wrapped_module
from .activations import record_of
from .conditioned import Conditioned
from .dense import Concatenated
from .potential import Potential


def leaves(g: nn.Module, prefix: str = "", *, fresh: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, layer) for the layers of g in execution order; raise `NoBoundKnown` if the order is unknown.

    `fresh`: the input is an intermediate tensor, so the first layer may work in place.
    """
    for name, leaf in leaves_and_shifts(g, prefix, fresh=fresh):
        if type(leaf) is not Conditioned:
            yield name, leaf


def leaves_and_shifts(g: nn.Module, prefix: str = "", *, fresh: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Like `leaves`, and also yield a `Conditioned` at the point where it adds its embedding."""
    for name, leaf in _leaves(g, prefix):
        if not fresh and getattr(leaf, "inplace", False):
            raise NoBoundKnown(f"g must not modify x; its first layer, {leaf}, works in place. Use inplace=False.")
        fresh = fresh or not may_return_input(leaf, unmodified=True)  # a layer that may return x itself
        yield name, leaf


def _leaves(g: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if (reason := why_modified(g)) is not None:
        raise NoBoundKnown(f"{describe_layer(prefix, g)} {reason}")
    if (wrapped := wrapped_module(g)) is not None:
        yield from _leaves(wrapped, prefix)
    elif _is_sequential(g):
        for name, child in g._modules.items():  # named_children would skip a layer used twice
            yield from _leaves(cast(nn.Module, child), child_name(prefix, name))
    elif type(g) is Conditioned:
        yield from _leaves(g.first, child_name(prefix, "first"))
        yield prefix, g
        yield from _leaves(g.rest, child_name(prefix, "rest"))
    else:
        yield prefix, g


def may_return_input(leaf: nn.Module, *, unmodified: bool = False) -> bool:
    """Whether the output of a layer may be its input or a view of it; `unmodified` as in `trust.known_type`."""
    record = record_of(leaf, unmodified=unmodified)
    return record is not None and record.may_return_input


def _is_sequential(module: nn.Module) -> bool:
    """Whether a module that is unmodified is an `nn.Sequential`, with a constructor of its own at most."""
    try:
        return isinstance(module, nn.Sequential) and issubclass(known_type(module, unmodified=True), nn.Sequential)
    except NoBoundKnown:
        return False


def primitives(g: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, layer) for all linear layers and activations, also inside `Potential` and `Concatenated`."""
    for name, leaf in leaves(g, prefix):
        if type(leaf) is Concatenated:
            yield from primitives(leaf.f, child_name(name, "f"))
        elif type(leaf) is Potential:
            yield child_name(name, "layer"), leaf.layer
            yield from leaves(leaf.activation, child_name(name, "activation"), fresh=True)
        else:
            yield name, leaf


def child_name(name: str, child: str) -> str:
    """Return the dotted name of a child module."""
    return f"{name}.{child}" if name else child


def describe_layer(name: str, module: nn.Module) -> str:
    """Return the class and name of a layer, for messages."""
    return f"{type(module).__name__} ({name})" if name else type(module).__name__
