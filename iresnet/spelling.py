"""Words for messages: the nearest known word where one is refused as unknown; a number of things."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST = 24  # words that are listed


def hint(word: str, known: Iterable[str], beside: Iterable[str] = ()) -> str:
    """What to write instead: the nearest of both lists, or one of the known words.

    >>> hint("mnits", ["digits", "mnist"])
    "Did you mean 'mnist'?"
    >>> hint("zebra", ["digits", "mnist"])
    'Use one of digits, mnist.'
    """
    words = list(known)
    close = difflib.get_close_matches(str(word), [*words, *beside], n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Use one of {', '.join(words[:MOST])}{', …' if len(words) > MOST else '.'}"


def counted(number: int, word: str) -> str:
    """A number of things.

    >>> counted(1, "step"), counted(20, "step")
    ('1 step', '20 steps')
    """
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
