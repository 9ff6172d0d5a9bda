"""Numbers as text: what counts as one, with a decimal point or comma, and what else may stand for one."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ..spelling import quoted

DECIMAL_COMMA = re.compile(r"[+-]?[0-9]*,[0-9]+([eE][+-]?[0-9]+)?")
DATE = re.compile(r"([0-9]{4}([-/.])[0-9]{1,2}\2[0-9]{1,2}|[0-9]{1,2}([-/.])[0-9]{1,2}\3[0-9]{4})([ T].*)?")
TIME = re.compile(r"[0-9]{1,2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?( ?[AaPp][Mm])?")
#: A number with a sign of money before it, or a unit behind it, and commas between thousands.
DECORATED = re.compile(r"([$€£¥]?) ?([+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?) ?(%|[A-Za-zµ°€]*)")


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


def is_date(cell: str) -> bool:
    """Whether a text is a date, a time of day, or both.

    >>> [is_date(cell) for cell in ("2024-01-31", "31.1.2024 10:30", "10:30", "2024-01", "1.2.3")]
    [True, True, True, False, False]
    """
    return any(pattern.fullmatch(cell.strip()) for pattern in (DATE, TIME))


def number_alone(cells: Sequence[str]) -> str:
    """Return the number in the first cell, if all are numbers with the same sign or unit; else nothing.

    >>> number_alone(["5 %", "7 %"]), number_alone(["$1,234.50", "$7"]), number_alone(["12a", "7b"])
    ('5', '1234.50', '')
    """
    found = [DECORATED.fullmatch(cell.strip()) for cell in cells]
    alike = len({match and (match[1], match[3]) for match in found}) == 1
    return found[0][2].replace(",", "") if alike and found[0] else ""
