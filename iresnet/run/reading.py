"""Files of a run folder, read as what they must be: text, a JSON object, a table of numbers. Others get a sentence."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

from .. import migration
from . import contents

#: How deep a JSON file may be nested; the deepest of ours has six levels.
DEPTH = 32

#: The last step there can be: whole numbers are exact up to here.
LAST = 2**53


def read_text(path: Path, remedy: str) -> str:
    """The text of a file in UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: it is no text in UTF-8 ({error.reason}). {remedy}") from None
    except OSError as error:  # of a failing disk, which does not say what was read
        raise OSError(f"{path} cannot be read: {error.strerror or error}. {remedy}") from None


def read_json_object(path: Path, remedy: str = "Remove it; it can be made again.") -> dict[str, Any]:
    """The object in a JSON file; None for numbers that are not finite, and what its readers expect of it is checked."""
    source = read_text(path, remedy)
    try:
        content = json.loads(source, parse_int=_int_or_float, parse_float=_finite_float, parse_constant=_finite_float)
        why = "" if isinstance(content, dict) else "it is no object"
        why = why or ("it is nested too deeply" if _depth(content) > DEPTH else "")
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
    """How deep values are nested, by levels, so that no depth is too deep to be measured."""
    level, depth = [content], 0
    while level:
        inner = [v for v in level if isinstance(v, dict | list)]
        level = [w for v in inner for w in (v.values() if isinstance(v, dict) else v)]
        depth += bool(inner)
    return depth


def read_log(path: Path) -> list[dict[str, float | None]]:
    """The rows of a log: every cell a number or empty, and a step in each. What diverged may be infinite, or NaN."""
    remedy = "Remove it; the model does not need it."
    content = read_text(path, remedy)
    try:
        rows = list(csv.DictReader(io.StringIO(content), strict=True))
        found = [{key: float(value) if value else None for key, value in row.items()} for row in rows]
    except (ValueError, TypeError, csv.Error) as error:
        raise ValueError(f"{path} is damaged: {error!s:.120}. {remedy}") from None
    for row in rows:
        parse_step(row.get("step") or "", path, remedy)
    return found


def parse_step(cell: str, path: Path, remedy: str) -> float:
    """The number of steps that a cell of a log holds."""
    try:
        step = float(cell)
    except ValueError:
        step = math.nan
    if not 0 <= step <= LAST:
        raise ValueError(f"{path} is damaged: a step must be a number from 0 to {LAST}; got {cell!r:.40}. {remedy}")
    return step
