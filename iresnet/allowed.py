"""Allowed values of settings: declared once, on the field, and checked in one place.

    family: Literal["iresnet", "glow"] = "iresnet"
    lipschitz: Annotated[float, in_interval("(0, 1)")] = 0.9
    blocks: Annotated[tuple[Annotated[int, maximum(1_000)], ...], max_entries(16)] = (4, 4)

A rule on a list applies to the whole list; a rule inside the brackets applies to each entry. A settings class calls
`check_settings(self)` before it checks conditions on several fields. A lambda in an annotation cannot see the names of
its module, so a rule that needs one is defined above the class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from .spelling import nearest, quoted


@dataclasses.dataclass(frozen=True)
class Rule:
    """A condition on a value, and its description, which follows the name in messages: "must be positive".

    `shown` is the part of the value to quote; if there are `known` words, the nearest one is suggested.
    """

    holds: Callable[[Any], bool]
    words: str
    remedy: str = ""
    shown: Callable[[Any], object] = lambda value: list(value) if isinstance(value, tuple) else value
    known: tuple[str, ...] = ()

    def check(self, name: str, value: Any) -> None:
        """Raise if the condition does not hold for a value."""
        if not self.holds(value):
            remedy = f" {self.remedy}" if self.remedy else nearest(value, self.known)
            raise ValueError(f"{name} {self.words}; got {quoted(self.shown(value))}.{remedy}")


positive = Rule(lambda value: value > 0, "must be positive")


def minimum(number: int) -> Rule:
    """Require a value to be at least `number`."""
    return Rule(lambda value: value >= number, f"must be at least {number}" if number else "must not be negative")


def maximum(number: int) -> Rule:
    """Require a value to be at most `number`: for layers and memory, far above any real use, to catch typing errors."""
    return Rule(lambda value: value <= number, f"must be at most {number:,}", "Lower it.")


def max_entries(number: int) -> Rule:
    """Require a list to have at most `number` entries."""
    return Rule(lambda value: len(value) <= number, f"must have at most {number:,} entries", shown=len)


def in_interval(interval: str, words: str = "must lie", remedy: str = "") -> Rule:
    """Require a value to lie in an interval; `words` may describe the value.

    >>> in_interval("[0, 1)").check("dropout", 1.0)
    Traceback (most recent call last):
    ValueError: dropout must lie in [0, 1); got 1.0.
    """
    low, high = map(float, interval[1:-1].split(","))

    def holds(value: float) -> bool:
        return (low < value or (value == low and interval[0] == "[")) and (
            value < high or (value == high and interval[-1] == "]")
        )

    return Rule(holds, f"{words} in {interval}", remedy)


def check_settings(settings: Any) -> None:
    """Raise if a field of the settings has a value that its annotation does not allow.

    >>> @dataclasses.dataclass
    ... class Settings:
    ...     kind: Literal["density", "hybrid"] = "hybrid"
    >>> check_settings(Settings("hybird"))
    Traceback (most recent call last):
    ValueError: kind must be one of density, hybrid; got 'hybird'. Did you mean 'hybrid'?
    """
    for name, rules, of_entries in _rules(settings.__class__):
        value = getattr(settings, name)
        for rule in rules:
            rule.check(name, value)
        for entry in value if of_entries else ():
            for rule in of_entries:
                rule.check(name, entry)


@cache
def _rules(cls: Any) -> list[tuple[str, tuple[Rule, ...], tuple[Rule, ...]]]:
    """Return (name, rules, rules of the entries if it is a list) of every field that has rules."""
    kinds = get_type_hints(cls, include_extras=True)
    found = []
    for field in dataclasses.fields(cls):
        kind, rules = _split_annotation(kinds[field.name])
        found.append((field.name, rules, _split_annotation(get_args(kind)[0])[1] if get_origin(kind) is tuple else ()))
    return [(name, rules, of_entries) for name, rules, of_entries in found if rules or of_entries]


def _split_annotation(kind: Any) -> tuple[Any, tuple[Rule, ...]]:
    """Split an annotation into the type and its rules."""
    if get_origin(kind) is Annotated:
        kind, *rules = get_args(kind)
        return kind, tuple(rules)
    if get_origin(kind) is Literal:
        known = get_args(kind)
        return str, (Rule(lambda value: value in known, f"must be one of {', '.join(known)}", known=known),)
    return kind, ()
