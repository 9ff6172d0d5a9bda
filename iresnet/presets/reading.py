"""Presets and files of settings: TOML whose tables may extend others.

In a file of this folder every table is a preset, or a part of several where it has no `about`. What a table leaves out
is as in those that it `extends`, a name or a list of names of which the later ones win, and otherwise the default. A
user's own file is one such table: `extends` names a preset there.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from .. import config, migration
from ..spelling import named, parts_hint, quoted
from .experiment import Experiment

#: The files of presets, in the order of `iresnet presets`, and the tables of all of them by name.
GROUPS = {
    group: config.tables(files(__package__).joinpath(f"{group}.toml").read_text(encoding="utf-8"), f"{group}.toml")
    for group in ("general", "flows", "classifiers", "rivals")
}
TABLES: dict[str, dict[str, Any]] = {name: table for group in GROUPS.values() for name, table in group.items()}


def extended(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table of settings over those that it extends; what it is about is its own alone."""
    names, content = table.get("extends", []), dict[str, Any]()
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"extends must be the name of a preset, or a list of names; got {quoted(names)}.")
    for name in dict.fromkeys(names):
        if name not in TABLES:
            raise ValueError(unknown(name))
        content = _over(content, extended(TABLES[name]))
    content.pop("about", None)
    return _over(content, {key: value for key, value in table.items() if key != "extends"})


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both tables in one; a value of the second hides one of the first, table by table."""
    nested = {k: _over(below[k], v) for k, v in above.items() if isinstance(v, dict) and isinstance(below.get(k), dict)}
    return {**below, **above, **nested}


def unknown(name: str) -> str:
    """What is said of a preset that there is not."""
    return f"there is no preset {name!r}. {parts_hint(name, PRESETS, 'iresnet presets')}"


PRESETS = {
    name: config.from_mapping(Experiment, {"name": name, **extended(table)}, f"the preset {name}")
    for name, table in TABLES.items()
    if "about" in table
}


def read(path: str | Path) -> Experiment:
    """The experiment in a TOML file; what the file leaves out is as in the preset it extends, or the default."""
    try:
        with Path(path).open(encoding="utf-8-sig") as file:  # as Windows' editor saves it, with a mark before the text
            text = file.read(config.LONGEST + 1)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file. Give a TOML file of settings.") from None
    except OSError as error:
        raise named(error, path) from None
    header = migration.of_line(text.partition("\n")[0])
    return parse(text, Path(path), migration.written_in(header, Path(path)) if header else migration.FORMAT)


def parse(text: str, path: Path, written: int) -> Experiment:
    """The experiment in the text of a file that has this format."""
    content = migration.migrated(config.tables(text, str(path)), migration.SETTINGS, written)
    try:
        content = extended(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return config.from_mapping(Experiment, content, str(path))
