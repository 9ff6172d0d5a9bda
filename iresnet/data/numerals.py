"""Numbers as text: what counts as one, with a decimal point or comma."""

from __future__ import annotations

import math
import re

from ..spelling import quoted

DECIMAL_COMMA = re.compile(r"[+-]?[0-9]*,[0-9]+([eE][+-]?[0-9]+)?")


def parse_number(cell: str) -> float:
    """Parse a number, which may be infinite or NaN; raise a `ValueError` for any other text.

    Python's float also accepts 1_000 and the digits of every script, which other programs read differently or refuse.

    >>> parse_number(" -1.5e3 ")
    -1500.0
    """
    if not cell.isascii() or "_" in cell:
        raise ValueError(f"{quoted(cell)} is not a number.")
    return float(cell)


def is_number(cell: str) -> bool:
    """Whether a text is a number, which may be infinite or NaN.

    >>> [is_number(cell) for cell in ("1e3", "inf", "1_000", "\u0663", "")]
    [True, True, False, False, False]
    """
    try:
        parse_number(cell)
    except ValueError:
        return False
    return True


def is_written_number(cell: str) -> bool:
    """Whether a text is a finite number, with a decimal point or comma.

    >>> [is_written_number(cell) for cell in ("-1.5", "1,5", "inf", "1 m")]
    [True, True, False, False]
    """
    if DECIMAL_COMMA.fullmatch(cell.strip()):
        return True
    return is_number(cell) and math.isfinite(parse_number(cell))


def is_numeric(cell: str) -> bool:
    """Whether a text is a number, which may be infinite or NaN, with a decimal point or comma."""
    return is_number(cell) or DECIMAL_COMMA.fullmatch(cell.strip()) is not None
