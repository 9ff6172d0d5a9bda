"""How much of a long computation is done: its loops report fractions, and whoever shows them listens.

A loop over chunks, draws or blocks says which part of how many it runs: `each(function, chunks)`, or `with part(i, n)`
around the body. Loops may be nested: the parts of an inner loop divide the part of the outer loop that it runs in. A
loop without an outer one starts again at 0. Without a listener nothing happens.

>>> with listening(lambda fraction, phase: print(f"{fraction:.0%}")):
...     squares = each(lambda x: x * x, [1, 2])
0%
50%
100%
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

A = TypeVar("A")
B = TypeVar("B")

#: Called with the fraction that is done, in [0, 1], and the phase, "" if it has no name.
Listener: TypeAlias = Callable[[float, str], None]


@dataclass(frozen=True)
class _Span:
    """The part of the whole that the running code fills."""

    listener: Listener
    phase: str = ""
    begin: float = 0.0
    size: float = 1.0
    nested: bool = False

    def report(self, fraction: float) -> None:
        self.listener(min(1.0, self.begin + self.size * fraction), self.phase)


_SPAN: ContextVar[_Span | None] = ContextVar("span", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call a function with the fraction that is done whenever a loop in this context reports one."""
    with _running(_Span(listener)):
        yield


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name what is computed in this context, one of several things that each go from 0 to 1."""
    span = _SPAN.get()
    if span is None or span.nested:
        yield
        return
    named = replace(span, phase=name)
    named.report(0.0)
    try:
        with _running(named):
            yield
    finally:
        named.report(1.0)


@contextmanager
def part(i: int, n: int) -> Iterator[None]:
    """Make what is computed in this context the part `i` of `n` equal ones, counted from 0."""
    with between(i / n, (i + 1) / n):
        yield


@contextmanager
def between(begin: float, end: float, phase: str = "") -> Iterator[None]:
    """Make what is computed in this context a part of the work: from one fraction of it to another.

    `phase` replaces the name of what is computed, once this part is done.
    """
    span = _SPAN.get()
    if span is None:
        yield
        return
    if begin == 0 and not span.nested:
        span.report(0.0)
    with _running(replace(span, begin=span.begin + span.size * begin, size=span.size * (end - begin), nested=True)):
        yield
    replace(span, phase=phase or span.phase).report(end)


def each(function: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Apply a function to every item, each of them an equal part of the work."""
    results, known = [], list(items)
    for i, item in enumerate(known):
        with part(i, len(known)):
            results.append(function(item))
    return results


@contextmanager
def _running(span: _Span | None) -> Iterator[None]:
    token = _SPAN.set(span)
    try:
        yield
    finally:
        _SPAN.reset(token)
