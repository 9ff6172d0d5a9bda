"""Schemas of the JSON files in a run folder, for the keys that are read: a value of another type raises an error.

A key that ends in ! is required unless its object is empty; keys that are not listed may hold anything.
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
    """A type of JSON value: its description in messages, and a predicate."""

    description: str
    accepts: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_square(value: Any) -> bool:
    rows = value if isinstance(value, list) else [None]
    return all(isinstance(row, list) and len(row) == len(rows) and all(map(_is_count, row)) for row in rows)


NUMBER = ValueKind("a number", _is_number)
NUMBER_OR_NULL = ValueKind("a number or null", lambda v: v is None or _is_number(v))  # JSON has no infinity
COUNT = ValueKind("a non-negative integer", _is_count)
COUNT_OR_NULL = ValueKind("a non-negative integer or null", lambda v: v is None or _is_count(v))
TEXT = ValueKind("a string", lambda v: isinstance(v, str))
FLAG = ValueKind("true or false", lambda v: isinstance(v, bool))
SQUARE = ValueKind("a square table of counts", _is_square)
SHAPE = ValueKind("a list of integers or null", lambda v: v is None or (isinstance(v, list) and all(map(_is_count, v))))
RANGE = ValueKind(
    "two numbers or null",
    lambda v: v is None or (isinstance(v, list) and len(v) == 2 and all(map(NUMBER_OR_NULL.accepts, v))),
)

Spec: TypeAlias = "ValueKind | Mapping[str, Spec] | list[Spec]"

KINDS = {
    "float": NUMBER_OR_NULL,
    "float | None": NUMBER_OR_NULL,
    "int": COUNT,
    "int | None": COUNT_OR_NULL,
    "str": TEXT,
    "bool": FLAG,
}


def _fields_of(kind: type, *required: str, **others: Spec) -> dict[str, Spec]:
    """Return the schema of a dataclass, from its annotations; the fields in `required` must be present."""
    found = {field.name: KINDS[str(field.type)] for field in fields(kind)} | others
    return {f"{name}!" if name in required else name: spec for name, spec in found.items()}


def _error_fields(*required: str) -> Spec:
    """Return the schema of an `evaluate.Error`, whose numbers are finite."""
    return _fields_of(evaluate.Error, *required, value=NUMBER, low=NUMBER, high=NUMBER)


CERTIFICATE: Spec = {
    "passed": FLAG,
    "stretch": {"forward": NUMBER_OR_NULL, "inverse": NUMBER_OR_NULL, "logdet": RANGE},
    "blocks": [
        {
            "name!": TEXT,
            "lipschitz!": NUMBER_OR_NULL,
            "verdict!": TEXT,
            "remark": TEXT,
            "input_shape": SHAPE,
            "layers": [
                {
                    "name!": TEXT,
                    "kind!": TEXT,
                    "estimate": NUMBER_OR_NULL,
                    "coefficient": NUMBER_OR_NULL,
                    "bound": NUMBER_OR_NULL,
                }
            ],
        }
    ],
}
_ROBUST_FIELDS = ("rows", "radius", "value", "low", "high", "attacked", "clean")
_PROBE_ERROR = _error_fields("value", "low", "high", "rows")
EVALUATION: Spec = {
    "split": TEXT,
    "rows": COUNT,
    "of": COUNT,
    "error": _error_fields("value"),
    "density": _fields_of(evaluate.Density, "value", "unit"),
    "baselines": [
        _fields_of(evaluate.Baseline, "name", "value", "gain", "gain_error", "fitted", value=NUMBER, gain=NUMBER)
    ],
    "inverse": _fields_of(evaluate.Inverse, "rows", "proven"),
    "tightening": {"predictions_changed!": COUNT, "rows!": COUNT, "layers!": COUNT},
    "confusion": SQUARE,
    "robustness": [_fields_of(evaluate.Robustness, *_ROBUST_FIELDS, radius=NUMBER)],
    "probe": {"codes!": _PROBE_ERROR, "inputs!": _PROBE_ERROR, "rows!": COUNT},
    "anomalies": [{"name!": TEXT, "detection!": NUMBER}],
    "protocol": {"rows": COUNT, "limit": NUMBER, "value": NUMBER_OR_NULL},
}
CONTENTS: Mapping[str, Spec] = {
    "certificate.json": CERTIFICATE,
    "evaluation.json": EVALUATION,
    "environment.json": {"seconds": NUMBER_OR_NULL},
}


def check_contents(content: Any, path: Path, remedy: str) -> None:
    """Raise if a file's content does not match its schema."""
    if problem := _problem(content, CONTENTS.get(path.name, {}), ""):
        raise ValueError(f"{path} is damaged: {problem}. {remedy}")


def _problem(value: Any, spec: Spec, at: str) -> str:
    """Return what is wrong with a value, with its path; empty if nothing is."""
    if isinstance(spec, ValueKind):
        return "" if spec.accepts(value) else f"{at} must be {spec.description}; got {value!r:.40}"
    if isinstance(spec, list):
        if not isinstance(value, list):
            return f"{at} must be a list; got {value!r:.40}"
        return next(filter(None, (_problem(v, spec[0], f"{at}[{i}]") for i, v in enumerate(value))), "")
    if not isinstance(value, dict):
        return f"{at} must be an object; got {value!r:.40}"
    return next(filter(None, (_member_problem(value, name, inner, at) for name, inner in spec.items())), "")


def _member_problem(value: dict[str, Any], name: str, spec: Spec, at: str) -> str:
    """Return what is wrong with one member of an object; null and empty values count as missing."""
    key = name.removesuffix("!")
    place, inner = f"{at}.{key}" if at else key, value.get(key)
    if key not in value or (inner in (None, {}, []) and not isinstance(spec, ValueKind)):
        return f"{place} is missing" if name.endswith("!") else ""
    return _problem(inner, spec, place)
