"""Labels: from what a file calls its classes to the numbers 0, 1, ... of a schema, -1 where a label is missing.

A label is missing where its cell is empty (None or NaN in an array), or holds one of the words nan, NA, N/A, null and
None, in capitals or not. Whole numbers are classes too, named by themselves: 3, 3.0 and "3" are one class, and -1 is a
class like any other. The sub-folders of images are classes whatever they are called.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..spelling import hint, quoted

MISSING = ""
WORDS = ("nan", "na", "n/a", "null", "none")  # what a cell without a label may hold
WHOLE = re.compile(r"[+-]?[0-9]+(\.0*)?")
COUNTED = re.compile(r"[+-]?[0-9]{1,4000}")  # Python's int takes no more


def class_name(cell: object) -> str:
    """What the class of a cell is called; empty where the label is missing.

    >>> [class_name(cell) for cell in (" cat ", "3.0", 3.0, 7, True, "", None, float("nan"), "N/A")]
    ['cat', '3', '3', '7', '1', '', '', '', '']
    """
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return MISSING
    text = str(int(cell)) if isinstance(cell, bool) else str(cell).strip()
    if text.lower() in WORDS:
        return MISSING
    return str(int(float(text))) if WHOLE.fullmatch(text) and len(text) < 16 else text


def class_names(labels: Iterable[str]) -> tuple[str, ...]:
    """The classes there are, in order: by number where all are numbers, else by name.

    >>> class_names(["10", "9", "", "10"])
    ('9', '10')
    """
    names = set(labels) - {MISSING}
    if all(COUNTED.fullmatch(name) for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def encode(labels: Sequence[str], classes: Sequence[str], place: Callable[[int], str]) -> Tensor:
    """The number of every label among the classes; `place` says where row i stands, for the sentence."""
    numbers = {MISSING: -1} | {name: i for i, name in enumerate(classes)}
    for row, label in enumerate(labels):
        if label not in numbers:
            raise ValueError(
                f"label {quoted(label)} in {place(row)}; there are {len(classes)} classes. {hint(label, classes)}"
            )
    return torch.tensor([numbers[label] for label in labels], dtype=torch.int64)
