"""Readers for the files of a run folder, with a clear error for a damaged one: settings, schema, JSON, log.csv."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import migration
from ..data import Schema
from ..presets import Experiment
from ..presets.reading import parse_experiment
from . import contents

#: Maximum nesting depth of a JSON file; the deepest of ours has six levels.
MAX_DEPTH = 32

#: The largest step: floats represent integers exactly up to here.
LARGEST_STEP = 2**53


def read_text(path: Path, remedy: str) -> str:
    """Return the text of a UTF-8 file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: it is not UTF-8 text ({error.reason}). {remedy}") from None
    except OSError as error:  # a failing disk: the original message does not name the file
        raise OSError(f"{path} cannot be read: {error.strerror or error}. {remedy}") from None


def read_experiment(path: Path) -> Experiment:
    """Return the experiment in config.toml."""
    header, _, body = read_text(path, "Train again.").partition("\n")
    written = migration.read_format(migration.parse_header_line(header), path)
    try:
        return parse_experiment(body, path, written)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply. Train again.") from None


def read_schema(path: Path) -> Schema:
    """Return the schema in schema.json."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Schema.from_dict(migration.migrate_json(content, path) if isinstance(content, dict) else content)
    except (OSError, ValueError, RecursionError) as error:
        why = str(error).rstrip(".")
        raise ValueError(f"{path} cannot be read: {why}. Train again.") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, checked against its schema; numbers that are not finite become None."""
    remedy = "Remove it; it can be recreated."
    source = read_text(path, remedy)
    try:
        content = json.loads(source, parse_int=_int_or_float, parse_float=_finite_float, parse_constant=_finite_float)
        why = "" if isinstance(content, dict) else "it is not a JSON object"
        why = why or ("it is nested too deeply" if _depth(content) > MAX_DEPTH else "")
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else f"{error!s:.120}"
    if why:
        raise ValueError(f"{path} is damaged: {why}. {remedy}")
    content = migration.migrate_json(content, path)
    contents.check_contents(content, path, remedy)
    return content


def _finite_float(digits: str) -> float | None:
    return value if math.isfinite(value := float(digits)) else None


def _int_or_float(digits: str) -> float | None:
    return int(digits) if len(digits) < 20 else _finite_float(digits)


def _depth(content: object) -> int:
    """Return the nesting depth, level by level, so that deep nesting cannot overflow the stack."""
    level, depth = [content], 0
    while level:
        inner = [v for v in level if isinstance(v, dict | list)]
        level = [w for v in inner for w in (v.values() if isinstance(v, dict) else v)]
        depth += bool(inner)
    return depth


def read_log(path: Path) -> list[dict[str, float | None]]:
    """Return the rows of log.csv, with today's column names; every cell is a number or empty, and every row has a step.

    Metrics of a diverged run may be infinite or NaN.
    """
    remedy = "Remove it; the model does not need it."
    content = read_text(path, remedy)
    try:
        reader = csv.DictReader(io.StringIO(content), strict=True)
        reader.fieldnames = column_names(reader.fieldnames or [])
        rows = list(reader)
        found = [{key: float(value) if value else None for key, value in row.items()} for row in rows]
    except (ValueError, TypeError, csv.Error) as error:
        raise ValueError(f"{path} is damaged: {error!s:.120}. {remedy}") from None
    for row in rows:
        parse_step(row.get("step") or "", path, remedy)
    return found


def column_names(header: Sequence[str]) -> list[str]:
    """Return the columns of a log.csv header in today's names: earlier versions wrote `rate` for `learning_rate`."""
    return [migration.FORMER_COLUMNS.get(name, name) for name in header]


def parse_step(cell: str, path: Path, remedy: str) -> float:
    """Return the step in a cell of log.csv."""
    try:
        step = float(cell)
    except ValueError:
        step = math.nan
    if not 0 <= step <= LARGEST_STEP:
        raise ValueError(
            f"{path} is damaged: a step must be a number from 0 to {LARGEST_STEP}; got {cell!r:.40}. {remedy}"
        )
    return step
