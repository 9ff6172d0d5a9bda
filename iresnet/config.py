"""Read and write settings: frozen dataclasses as TOML.

A table is a dataclass, a key is a field. Keys that are omitted keep their defaults; an unknown key is refused, with the
nearest name; so is a value of another type. `dump` writes every field, so that a file read years later does not depend
on defaults that have changed. Text that would take too long to parse, or overflow Python's stack, is refused: more than
`LONGEST` characters, keys of more than `DEEPEST` parts, deep nesting.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .spelling import hint, quoted, shorten

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

#: Maximum characters in a file of settings; maximum parts of a key such as a.b.c, which takes quadratic time to parse.
LONGEST, DEEPEST = 2**20, 32

#: A part of a key, and the dot after it.
PART = re.compile(r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*(\.)?[ \t]*""")

TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string", type(None): "nothing"}


#: Names of settings in other libraries.
ABBREVIATIONS = {"lr": "learning_rate", "batch_size": "batch", "max_steps": "steps", "max_epochs": "epochs"}


def parse(cls: type[T], text: str, where: str = "the settings") -> T:
    """Parse the text of a TOML file into settings of class `cls`; `where` names the file in messages."""
    return from_mapping(cls, parse_tables(text, where), where)


def parse_tables(text: str, where: str = "the settings") -> dict[str, Any]:
    """Parse the text of a TOML file into nested dictionaries of plain values."""
    try:
        return _load_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where} is not valid TOML: {error}. Fix that line.") from None
    except ValueError as error:
        raise ValueError(f"{where} cannot be read as settings: {error}.") from None


def _load_toml(text: str) -> dict[str, Any]:
    """Parse TOML text, unless it would be too slow or too deep to parse."""
    if len(text) > LONGEST:
        raise ValueError(f"it must have at most {LONGEST:,} characters")
    if _longest_key(text) > DEEPEST:
        raise ValueError(f"a key must have at most {DEEPEST} parts separated by dots; got {_longest_key(text):,}")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its lists or tables are nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # from Python's int
        raise ValueError("a number has too many digits") from None


def _longest_key(text: str) -> int:
    """Return the number of parts of the longest key; text in a comment that looks like one counts too.

    >>> _longest_key('a = 1.5'), _longest_key('[a . "b".c]')
    (2, 3)
    """
    longest = parts = end = 0
    for found in PART.finditer(text):
        parts = parts + 1 if found.start() == end else 1
        longest, end = max(longest, parts), found.end() if found[1] else -1
    return longest


def from_mapping(cls: type[T], content: Mapping[str, Any], where: str = "the settings", prefix: str = "") -> T:
    """Build settings of class `cls` from nested dictionaries of plain values."""
    hints, fields = _hints(cls), [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    values = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if key not in fields:
            raise ValueError(f"{where}: unknown setting {quoted(name)}. {hint(key, sorted(fields))}")
        values[key] = _read_value(hints[key], value, where, name)
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


@cache
def _hints(cls: type) -> dict[str, Any]:
    """Return the types of the fields; a `Literal` counts as a string, whose values `allowed` checks."""
    return {name: str if get_origin(kind) is Literal else kind for name, kind in get_type_hints(cls).items()}


def _read_value(kind: Any, value: Any, where: str, name: str) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{where}: {name} must be a table of settings; got {quoted(value)}. Write [{name}], then its keys."
            )
        return from_mapping(kind, value, where, f"{name}.")  # type: ignore[arg-type]
    try:
        return _convert(kind, value)
    except TypeError:
        message = f"{name} must be {_describe_type(kind)}; got {quoted(value)}.{_example(kind, value, name)}"
        raise ValueError(f"{where}: {message}") from None
    except OverflowError:
        raise ValueError(f"{where}: {name} must fit 64 bits; got {quoted(value)}.") from None


def _example(kind: Any, value: Any, name: str) -> str:
    """Return an example of the list syntax, if the value would be a valid list with brackets; otherwise empty."""
    if get_origin(kind) is not tuple or not isinstance(value, str | int | float):
        return ""
    text = f"[{str(value).strip('()')}]"
    try:
        _convert(kind, _parse_value(text))
    except (TypeError, OverflowError):
        return ""
    return f" Example: {name}={shorten(text)}"


