"""Settings as TOML: frozen dataclasses in, frozen dataclasses out.

A table is a dataclass, a key is a field. What a file leaves out keeps its default; a key that no field has is refused,
with the nearest name; a value of another type is refused too. `dump` writes every field, so that a file read back years
later does not depend on defaults that have changed. Text that would take long to read, or more than Python's stack, is
refused: longer than `LONGEST` characters, keys of more than `DEEPEST` parts, deep nesting.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .spelling import hint, quoted, shorten

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

#: Characters of a file of settings; parts of a key, as in a.b.c, for which TOML readers take time squared.
LONGEST, DEEPEST = 2**20, 32

#: A part of a key, and the dot after it.
PART = re.compile(r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*(\.)?[ \t]*""")

TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", type(None): "nothing"}


def parse(cls: type[T], text: str, where: str = "the settings") -> T:
    """Settings of class `cls` from the text of a TOML file; `where` names the file in messages."""
    return from_mapping(cls, parse_tables(text, where), where)


def parse_tables(text: str, where: str = "the settings") -> dict[str, Any]:
    """The nested tables of plain values in the text of a TOML file."""
    try:
        return _load_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where} is not valid TOML: {error}. Mend that line.") from None
    except ValueError as error:
        raise ValueError(f"{where} cannot be read as settings: {error}.") from None


def _load_toml(text: str) -> dict[str, Any]:
    """The content of TOML text, unless it was made to be slow or deep."""
    if len(text) > LONGEST:
        raise ValueError(f"it must have at most {LONGEST:,} characters")
    if _longest_key(text) > DEEPEST:
        raise ValueError(f"a key must have at most {DEEPEST} parts with dots between them; got {_longest_key(text):,}")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its lists or tables are nested too deep") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # of Python's int
        raise ValueError("a number has too many digits") from None


def _longest_key(text: str) -> int:
    """How many parts the longest key has; what looks like one, in a comment, counts too.

    >>> _longest_key('a = 1.5'), _parts('[a . "b".c]')
    (2, 3)
    """
    longest = parts = end = 0
    for found in PART.finditer(text):
        parts = parts + 1 if found.start() == end else 1
        longest, end = max(longest, parts), found.end() if found[1] else -1
    return longest


def from_mapping(cls: type[T], content: Mapping[str, Any], where: str = "the settings", prefix: str = "") -> T:
    """Settings of class `cls` from nested tables of plain values."""
    hints, fields = _hints(cls), [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    values = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if key not in fields:
            raise ValueError(f"{where}: there is no setting {quoted(name)}. {hint(key, sorted(fields))}")
        values[key] = _read_value(hints[key], value, where, name)
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


@cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of fields; one that lists its words is a string, and `allowed` looks at which."""
    return {name: str if get_origin(kind) is Literal else kind for name, kind in get_type_hints(cls).items()}


def _read_value(kind: Any, value: Any, where: str, name: str) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{where}: {name} is a table of settings; got {quoted(value)}. Write [{name}] and its keys below."
            )
        return from_mapping(kind, value, where, f"{name}.")  # type: ignore[arg-type]
    try:
        return _convert(kind, value)
    except TypeError:
        words = f"{name} must be {_describe_type(kind)}; got {quoted(value)}.{_example(kind, value, name)}"
        raise ValueError(f"{where}: {words}") from None
    except OverflowError:
        raise ValueError(f"{where}: {name} must fit 64 bits; got {quoted(value)}.") from None


def _example(kind: Any, value: Any, name: str) -> str:
    """How a list is written, where its entries were given without brackets."""
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
        return " or ".join(_describe_type(k) for k in arguments)
    return TYPE_NAMES.get(kind, str(kind))


def to_mapping(settings: Any) -> dict[str, Any]:
    """Nested tables of plain values; fields that are None are left out, since TOML has no word for them."""
    content: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            content[field.name] = to_mapping(value)
        elif value is not None:
            content[field.name] = list(value) if isinstance(value, tuple) else value
    return content


def dump(settings: Any) -> str:
    """The TOML text of settings, every field written out."""
    import tomli_w

    text = tomli_w.dumps(to_mapping(settings))
    # Lists are short and hold numbers: one line each reads better than one line an entry.
    return re.sub(r"\[\n([^\[\]]*)\]", lambda m: f"[{', '.join(m[1].replace(',', ' ').split())}]", text)


def override(settings: T, *assignments: str) -> T:
    """Settings with values replaced: "training.steps=500", or "steps=500" where only one table has that key.

    All are replaced before any rule is checked that joins several settings, so their order does not matter.

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


def setting_path(cls: Any, assignment: str) -> str:
    """The whole name of the setting that an assignment is about: "training.steps" for "steps=500"."""
    key, equals, _ = assignment.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ValueError(f"a setting is given as key=value; got {quoted(assignment)}. Example: training.steps=500.")
    paths = list(_setting_types(cls))
    found = [p for p in paths if p == key] or [p for p in paths if p.rsplit(".", 1)[-1] == key]
    if not found:
        words = paths if "." in key else sorted({p.rsplit(".", 1)[-1] for p in paths})
        raise ValueError(f"there is no setting {quoted(key)}. {hint(key, words)}")
    if len(found) > 1:
        raise ValueError(f"{key!r} could be any of {', '.join(found)}. Write the one you mean.")
    return found[0]


def _assign(content: dict[str, Any], cls: Any, assignment: str) -> None:
    """Put one value into nested tables; one of another type is refused here, where the assignment is known."""
    path, text = setting_path(cls, assignment), assignment.partition("=")[2].strip()
    *tables, last = path.split(".")
    for name in tables:
        content = content[name]
    value = _parse_value(text)
    # Where a string is asked for, 2020 and true are strings too: a column may have such a name.
    content[last] = value if isinstance(value, str) or not isinstance(content.get(last), str) else text
    _read_value(_setting_types(cls)[path], content[last], f"--set {shorten(assignment)}", path)


def _setting_types(cls: Any, prefix: str = "") -> dict[str, Any]:
    """The type of every setting, by its whole name."""
    hints = _hints(cls)
    kinds: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        kind, name = hints[field.name], f"{prefix}{field.name}"
        kinds |= _setting_types(kind, f"{name}.") if dataclasses.is_dataclass(kind) else {name: kind}
    return kinds


def _parse_value(text: str) -> Any:
    """A TOML value; what is not one is taken as a string, so that names and paths need no quotes."""
    try:
        content = _load_toml(f"value = {text}")
    except ValueError:
        return text
    return content["value"] if len(content) == 1 else text  # a line break would begin another setting
