"""Detecting change: whether a module is still the function that something was proven of.

A proof may be cached only while the module stays the same function. A `Fingerprint` keeps the settings of a trusted
module (see `trust`) and a copy of its tensors. Settings are compared by value, tensors bit for bit: sums and norms can
collide, so nothing shorter than all numbers is compared. While nothing has been assigned to a module since it was last
compared (`_Contents`), its settings are the same, and only the numbers are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from .trust import KNOWN_TORCH, PLAIN_TENSORS, NoBoundKnown, check_global_state, known_type, unwrap_unmodified

#: Attributes that every `nn.Module` has: not settings.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))

#: The same, and the one that `torch.compile` adds.
NO_SETTINGS = MODULE_ATTRIBUTES | {"_compiled_call_impl"}

#: Integer types by size in bytes. Floats are compared as integers, so that NaN equals itself and -0 differs from 0.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint:
    """The settings and tensors of a module at one moment; `matches` tells whether a module is still the same function.

    The tensors are copied on their own device, and a comparison waits for the device once. Names in the class attribute
    `outside_proof` are left out: they are not part of the function of x.

    >>> layer = nn.Linear(2, 2)
    >>> fingerprint = Fingerprint(layer)
    >>> before = fingerprint.matches(layer)
    >>> _ = layer.weight.data.neg_()
    >>> before, fingerprint.matches(layer)
    (True, False)
    """

    def __init__(self, module: nn.Module) -> None:
        self.settings, tensors = describe_function(module)
        self.kinds = [(t.shape, t.dtype, t.device) for t in tensors]
        self.numbers = [t.clone() for t in _as_integers(tensors)]
        self._seen: tuple[_Contents | None, list[Tensor]] = None, []

    @torch.no_grad()
    def matches(self, module: nn.Module) -> bool:
        """Whether the module is the same function; False also if it is no longer trusted."""
        try:
            tensors = self._tensors(module)
        except NoBoundKnown:
            return False
        if tensors is None or [(t.shape, t.dtype, t.device) for t in tensors] != self.kinds:
            return False
        return bitwise_equal(self.numbers, tensors)

    def _tensors(self, module: nn.Module) -> list[Tensor] | None:
        """Return the tensors of a module with the same settings; None if they differ."""
        seen, tensors = self._seen
        if seen is not None and seen.holds(module):
            return tensors
        seen = _Contents.of(module)  # before the description: another thread may change the module meanwhile
        settings, tensors = describe_function(module)
        if not _equal(settings, self.settings):
            return None
        if seen is not None and not (seen.contains(tensors) and seen.holds(module)):  # it was changed in between
            seen = None
        self._seen = seen, tensors
        return tensors


class _Contents:
    """What the function of a module consists of at one moment: submodules, their classes, attributes and tensors."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self.parts = [(type(m), {name: _copy(v) for name, v in vars(m).items()}, list(m._modules)) for m in modules]
        self.places = [(m, kind, name) for m in modules for kind in _TENSORS for name in vars(m)[kind]]
        self.found = [vars(m)[kind][name] for m, kind, name in self.places]
        #: Those whose class may be given other methods: one of a user's, or that of a parametrized layer.
        self.derived = [m for m in modules if "parametrizations" in m._modules or not _is_fixed(type(m))]

    @classmethod
    def of(cls, module: nn.Module) -> _Contents | None:
        """Remember the module; None if one of its settings may change without being assigned."""
        modules = list(modules_in_proof(module).values())
        settings = (v for m in modules for name, v in vars(m).items() if name not in MODULE_ATTRIBUTES)
        return cls(modules) if all(map(_is_seen_to_change, settings)) else None

    def contains(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors are among those of the module."""
        found = set(map(id, self.found))
        return all(id(t) in found for t in tensors)

    def holds(self, module: nn.Module) -> bool:
        """Whether a description of the module would be the same, up to the numbers in its tensors."""
        check_global_state()
        if module is not self.modules[0]:
            return False
        # Equal dictionaries may have another order, which is that of the layers of a sequence.
        if not _equal([(type(m), vars(m), list(m._modules)) for m in self.modules], self.parts):
            return False
        for m in self.derived:
            known_type(m, unmodified=True)
        now = (vars(m)[kind].get(name) for m, kind, name in self.places)  # equal tensors need not be the same
        return all(a is b and (a is None or type(a) in PLAIN_TENSORS) for a, b in zip(now, self.found, strict=True))


def modules_in_proof(module: nn.Module) -> dict[int, nn.Module]:
    """Return the module and those inside that are part of the function of x, by identity.

    A module outside of the proof is among them if it is used inside, too.
    """
    found: dict[int, nn.Module] = {}
    _collect(module, found)
    return found


def _collect(module: nn.Module, found: dict[int, nn.Module]) -> None:
    if id(module) not in found:
        found[id(module)] = module
        excluded = getattr(type(module), "outside_proof", ())
        for name, child in module._modules.items():
            if child is not None and name not in excluded:
                _collect(child, found)


#: The attributes of a module that hold its tensors.
_TENSORS = ("_parameters", "_buffers")


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | list | set) else value


def _is_seen_to_change(value: Any) -> bool:
    """Whether a change of this setting shows in a comparison with a copy of it."""
    if type(value) in (dict, list):
        # A list of them: another thread may change what belongs to its pass (`SpectralCap`).
        return all(map(_is_constant, list(value.values()) if type(value) is dict else value))
    return _is_constant(value)


def _is_constant(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_constant, value))
    if is_dataclass(value) and _is_fixed(type(value)) and type(value).__hash__ is not None:  # a frozen one
        return all(_is_constant(getattr(value, field.name)) for field in fields(value))
    return value is None or type(value) in (bool, int, float, str)


def _is_fixed(kind: type) -> bool:
    """Whether a class is one of torch or of this library."""
    return kind.__module__.startswith(("torch.", "iresnet."))


def _equal(a: Any, b: Any) -> bool:
    """Whether settings are equal; False if they cannot be compared, such as arrays."""
    try:
        return bool(a == b)
    except (RuntimeError, TypeError, ValueError):
        return False


def bitwise_equal(kept: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are bit for bit those that `kept`, a `Fingerprint.numbers`, was made from."""
    return all(torch.equal(a, b) for a, b in zip(_as_integers(tensors), kept, strict=True))


def describe_function(module: nn.Module) -> tuple[Any, list[Tensor]]:
    """Return (settings, tensors), which determine the function of a trusted module; else raise `NoBoundKnown`."""
    check_global_state()
    tensors: list[Tensor] = []
    return _describe(module, tensors), tensors


def _describe(module: nn.Module, tensors: list[Tensor], *, unmodified: bool = False) -> Any:
    """Describe one module and what it contains; `unmodified` as in `trust.known_type`."""
    module = unwrap_unmodified(module)
    known, attributes = known_type(module, unmodified=unmodified), vars(module)
    excluded = getattr(known, "outside_proof", ())
    own = {**attributes["_parameters"], **attributes["_buffers"]}
    tensors += [t for name, t in own.items() if t is not None and name not in excluded]
    # A name with an underscore is internal state in this library's classes; in torch's it may be a setting.
    skip_private = known not in KNOWN_TORCH
    settings = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in attributes.items()
        if name not in NO_SETTINGS and not (skip_private and name[0] == "_")
    }
    children = [
        (name, _describe_parametrization(child, tensors) if name == "parametrizations" else _describe(child, tensors))
        for name, child in attributes["_modules"].items()
        if child is not None and name not in excluded
    ]
    present = [(name, t is not None) for name, t in own.items() if name not in excluded]
    return known, settings, present, children


def _describe_parametrization(parametrizations: nn.Module, tensors: list[Tensor]) -> Any:
    """Describe the one parametrization that `known_type` accepts, and the weight it is applied to."""
    chain = cast(nn.Module, parametrizations._modules["weight"])
    (rule,) = cast("Iterable[nn.Module]", chain._modules.values())
    tensors.append(cast(Any, chain).original)
    return _describe(rule, tensors, unmodified=True)


def _as_integers(tensors: Sequence[Tensor]) -> list[Tensor]:
    """View all numbers as integers, flattened to one tensor per device and dtype; a single tensor is not copied."""
    groups: dict[Any, list[Tensor]] = {}
    for t in tensors:
        groups.setdefault((t.device, t.dtype), []).append(t)
    flat = [cast(Tensor, _flatten_dense_tensors(group)) for group in groups.values()]  # type: ignore[no-untyped-call]
    plain = (t.detach().resolve_neg() for t in flat if t.numel())
    return [t.view(INTEGERS[t.element_size()]) if t.is_floating_point() else t for t in plain]
