"""Settings as TOML: frozen dataclasses in, frozen dataclasses out.

A table is a dataclass, a key is a field. What a file leaves out keeps its default; a key that no field has is refused,
with the nearest name; a value of another type is refused too. `dump` writes every field, so that a file read back years
later does not depend on defaults that have changed.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .spelling import hint

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", type(None): "nothing"}


def parse(cls: type[T], text: str, where: str = "the settings") -> T:
    """Settings of class `cls` from the text of a TOML file; `where` names the file in messages."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where} is not valid TOML: {error}. Mend that line.") from None
    return from_mapping(cls, content, where)


def from_mapping(cls: type[T], content: Mapping[str, Any], where: str = "the settings", prefix: str = "") -> T:
    """Settings of class `cls` from nested tables of plain values."""
    hints, fields = get_type_hints(cls), [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    values = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if key not in fields:
            raise ValueError(f"{where}: there is no setting {name!r}. {hint(key, sorted(fields))}")
        values[key] = _value(hints[key], value, where, name)
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _value(kind: Any, value: Any, where: str, name: str) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{where}: {name} is a table of settings; got {value!r}. Write [{name}] and its keys below."
            )
        return from_mapping(kind, value, where, f"{name}.")  # type: ignore[arg-type]
    try:
        return _convert(kind, value)
    except TypeError:
        words = f"{name} must be {_words(kind)}; got {value!r}.{_example(kind, value, name)}"
        raise ValueError(f"{where}: {words}") from None


def _example(kind: Any, value: Any, name: str) -> str:
    """How a list is written, where its entries were given without brackets."""
    text = f"[{str(value).strip('()')}]"
    try:
        _convert(kind, _literal(text))
    except TypeError:
        return ""
    return f" Example: {name}={text}" if get_origin(kind) is tuple else ""


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
    elif kind is float and type(value) in (int, float):
        return float(value)
    elif type(value) is kind:
        return value
    raise TypeError


def _words(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        return f"a list of {count}entries, each {_words(arguments[0])}"
    if origin in (Union, types.UnionType):
        return " or ".join(_words(k) for k in arguments)
    return WORDS.get(kind, str(kind))


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
    return from_mapping(type(settings), content, " ".join(f"--set {a}" for a in assignments) or "the settings")


def place(cls: Any, assignment: str) -> str:
    """The whole name of the setting that an assignment is about: "training.steps" for "steps=500"."""
    key, equals, _ = assignment.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ValueError(f"a setting is given as key=value; got {assignment!r}. Example: training.steps=500.")
    paths = list(_kinds(cls))
    found = [p for p in paths if p == key] or [p for p in paths if p.rsplit(".", 1)[-1] == key]
    if not found:
        words = paths if "." in key else sorted({p.rsplit(".", 1)[-1] for p in paths})
        raise ValueError(f"there is no setting {key!r}. {hint(key, words)}")
    if len(found) > 1:
        raise ValueError(f"{key!r} could be any of {', '.join(found)}. Write the one you mean.")
    return found[0]


def _assign(content: dict[str, Any], cls: Any, assignment: str) -> None:
    """Put one value into nested tables; one of another type is refused here, where the assignment is known."""
    path, text = place(cls, assignment), assignment.partition("=")[2].strip()
    *tables, last = path.split(".")
    for name in tables:
        content = content[name]
    value = _literal(text)
    # Where a string is asked for, 2020 and true are strings too: a column may have such a name.
    content[last] = value if isinstance(value, str) or not isinstance(content.get(last), str) else text
    _value(_kinds(cls)[path], content[last], f"--set {assignment}", path)


def _kinds(cls: Any, prefix: str = "") -> dict[str, Any]:
    """The type of every setting, by its whole name."""
    hints = get_type_hints(cls)
    kinds: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        kind, name = hints[field.name], f"{prefix}{field.name}"
        kinds |= _kinds(kind, f"{name}.") if dataclasses.is_dataclass(kind) else {name: kind}
    return kinds


def _literal(text: str) -> Any:
    """A TOML value; what is not one is taken as a string, so that names and paths need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
