"""Migration of files written by earlier versions: one format number for all files, one table of renamed keys.

config.toml has its format number in its first line, a safetensors file in its header, a JSON file of a run folder under
a key; a JSON file without one has the oldest format. Every reader passes the content through `migrate`, so all other
code knows only today's names. To rename a key, add an entry to `STEPS`; that raises `FORMAT`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .spelling import printable, quoted

#: The kinds of content: settings (in config.toml, and in "made_with" of a checkpoint's state), the tensors of a
#: checkpoint, the state in its header. The kind of a JSON file is its name.
SETTINGS, TENSORS, STATE = "config.toml", "tensors", "state"

#: The first step migrates format 1 to format 2, and so on: for each kind, old name -> new name. A name is a dotted path
#: ("training.steps"); for tensors, the old name is a regular expression and the new one its replacement.
STEPS: tuple[Mapping[str, Mapping[str, str]], ...] = ()

#: The format that is written. A file with a higher one is refused.
OLDEST = 1
FORMAT = OLDEST + len(STEPS)

#: Files of a run folder that had another name: new name -> old name.
FORMER_FILES = {"reproduction.json": "judgement.json"}

#: Settings whose value was fixed before they became settings, and is no longer the default: path -> that value. The
#: library writes every setting to config.toml, so a file of its own that lacks one was written before.
FORMER_VALUES = {"network.norm": "power-iteration"}

#: Columns of log.csv that had another name: old name -> new name.
FORMER_COLUMNS = {"rate": "learning_rate"}

#: The key of the format number in a JSON file.
KEY = "format"


def migrate(content: Mapping[str, Any], kind: str, written: int) -> dict[str, Any]:
    """Return the content of a file in today's names; `written` is the format of the file.

    >>> migrate({"steps": 3}, "state", FORMAT)
    {'steps': 3}
    """
    found = dict(content)
    for step in STEPS[written - OLDEST :]:
        names = step.get(kind, {})
        if chained := {*names} & {*names.values()}:
            raise ValueError(
                f"a step must not rename a key twice; got {', '.join(sorted(chained))} on both sides. Use two steps."
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


def with_former_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the library wrote to a file, with the former values of those that it lacks."""
    found = dict(settings)
    for name, value in FORMER_VALUES.items():
        path = name.split(".")
        found = found if _pop_path(found, path)[1] else _set_path(found, path, value)
    return found


def _rename_tensors(tensors: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    if len({*names.values()}) < len(names):
        raise ValueError(f"renamed tensors must have distinct names; two of {len(names)} would have the same.")
    return {names[name]: tensor for name, tensor in tensors.items()}


def read_format(header: Mapping[str, Any], path: Path) -> int:
    """Return the format number in a file's header; raise if this version cannot read it or another program wrote it."""
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
    """Return the content of a JSON file of a run folder in today's names, without the format number."""
    written = read_format({KEY: content.get(KEY, OLDEST)}, path)
    return migrate({name: value for name, value in content.items() if name != KEY}, path.name, written)


def with_format(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content to write to a JSON file, with the format number; the oldest format has none."""
    return dict(content) if FORMAT == OLDEST else {**content, KEY: FORMAT}


def header_line(version: str) -> str:
    """Return the first line of config.toml: the version that writes it, and the format."""
    return f"# iresnet {version}, format {FORMAT}"


def parse_header_line(text: str) -> dict[str, Any]:
    """Return the version and format in the first line of config.toml; empty if it is another line."""
    words = text.replace(",", "").split()
    if len(words) == 5 and words[:2] == ["#", "iresnet"] and words[4].isdecimal() and len(words[4]) < 10:
        return {"iresnet": words[2], KEY: int(words[4])}
    return {}


def _rename_key(content: Any, old: list[str], new: list[str]) -> Any:
    """Return nested tables with the value at path `old` moved to path `new`; unchanged if there is none."""
    if isinstance(content, list):
        return [_rename_key(item, old, new) for item in content]
    if not isinstance(content, dict) or old[0] not in content:
        return content
    if len(old) > 1 and len(new) > 1 and old[0] == new[0]:
        return {**content, old[0]: _rename_key(content[old[0]], old[1:], new[1:])}
    rest, values = _pop_path(content, old)
    return _set_path(rest, new, values[0]) if values else content


def _pop_path(content: Any, path: list[str]) -> tuple[Any, list[Any]]:
    """Return nested tables without the value at a path (and without tables this empties), and [value] or []."""
    if not isinstance(content, dict) or path[0] not in content:
        return content, []
    others = {name: value for name, value in content.items() if name != path[0]}
    if len(path) == 1:
        return others, [content[path[0]]]
    inner, values = _pop_path(content[path[0]], path[1:])
    return {**others, path[0]: inner} if inner or not values else others, values


def _set_path(content: Any, path: list[str], value: Any) -> Any:
    """Return nested tables with a value set at a path."""
    if len(path) == 1:
        return {**content, path[0]: value}
    inner = content.get(path[0], {})
    return {**content, path[0]: _set_path(inner if isinstance(inner, dict) else {}, path[1:], value)}
