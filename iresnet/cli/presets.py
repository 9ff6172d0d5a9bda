"""`iresnet presets`: list the named experiments, or print one as TOML."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from .. import config
from ..data import names
from ..presets import PRESETS, Experiment, find, grouped, presets_for
from ..run import shipped
from .completion import complete_preset
from .console import console, result, table, wants_json


def presets(
    name: Annotated[
        str | None, typer.Argument(help="The preset to print as TOML.", autocompletion=complete_preset)
    ] = None,
) -> None:
    """List the presets, or print one as a TOML file to edit and train.

    Example: iresnet presets digits-hybrid > mine.toml; iresnet train mine.toml

    Example: iresnet presets iresnet164-c0.7
    """
    if name in names():
        commands = "; ".join(f"iresnet presets {suitable}" for suitable in presets_for(name))
        raise ValueError(f"{name} is a dataset, not a preset. The presets for it: {commands}")
    if name is not None:
        experiment = find(name)
        if wants_json():
            result(asdict(experiment))
        else:
            typer.echo(config.dump(experiment), nl=False)
        return
    listing = [{"name": e.name, "group": group, "about": e.about} for group, e in _sorted()]
    models = shipped()
    result({"presets": listing, "models": models}, _table())
    screen = console()
    screen.say(
        "NAME-cX is the preset NAME with the Lipschitz constant of every layer below X. Example: iresnet train "
        "iresnet164-c0.7",
    )
    if models:
        screen.say(
            f"Trained models that come with the library and are used like run folders: {', '.join(models)}. "
            f"Example: iresnet certify {models[0]}",
        )


def _sorted() -> list[tuple[str, Experiment]]:
    """Return all presets, each with its group, sorted by name within a group."""
    return [(group, PRESETS[name]) for group, members in grouped().items() for name in members]


def _table() -> Table:
    made = table("preset", "description")
    made.columns[1].justify = "left"
    for group, members in grouped().items():
        made.add_row(Text(group, style="bold"), "")
        for name in members:
            made.add_row(f"  {name}", PRESETS[name].about)
    return made
