"""Attacks: random cases that try to make the library say something false, lose something, crash or hang.

    python -m attack --list                                    the kinds of cases
    python -m attack --kind layers --cases 1000 --seed 0       some of them
    python -m attack --kind layers --seed 0 --case 17          one case again, with its traceback
    python -m attack --kind layers --hypothesis 1000           hypothesis looks for the smallest violation
    make attack                                                all of them, counted in results/attack.json

A kind is a function of a `random.Random`, registered with `kind`: it draws a case, attacks it and returns the outcome
in a word or two ("proven", "refused"), which is counted. It raises `Violation` where a claim was false. Any other
exception counts as a violation too, and so do a case that takes longer than its limit and one that ends the process.
Every module of this package is imported before a run, so that a new module registers its kinds by being there.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["KINDS", "Attack", "Kind", "Violation", "drawn", "kind", "load"]

#: Draws one case, attacks it, and returns the outcome in a word or two.
Attack: TypeAlias = Callable[[random.Random], str]


class Violation(AssertionError):
    """The library claimed something false. The message says what was claimed and what was found, in one line."""


@dataclass(frozen=True)
class Kind:
    """One kind of attack: its function, the cases of a full run, and the seconds after which a case counts as hung.

    A kind without cases in a full run is only run by name.
    """

    name: str
    attack: Attack
    cases: int
    limit: float

    @property
    def about(self) -> str:
        """The first line of the attack's docstring."""
        return (self.attack.__doc__ or "").strip().partition("\n")[0]


#: All kinds by name.
KINDS: dict[str, Kind] = {}


def kind(name: str, *, cases: int, limit: float = 60.0) -> Callable[[Attack], Attack]:
    """Register the decorated function as a kind of attack with so many cases in a full run."""

    def register(attack: Attack) -> Attack:
        if name in KINDS:
            raise ValueError(f"a kind is registered once; got {name!r} again. Give it another name.")
        KINDS[name] = Kind(name, attack, cases, limit)
        return attack

    return register


def load() -> dict[str, Kind]:
    """Import every module of this package, and return the kinds they registered."""
    for module in pkgutil.iter_modules(__path__):
        if module.name != "__main__":
            importlib.import_module(f"{__name__}.{module.name}")
    return KINDS


def drawn(name: str, seed: int, number: int) -> random.Random:
    """The source of randomness of one case: the same for the same kind, seed and number on every machine."""
    return random.Random(f"{name} {seed} {number}")
