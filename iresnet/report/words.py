"""Numbers and counts as a reader wants them: few digits, a true minus, powers of ten, never more than is known."""

from __future__ import annotations

import math
import shlex
from pathlib import PureWindowsPath

from ..data.columns import ColumnKind
from ..spelling import round_up

UP = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits.

    >>> [number(v) for v in (None, 0, 24, 412330, 0.94868, -12345.6, 1.24e-12, float("inf"))]
    ['–', '0', '24', '412,330', '0.949', '−12,346', '1.2 × 10⁻¹²', '∞']
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e6):
        text = f"{int(value):,}"
    elif abs(value) >= 1e6 or abs(value) < 1e-3:
        mantissa, exponent = f"{value:.{digits - 2}e}".split("e")
        text = f"{mantissa} × 10{str(int(exponent)).translate(UP)}"
    else:
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
    return minus(text)


def at_most(value: float | None, decimals: int | None = None) -> str:
    """An upper bound, rounded up so that it stays one: to so many decimals, else to the digits of `number`.

    >>> at_most(9.41e-13), at_most(0.85311, 4), at_most(0.95, 4), at_most(447943.2), at_most(None), at_most(1.31e30, 4)
    ('≤ 9.5 × 10⁻¹³', '≤ 0.8532', '≤ 0.9500', '≤ 448,000', '–', '≤ 1.4 × 10³⁰')
    """
    if value is None or not math.isfinite(value):
        return number(value)
    if decimals is not None and abs(value) < 1e15:
        return f"≤ {fixed(float(round_up(value, f'.{decimals}f')), decimals)}"
    digits = 2 if not 1e-3 <= abs(value) < 1e6 else 3
    return f"≤ {number(float(round_up(value, f'.{digits}g')))}"


def fixed(value: float | None, decimals: int) -> str:
    """A number with so many decimals.

    >>> fixed(-1.666, 2), fixed(None, 2)
    ('−1.67', '–')
    """
    return "–" if value is None or not math.isfinite(value) else minus(f"{value:,.{decimals}f}")


def decimals_for(error: float | None) -> int:
    """Decimals that show an error with two digits; between two and five.

    >>> [decimals_for(e) for e in (0.012, 0.4, 3.0, 1e-9, None)]
    [3, 2, 2, 5, 2]
    """
    if error is None or not 0 < error < math.inf:
        return 2
    return min(max(1 - math.floor(math.log10(error)), 2), 5)


def percent(share: float) -> str:
    """A share in per cent, with a decimal where it is small.

    >>> percent(0.5), percent(0.052), percent(0.0)
    ('50 %', '5.2 %', '0 %')
    """
    return f"{100 * share:.1f} %" if 0 < share < 0.0995 else f"{100 * share:.0f} %"


def cell(kind: ColumnKind, value: float) -> str:
    """A value of a column: a category by its name, a number with few digits.

    >>> cell(ColumnKind.category(("no", "yes")), 1.0), cell(ColumnKind("real"), 0.123456), cell(ColumnKind("real"), 7)
    ('yes', '0.1235', '7')
    """
    if kind.categories:
        known = math.isfinite(value) and 0 <= round(value) < len(kind.categories)
        return kind.categories[round(value)] if known else "unknown"
    return number(value, 4)


def minus(text: str) -> str:
    """A true minus sign."""
    return text.replace("-", "−")


def count(n: int, noun: str) -> str:
    """A number and its noun.

    >>> count(1, "block"), count(1200, "row")
    ('1 block', '1,200 rows')
    """
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def duration(seconds: float) -> str:
    """Seconds in the units of a clock.

    >>> duration(7.24), duration(142.3), duration(7260)
    ('7.2 s', '2 min 22 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def without_folders(command: str) -> str:
    """A command in which every path from the root of a disk is left with its last name alone.

    >>> without_folders("iresnet train --data '/home/me/my data/a.csv' --out=/tmp/run --set steps=2")
    'iresnet train --data a.csv --out=run --set steps=2'
    """
    try:
        words = shlex.split(command)
    except ValueError:  # a quote without its end
        words = command.split()
    return shlex.join("=".join(last_name(part) for part in word.split("=")) for word in words)


def last_name(text: str) -> str:
    """The last name of a path from the root of a disk; any other text stays.

    >>> last_name("/home/me/a.csv"), last_name(r"C:\\me\\b.csv"), last_name("data/c.csv")
    ('a.csv', 'b.csv', 'data/c.csv')
    """
    path = PureWindowsPath(text)  # which knows both kinds
    return path.name if path.root and path.name else text


def listed(parts: list[str]) -> str:
    """Parts of a sentence.

    >>> listed(["samples"]), listed(["classifies", "samples", "is inverted"])
    ('samples', 'classifies, samples and is inverted')
    """
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
