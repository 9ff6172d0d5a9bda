"""`iresnet presets`: list the named experiments, or print one as TOML."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import config
from ..data import names
from ..presets import PRESETS, find, presets_for
from ..run import shipped
from .console import console, table


def presets(
    name: Annotated[str | None, typer.Argument(help="The preset to print as TOML.")] = None,
) -> None:
    """List the presets, or print one as a TOML file to edit and train.

    Example: iresnet presets digits-hybrid > mine.toml; iresnet train mine.toml

    Example: iresnet presets iresnet164-c0.7
    """
    if name in names():
        commands = "; ".join(f"iresnet presets {suitable}" for suitable in presets_for(name))
        raise ValueError(f"{name} is a dataset, not a preset. The presets for it: {commands}")
    if name is not None:
        typer.echo(config.dump(find(name)), nl=False)
        return
    made = table("preset", "description")
    made.columns[1].justify = "left"
    for experiment in PRESETS.values():
        made.add_row(experiment.name, experiment.about)
    console().print(made)
    console().say(
        "NAME-cX is the preset NAME with the Lipschitz constant of every layer below X. Example: iresnet train "
        "iresnet164-c0.7",
    )
    if models := shipped():
        console().say(
            f"Trained models that come with the library and are used like run folders: {', '.join(models)}. "
            f"Example: iresnet certify {models[0]}",
        )
