"""Text for error messages: suggestions for misspelt words, bounds, quoted values, and the file they are about.

Quoted values may come from untrusted files: they are shortened, and control characters that a terminal would obey are
escaped.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from itertools import islice
from numbers import Integral

MOST = 24  # words in a list of known words
FEW = 6  # names in a list, if a command lists them all
COMPARED, LONGEST = 1_000, 255  # words that a misspelt one is compared with, and their length, to bound the time
LENGTH = 80  # characters of a quoted value

#: C0 and C1 controls, marks that change the text direction, and bytes of a file name that are not UTF-8.
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def round_up(value: float, form: str) -> str:
    """Format an upper bound as `format` does, but rounded up, so that it stays one.

    >>> round_up(1.2341, ".3g"), round_up(0.85311, ".4f"), round_up(0.95, ".4f"), round_up(9.41e-13, ".1e")
    ('1.24', '0.8532', '0.9500', '9.5e-13')
    """
    return _rounded(value, form, ROUND_CEILING)


def round_down(value: float, form: str) -> str:
    """Format a lower bound as `format` does, but rounded down.

    >>> round_down(1.2367, ".3g"), round_down(-0.85311, ".4f")
    ('1.23', '-0.8532')
    """
    return _rounded(value, form, ROUND_FLOOR)


def _rounded(value: float, form: str, direction: str) -> str:
    if not math.isfinite(value):
        return format(value, form)
    digits, exact = int(form[1:-1]), Decimal(repr(float(value)))
    if form.endswith("f"):
        near = exact.quantize(Decimal(1).scaleb(-digits), context=Context(400, direction))
    else:
        near = Context(digits + form.endswith("e"), direction).create_decimal(exact)
    return format(float(near), form)


def hint(word: str, known: Iterable[str], beside: Iterable[str] = ()) -> str:
    """Return a suggestion for an unknown word: the nearest word of both lists, or a list of the known words.

    >>> hint("mnits", ["digits", "mnist"])
    "Did you mean 'mnist'?"
    >>> hint("zebra", ["digits", "mnist"])
    'Use one of digits, mnist.'
    """
    words = list(known)
    if near := nearest(word, [*words, *beside]):
        return near.strip()
    return f"Use one of {listed(words, MOST)}{'' if len(words) > MOST else '.'}"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean ...?" with the nearest known word, to append to a message; empty if none is near.

    >>> nearest("papre", ["smoke", "paper"]), nearest("zebra", ["smoke", "paper"])
    (" Did you mean 'paper'?", '')
    """
    close = closest(word, known)
    return "" if close is None else f" Did you mean {close!r}?"


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that a misspelt one is closest to; None if none is near.

    >>> closest("papre", ["smoke", "paper"])
    'paper'
    """
    compared = [other for other in islice(known, COMPARED) if len(other) <= LONGEST]
    close = difflib.get_close_matches(str(word), compared, n=1) if len(str(word)) <= LONGEST else []
    return close[0] if close else None


def parts_hint(name: str, known: Iterable[str], see: str) -> str:
    """Return a suggestion for an unknown name of hyphenated words; `see` is the command that lists all names.

    Preferred in this order: the same words in another order, the nearest spelling unless a name contains all the words,
    names that share words, those that share rare words first.

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


def at_least(least: int, remedy: str = "", /, **values: int) -> None:
    """Raise if a value is no whole number or below its minimum; the message names it.

    >>> at_least(1, "Leave it out.", steps=0)
    Traceback (most recent call last):
    ValueError: steps must be at least 1; got 0. Leave it out.
    """
    for name, value in values.items():
        if not isinstance(value, Integral):
            raise ValueError(f"{name} must be a whole number; got {value!r}.")
        if value < least:
            raise ValueError(f"{name} must be at least {least}; got {value}.{remedy and ' ' + remedy}")


def counted(number: int, word: str) -> str:
    """Return a number with its noun, in the plural if needed.

    >>> counted(1, "step"), counted(20, "step")
    ('1 step', '20 steps')
    """
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return the first of many names, separated by commas.

    >>> listed(["a", "b", "c"], most=2)
    'a, b, …'
    """
    return ", ".join([*map(shorten, names[:most]), *(["…"] if len(names) > most else [])])


def shorten(text: str) -> str:
    """Return a text, truncated if it is too long for a message.

    >>> shorten("kind"), len(shorten("kind" * 1000))
    ('kind', 80)
    """
    return text if len(text) <= LENGTH else f"{text[: LENGTH - 1]}…"


def outcomes(diverged: int, converged: int | None, total: int, things: str = "") -> str:
    """Say for how many of the samples an iteration diverges, and for how many it converges if not for all others.

    >>> outcomes(17, 0, 128), outcomes(17, 111, 128, " samples"), outcomes(128, 0, 128)
    ('diverges for 17 of 128 and converges for none', 'diverges for 17 of 128 samples', 'diverges')
    """
    if not 0 < diverged < total:
        return "diverges"
    others = "" if converged in (None, total - diverged) else f" and converges for {converged or 'none'}"
    return f"diverges for {diverged:,} of {total:,}{things}{others}"


def quoted(value: object) -> str:
    """Return the repr of a value, shortened if it is long or deeply nested.

    >>> quoted("a"), quoted([1, 2.5]), quoted("a" * 1000)[:4]
    ("'a'", '[1, 2.5]', "'aaa")
    """
    return shorten(_QUOTE.repr(value))


@contextmanager
def prefix_errors(path: object) -> Iterator[None]:
    """Put the file's name before the message of any `ValueError` raised inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def with_path(error: OSError, path: object) -> OSError:
    """Return the error with the path in its message, which Python includes only if a file cannot be opened."""
    return error if error.filename is not None else type(error)(f"{path} cannot be read: {error.strerror or error}.")


def first_line(error: Exception) -> str:
    """Return the first line of an error's message without its full stop, or its class name if it has none.

    >>> first_line(EOFError()), first_line(ValueError("one.\\ntwo"))
    ('EOFError', 'one')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def printable(text: str, *, lines: bool = False) -> str:
    r"""Escape every control character, so that a terminal shows it instead of obeying it.

    With `lines`, line breaks are kept.

    >>> printable("red: \x1b[31m")
    'red: \\x1b[31m'
    """

    def escape(found: re.Match[str]) -> str:
        return "\n" if lines and found[0] == "\n" else found[0].encode("unicode_escape").decode("ascii")

    return CONTROLS.sub(escape, text)


class _Quote(reprlib.Repr):
    """Python's short repr, extended to integers with more digits than Python prints."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxtuple, self.maxdict = 4, MOST, MOST, MOST
        self.maxstring = self.maxother = LENGTH

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() < 4096 else f"an integer of {x.bit_length()} bits"


_QUOTE = _Quote()
