"""Files that earlier versions wrote, read in the form of today: one number for all that is written, one table of steps.

config.toml names its format in its first line, a safetensors file in its header, a JSON file of a run folder by a key;
a JSON file without one has the oldest. Every reader passes what it read through `migrate`, and everything behind that
knows today's names alone. A renaming is one entry of `STEPS`, which raises `FORMAT` by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .spelling import printable, quoted

#: What has names: settings (the same in config.toml and in "made_with" of a checkpoint's state), the tensors of a file,
#: the state in its header, and each JSON file by its own name.
SETTINGS, TENSORS, STATE = "config.toml", "tensors", "state"

#: The first step leads from format 1 to format 2, and so on: of each kind, old names and what they are called now.
#: A name is a path with dots ("training.steps"); of tensors it is a regular expression, and what takes its place.
STEPS: tuple[Mapping[str, Mapping[str, str]], ...] = ()

#: The format of what is written. A file of a higher one is refused.
OLDEST = 1
FORMAT = OLDEST + len(STEPS)

#: Files of a run folder that had another name, by the name that they have now.
FORMER_FILES = {"reproduction.json": "judgement.json"}

#: Where a JSON file says its format.
KEY = "format"


def migrate(content: Mapping[str, Any], kind: str, written: int) -> dict[str, Any]:
    """What a file of some kind holds, in today's names; `written` is the format that it has.

    >>> migrate({"steps": 3}, "state", FORMAT)
    {'steps': 3}
    """
    found = dict(content)
    for step in STEPS[written - OLDEST :]:
        names = step.get(kind, {})
        if chained := {*names} & {*names.values()}:
            raise ValueError(
                f"one step must not rename twice; got {', '.join(sorted(chained))} on both sides. Use two."
            )
        for old, new in names.items():
            if kind == TENSORS:
                found = _rename_tensors(found, {name: re.sub(old, new, name) for name in found})
            else:
                found = _rename_key(found, old.split("."), new.split("."))
        if kind == STATE and isinstance(made := found.get("made_with"), dict):
            settings = step.get(SETTINGS, {})
            found["made_with"] = {settings.get(name, name): value for name, value in made.items()}
    return found


def _rename_tensors(tensors: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    if len({*names.values()}) < len(names):
        raise ValueError(f"tensors must keep names of their own; two of {len(names)} would get the same.")
    return {names[name]: tensor for name, tensor in tensors.items()}


def read_format(header: Mapping[str, Any], path: Path) -> int:
    """The format that a file says it has; one that cannot be read here is refused, and so is another program's file."""
    found = header.get(KEY)
    if type(found) is int and OLDEST <= found <= FORMAT:
        return found
    later = "a later version" if type(found) is int and found > FORMAT else "another program"
    writer = f"iresnet {printable(str(header['iresnet']))}" if "iresnet" in header else later
    reads = f"format {FORMAT}" if FORMAT == OLDEST else f"formats {OLDEST} to {FORMAT}"
    raise ValueError(
        f"{path} was written by {writer} in format {quoted(found)}; this version reads {reads}. "
        "Use the version that wrote it, or train again."
    )


def migrate_json(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What a JSON file of a run folder holds, in today's names and without its number."""
    written = read_format({KEY: content.get(KEY, OLDEST)}, path)
    return migrate({name: value for name, value in content.items() if name != KEY}, path.name, written)


def with_format(content: Mapping[str, Any]) -> dict[str, Any]:
    """What a JSON file is to hold, with the number of its format; the oldest goes without."""
    return dict(content) if FORMAT == OLDEST else {**content, KEY: FORMAT}


def header_line(version: str) -> str:
    """The first line of a config.toml: which version wrote it, in which format."""
    return f"# iresnet {version}, format {FORMAT}"


def parse_header_line(text: str) -> dict[str, Any]:
    """What such a line says; nothing where it is another."""
    words = text.replace(",", "").split()
    if len(words) == 5 and words[:2] == ["#", "iresnet"] and words[4].isdecimal() and len(words[4]) < 10:
        return {"iresnet": words[2], KEY: int(words[4])}
    return {}


def _rename_key(content: Any, old: list[str], new: list[str]) -> Any:
    """Nested tables in which a value has got another place; where there is none, they are as they were."""
    if isinstance(content, list):
        return [_rename_key(item, old, new) for item in content]
    if not isinstance(content, dict) or old[0] not in content:
        return content
    if len(old) > 1 and len(new) > 1 and old[0] == new[0]:
        return {**content, old[0]: _rename_key(content[old[0]], old[1:], new[1:])}
    rest, values = _pop_path(content, old)
    return _set_path(rest, new, values[0]) if values else content


def _pop_path(content: Any, path: list[str]) -> tuple[Any, list[Any]]:
    """Nested tables without what is at a path, nor tables that held nothing else; and that, if it is there."""
    if not isinstance(content, dict) or path[0] not in content:
        return content, []
    others = {name: value for name, value in content.items() if name != path[0]}
    if len(path) == 1:
        return others, [content[path[0]]]
    inner, values = _pop_path(content[path[0]], path[1:])
    return {**others, path[0]: inner} if inner or not values else others, values


def _set_path(content: Any, path: list[str], value: Any) -> Any:
    """Nested tables with a value at a path."""
    if len(path) == 1:
        return {**content, path[0]: value}
    inner = content.get(path[0], {})
    return {**content, path[0]: _set_path(inner if isinstance(inner, dict) else {}, path[1:], value)}