def _convert(kind: Any, value: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple and isinstance(value, list | tuple):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) == len(value):
            return tuple(_convert(k, v) for k, v in zip(kinds, value, strict=True))
    elif origin in (Union, types.UnionType):
        for option in arguments:
            try:
                return _convert(option, value)
            except TypeError:
                continue
    elif kind is float and type(value) in (int, float) and not math.isnan(value):
        return float(value)
    elif type(value) is kind and kind is not float:
        if kind is int and not -(2**63) <= value < 2**63:
            raise OverflowError
        return value
    raise TypeError


def _describe_type(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        return f"a list of {count}entries, each {_describe_type(arguments[0])}"
    if origin in (Union, types.UnionType):
        return " or ".join(_describe_type(k) for k in arguments if not (k is int and float in arguments))
    return TYPE_NAMES.get(kind, str(kind))


def to_mapping(settings: Any) -> dict[str, Any]:
    """Convert settings to nested dictionaries of plain values; None is omitted, since TOML cannot represent it."""
    content: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            content[field.name] = to_mapping(value)
        elif value is not None:
            content[field.name] = list(value) if isinstance(value, tuple) else value
    return content


def dump(settings: Any) -> str:
    """Return settings as TOML text, every field written out."""
    import tomli_w

    text = tomli_w.dumps(to_mapping(settings))
    # Lists of numbers are short: one line per list reads better than one line per entry.
    return re.sub(r"\[\n([^\[\]\"]*)\]", lambda m: f"[{', '.join(m[1].replace(',', ' ').split())}]", text)


def override(settings: T, *assignments: str) -> T:
    """Return settings with values replaced: "training.steps=500", or "steps=500" if only one table has that key.

    All values are replaced before rules that involve several settings are checked, so their order does not matter.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Settings:
    ...     steps: int = 1
    >>> override(Settings(), "steps=500")
    Settings(steps=500)
    """
    content = to_mapping(settings)
    for assignment in assignments:
        _assign(content, type(settings), assignment)
    return from_mapping(type(settings), content, " ".join(f"--set {shorten(a)}" for a in assignments) or "the settings")


def setting_names(cls: Any) -> set[str]:
    """Return the names of all settings, without their sections."""
    return {path.rsplit(".", 1)[-1] for path in _setting_types(cls)}


def setting_path(cls: Any, assignment: str) -> str:
    """Return the full name of the setting that an assignment changes: "training.steps" for "steps=500"."""
    key, equals, _ = assignment.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ValueError(
            f"a setting must be given as key=value; got {quoted(assignment)}. Example: training.steps=500."
        )
    paths = list(_setting_types(cls))
    found = [p for p in paths if p == key] or [p for p in paths if p.rsplit(".", 1)[-1] == key]
    if not found:
        words = paths if "." in key else sorted(setting_names(cls))
        meant = ABBREVIATIONS.get(key.rsplit(".", 1)[-1], key)
        raise ValueError(f"unknown setting {quoted(key)}. {hint(meant, words)}")
    if len(found) > 1:
        raise ValueError(f"{key!r} is ambiguous: it could be {', '.join(found)}. Give the full name.")
    return found[0]


def _assign(content: dict[str, Any], cls: Any, assignment: str) -> None:
    """Set one value in nested tables; check its type here, so that the message can quote the assignment."""
    path, text = setting_path(cls, assignment), assignment.partition("=")[2].strip()
    *tables, last = path.split(".")
    for name in tables:
        content = content[name]
    value = _parse_value(text)
    # If the setting is a string, 2020 and true are strings too: a column may have such a name.
    content[last] = value if isinstance(value, str) or not isinstance(content.get(last), str) else text
    _read_value(_setting_types(cls)[path], content[last], f"--set {shorten(assignment)}", path)


def _setting_types(cls: Any, prefix: str = "") -> dict[str, Any]:
    """Return the type of every setting, by its full name."""
    hints = _hints(cls)
    kinds: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        kind, name = hints[field.name], f"{prefix}{field.name}"
        kinds |= _setting_types(kind, f"{name}.") if dataclasses.is_dataclass(kind) else {name: kind}
    return kinds


def _parse_value(text: str) -> Any:
    """Parse a TOML value; anything else is a string, so that names and paths need no quotes."""
    try:
        content = _load_toml(f"value = {text}")
    except ValueError:
        return text
    return content["value"] if len(content) == 1 else text  # text with a line break may define another key


def flatten(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting of nested tables with its full name.

    >>> dict(flatten({"seed": 0, "training": {"steps": 5}}))
    {'seed': 0, 'training.steps': 5}
    """
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
