"""Words for messages: the nearest known word where one is refused as unknown; a number of things."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST = 24  # words that are listed
FEW = 6  # names that are listed where a command lists them all


def hint(word: str, known: Iterable[str], beside: Iterable[str] = ()) -> str:
    """What to write instead: the nearest of both lists, or one of the known words.

    >>> hint("mnits", ["digits", "mnist"])
    "Did you mean 'mnist'?"
    >>> hint("zebra", ["digits", "mnist"])
    'Use one of digits, mnist.'
    """
    words = list(known)
    if near := nearest(word, [*words, *beside]):
        return near.strip()
    return f"Use one of {', '.join(words[:MOST])}{', …' if len(words) > MOST else '.'}"


def nearest(word: str, known: Iterable[str]) -> str:
    """A sentence for the end of others, with the nearest known word; empty where none is near.

    >>> nearest("papre", ["smoke", "paper"]), nearest("zebra", ["smoke", "paper"])
    (" Did you mean 'paper'?", '')
    """
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def parts_hint(name: str, known: Iterable[str], see: str) -> str:
    """What to write instead of a name of words-with-hyphens; `see` is the command that lists all.

    The same words in another order come first, then all of them among others, the nearest in spelling, and some of
    them; of names that share a word, those that share the rarest.

    >>> parts_hint("glow-digits", ["digits-flow", "toy-glow", "digits-glow"], "iresnet presets")
    "Did you mean 'digits-glow'?"
    >>> parts_hint("glow", ["digits-flow", "toy-glow", "digits-glow"], "iresnet presets")
    'Use one of toy-glow, digits-glow; `iresnet presets` lists all.'
    """
    words, parts = set(name.lower().split("-")), {other: set(other.split("-")) for other in known}
    if same := [other for other, its in parts.items() if its == words]:
        return f"Did you mean {same[0]!r}?"
    if not any(words <= its for its in parts.values()) and (near := nearest(name, parts)):
        return near.strip()
    rarity = {w: 1 / sum(w in its for its in parts.values()) for its in parts.values() for w in its}
    shared = [other for other, its in parts.items() if words & its]
    shared.sort(key=lambda other: -sum(rarity[w] for w in words & parts[other]))
    if len(shared) == 1:
        return f"Did you mean {shared[0]!r}?"
    return f"Use one of {', '.join((shared or list(parts))[:FEW])}; `{see}` lists all."


def counted(number: int, word: str) -> str:
    """A number of things.

    >>> counted(1, "step"), counted(20, "step")
    ('1 step', '20 steps')
    """
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
