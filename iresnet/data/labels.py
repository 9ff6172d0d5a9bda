"""Labels: class names of a file, encoded as the integers 0, 1, ... of a schema; -1 is a missing label.

A label is missing where its cell is empty (None or NaN in an array) or holds one of the words nan, NA, N/A, null and
None, in any case. Integers are valid class names: 3, 3.0 and "3" are one class, and -1 is a class like any other. The
sub-folders of an image folder are classes whatever they are called.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..spelling import hint, quoted

#: The class name of a missing label, and its code.
EMPTY = ""
MISSING = -1

MISSING_WORDS = ("nan", "na", "n/a", "null", "none")
#: What else marks a missing number. Among categories and labels it is a name like any other.
MISSING_MARKS = ("?", "-", "#n/a", "<na>")
#: How files and data frames spell false and true.
BOOLEANS = (("0", "1"), ("False", "True"), ("false", "true"), ("FALSE", "TRUE"))
INTEGER = re.compile(r"[+-]?[0-9]+(\.0*)?")
SORTABLE = re.compile(r"[+-]?[0-9]{1,4000}")  # integers of more digits Python's int refuses


def class_name(cell: object) -> str:
    """Return the class name in a cell; empty where the label is missing.

    >>> [class_name(cell) for cell in (" cat ", "3.0", 3.0, 7, True, "", None, float("nan"), "N/A")]
    ['cat', '3', '3', '7', '1', '', '', '', '']
    """
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return EMPTY
    text = str(int(cell)) if isinstance(cell, bool) else str(cell).strip()
    if text.lower() in MISSING_WORDS:
        return EMPTY
    return str(int(float(text))) if INTEGER.fullmatch(text) and len(text) < 16 else text


def is_missing_number(cell: str) -> bool:
    """Whether a cell of a column of numbers says that the number is missing.

    >>> [is_missing_number(cell) for cell in ("?", " - ", "#N/A", "NA", "", "nan", "-1", "??")]
    [True, True, True, True, True, True, False, False]
    """
    return class_name(cell) == EMPTY or cell.strip().lower() in MISSING_MARKS


def class_names(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct class names, sorted as integers where all are integers, else as text.

    >>> class_names(["10", "9", "", "10"])
    ('9', '10')
    """
    names = set(labels) - {EMPTY}
    if all(SORTABLE.fullmatch(name) for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def codes_by_name(names: Sequence[str]) -> dict[str, int]:
    """Return the position of every name; of two names that are booleans, in all their spellings.

    >>> codes_by_name(("False", "True"))["1"], codes_by_name(("cat", "dog"))
    (1, {'cat': 0, 'dog': 1})
    """
    codes = {name: i for i, name in enumerate(names)}
    if any(set(names) == set(pair) for pair in BOOLEANS):
        codes |= {
            spelling: codes[name] for pair in BOOLEANS for spelling, name in zip(pair, sorted(names), strict=True)
        }
    return codes


def encode_labels(labels: Sequence[str] | None, classes: Sequence[str], place: Callable[[int], str]) -> Tensor | None:
    """Encode class names as their positions in `classes`; None where there are no labels or no classes.

    `place` returns where label i was read, for the error message.
    """
    if labels is None or not classes:
        return None
    numbers = {EMPTY: MISSING} | codes_by_name(classes)
    for i, label in enumerate(labels):
        if label not in numbers:
            raise ValueError(
                f"labels must be among the {len(classes)} known classes; got {quoted(label)} in {place(i)}. "
                f"{hint(label, classes)}"
            )
    return torch.tensor([numbers[label] for label in labels], dtype=torch.int64)
