"""Attacks: random cases that try to make the library claim something false, lose data, crash or hang.

    python -m attack --list                                    list the kinds of cases
    python -m attack --kind layers --cases 1000 --seed 0       run some cases
    python -m attack --kind layers --seed 0 --case 17          repeat one case, with its traceback
    python -m attack --kind layers --hypothesis 1000           let hypothesis search for the smallest violation
    make attack                                                run all kinds; counts go to results/attack.json

A kind is a function of a `random.Random`, registered with `kind`: it draws a case, attacks it and returns an outcome of
one or two words ("proven", "refused"), which is counted. It raises `Violation` if a claim was false. Any other
exception is a violation too, and so is a case that exceeds its time limit or ends the process. Every module of this
package is imported before a run, so a new module only needs to register its kinds.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["KINDS", "Attack", "Kind", "Violation", "case_random", "kind", "load"]

#: Draws one case, attacks it, and returns an outcome of one or two words.
Attack: TypeAlias = Callable[[random.Random], str]


class Violation(AssertionError):
    """The library claimed something false. The message states the claim and the counterexample in one line."""


@dataclass(frozen=True)
class Kind:
    """One kind of attack: its function, its number of cases in a full run, and the time limit of a case in seconds.

    A kind with zero cases runs only when it is named.
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
    """Register the decorated function as a kind of attack with `cases` cases in a full run."""

    def register(attack: Attack) -> Attack:
        if name in KINDS:
            raise ValueError(f"a kind is registered once; got {name!r} again. Choose another name.")
        KINDS[name] = Kind(name, attack, cases, limit)
        return attack

    return register


def load() -> dict[str, Kind]:
    """Import every module of this package, and return the registered kinds."""
    for module in pkgutil.iter_modules(__path__):
        if module.name != "__main__":
            importlib.import_module(f"{__name__}.{module.name}")
    return KINDS


def case_random(name: str, seed: int, number: int) -> random.Random:
    """The random generator of one case; it depends only on the kind, the seed and the number."""
    return random.Random(f"{name} {seed} {number}")
