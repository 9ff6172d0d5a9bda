"""Read presets and settings files: TOML tables that may extend others.

In the files of this folder every table is a preset, or, without `about`, a part that presets share. A key that a table
omits comes from the tables that it `extends` (a name, or a list of names in which later ones win), else it has the
default. A user's settings file is one such table; its `extends` names a preset.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from .. import config, migration
from ..spelling import parts_hint, quoted, with_path
from .experiment import Experiment

#: The preset files, in the order of `iresnet presets`, and all their tables by name.
GROUPS = {
    group: config.parse_tables(
        files(__package__).joinpath(f"{group}.toml").read_text(encoding="utf-8"), f"{group}.toml"
    )
    for group in ("general", "flows", "classifiers", "others")
}
TABLES: dict[str, dict[str, Any]] = {name: table for group in GROUPS.values() for name, table in group.items()}

#: The first words of presets' names, by which they are listed, and the heading of those that begin otherwise.
KINDS, OTHERS = ("digits", "images", "points", "table", "toy", "mnist", "cifar10"), "cifar10, residual networks"


def resolve_extends(table: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a table of settings into the tables that it extends; `about` is not inherited."""
    names, content = table.get("extends", []), dict[str, Any]()
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"extends must be the name of a preset, or a list of names; got {quoted(names)}.")
    for name in dict.fromkeys(names):
        if name not in TABLES:
            raise ValueError(unknown_preset(name))
        content = _merge(content, resolve_extends(TABLES[name]))
    content.pop("about", None)
    return _merge(content, {key: value for key, value in table.items() if key != "extends"})


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two nested tables; values of the second win."""
    nested = {
        k: _merge(below[k], v) for k, v in above.items() if isinstance(v, dict) and isinstance(below.get(k), dict)
    }
    return {**below, **above, **nested}


def unknown_preset(name: str) -> str:
    """Return the message for an unknown preset, with a suggestion."""
    return f"unknown preset {name!r}. {parts_hint(name, PRESETS, 'iresnet presets')}"


PRESETS = {
    name: config.from_mapping(Experiment, {"name": name, **resolve_extends(table)}, f"the preset {name}")
    for name, table in TABLES.items()
    if "about" in table
}


def grouped() -> dict[str, list[str]]:
    """Return the names of the presets by the data they are for, the first word of a name, sorted.

    Names without such a word are those of the paper's classifiers of CIFAR images.
    """
    kinds = {kind: sorted(n for n in PRESETS if n.startswith(f"{kind}-")) for kind in KINDS}
    return {**kinds, OTHERS: sorted(set(PRESETS) - {name for names in kinds.values() for name in names})}


def read(path: str | Path) -> Experiment:
    """Read an experiment from a TOML file; omitted settings come from the preset it extends, or are the defaults."""
    try:
        with Path(path).open(encoding="utf-8-sig") as file:  # Windows editors write a byte order mark
            text = file.read(config.LONGEST + 1)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file. Give a TOML file of settings.") from None
    except OSError as error:
        raise with_path(error, path) from None
    header = migration.parse_header_line(text.partition("\n")[0])
    return parse_experiment(text, Path(path), migration.read_format(header, Path(path)) if header else None)


def parse_experiment(text: str, path: Path, written: int | None) -> Experiment:
    """Parse an experiment from the text of a file, which the library wrote in format `written`, or a user (None)."""
    content = config.parse_tables(text, str(path))
    if written is not None:
        content = migration.with_former_values(migration.migrate(content, migration.SETTINGS, written))
    try:
        content = resolve_extends(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return config.from_mapping(Experiment, content, str(path))
