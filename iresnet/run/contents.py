"""What the JSON files of a run folder hold, as far as anything reads it: a value of another kind gets a sentence.

A name that ends in ! must be there unless its object is empty; names that are not listed may hold anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from .. import evaluate


@dataclass(frozen=True)
class ValueKind:
    """A kind of value: what it is called, and how it is known."""

    words: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_square(value: Any) -> bool:
    rows = value if isinstance(value, list) else [None]
    return all(isinstance(row, list) and len(row) == len(rows) and all(map(_is_count, row)) for row in rows)


NUMBER = ValueKind("a number", _is_number)
MAYBE = ValueKind("a number or null", lambda v: v is None or _is_number(v))  # JSON has no infinity
COUNT = ValueKind("a whole number, at least 0", _is_count)
TEXT = ValueKind("a text", lambda v: isinstance(v, str))
FLAG = ValueKind("true or false", lambda v: isinstance(v, bool))
SQUARE = ValueKind("a square table of counts", _is_square)
SHAPE = ValueKind(
    "a list of whole numbers or null", lambda v: v is None or (isinstance(v, list) and all(map(_is_count, v)))
)
RANGE = ValueKind(
    "two numbers or null", lambda v: v is None or (isinstance(v, list) and len(v) == 2 and all(map(MAYBE.fits, v)))
)

Spec: TypeAlias = "ValueKind | Mapping[str, Spec] | list[Spec]"

KINDS = {"float": MAYBE, "float | None": MAYBE, "int": COUNT, "str": TEXT, "bool": FLAG}


def _fields_of(kind: type, *needed: str, **others: Spec) -> dict[str, Spec]:
    """The fields of a dataclass, by what they are annotated as; those that are `needed` must be there."""
    found = {field.name: KINDS[str(field.type)] for field in fields(kind)} | others
    return {f"{name}!" if name in needed else name: spec for name, spec in found.items()}


def _error_fields(*needed: str) -> Spec:
    """An `Error`, whose numbers are finite."""
    return _fields_of(evaluate.Error, *needed, value=NUMBER, low=NUMBER, high=NUMBER)


CERTIFICATE: Spec = {
    "passed": FLAG,
    "stretch": {"forward": MAYBE, "inverse": MAYBE, "logdet": RANGE},
    "blocks": [
        {
            "name!": TEXT,
            "lipschitz!": MAYBE,
            "verdict!": TEXT,
            "remark": TEXT,
            "input_shape": SHAPE,
            "layers": [{"name!": TEXT, "kind!": TEXT, "estimate": MAYBE, "coefficient": MAYBE, "bound": MAYBE}],
        }
    ],
}
_ROBUST = ("rows", "radius", "value", "low", "high", "attacked", "clean")
_PROBED = _error_fields("value", "low", "high", "rows")
EVALUATION: Spec = {
    "split": TEXT,
    "rows": COUNT,
    "of": COUNT,
    "error": _error_fields("value"),
    "density": _fields_of(evaluate.Density, "value", "unit"),
    "inverse": _fields_of(evaluate.Inverse, "rows", "proven"),
    "tightening": {"predictions_changed!": COUNT, "rows!": COUNT, "layers!": COUNT},
    "confusion": SQUARE,
    "robustness": [_fields_of(evaluate.Robustness, *_ROBUST, radius=NUMBER)],
    "probe": {"codes!": _PROBED, "inputs!": _PROBED, "rows!": COUNT},
    "anomalies": [{"name!": TEXT, "detection!": NUMBER}],
    "protocol": {"rows": COUNT, "limit": NUMBER, "value": MAYBE},
}
CONTENTS: Mapping[str, Spec] = {
    "certificate.json": CERTIFICATE,
    "evaluation.json": EVALUATION,
    "environment.json": {"seconds": MAYBE},
}


def check_contents(content: Any, path: Path, remedy: str) -> None:
    """Refuse a file whose values are not of the kinds that its readers expect."""
    if problem := _problem(content, CONTENTS.get(path.name, {}), ""):
        raise ValueError(f"{path} is damaged: {problem}. {remedy}")


def _problem(value: Any, spec: Spec, at: str) -> str:
    """What is wrong with a value, by name; nothing where nothing is."""
    if isinstance(spec, ValueKind):
        return "" if spec.fits(value) else f"{at} must be {spec.words}; got {value!r:.40}"
    if isinstance(spec, list):
        if not isinstance(value, list):
            return f"{at} must be a list; got {value!r:.40}"
        return next(filter(None, (_problem(v, spec[0], f"{at}[{i}]") for i, v in enumerate(value))), "")
    if not isinstance(value, dict):
        return f"{at} must be an object; got {value!r:.40}"
    return next(filter(None, (_member_problem(value, name, inner, at) for name, inner in spec.items())), "")


def _member_problem(value: dict[str, Any], name: str, spec: Spec, at: str) -> str:
    """The same of one member of an object; what is null or empty counts as missing."""
    key = name.removesuffix("!")
    place, inner = f"{at}.{key}" if at else key, value.get(key)
    if key not in value or (inner in (None, {}, []) and not isinstance(spec, ValueKind)):
        return f"{place} is missing" if name.endswith("!") else ""
    return _problem(inner, spec, place)
