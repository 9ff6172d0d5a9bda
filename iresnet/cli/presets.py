"""`iresnet presets`: the experiments that have a name, and the TOML that makes each."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import config
from ..data import names
from ..presets import PRESETS, find, presets_for
from ..run import shipped
from .console import console, table


def presets(
    name: Annotated[str | None, typer.Argument(help="A preset, to print as TOML.")] = None,
) -> None:
    """List the presets, or print one as the TOML that makes it.

    Example: iresnet presets digits-hybrid > mine.toml; iresnet train mine.toml

    Example: iresnet presets iresnet164-c0.7
    """
    if name in names():
        commands = "; ".join(f"iresnet presets {suitable}" for suitable in presets_for(name))
        raise ValueError(f"{name} is a dataset, not a preset. The presets for it: {commands}")
    if name is not None:
        typer.echo(config.dump(find(name)), nl=False)
        return
    made = table("preset", "what it is")
    made.columns[1].justify = "left"
    for experiment in PRESETS.values():
        made.add_row(experiment.name, experiment.about)
    console().print(made)
    console().say(
        "NAME-cX is the preset NAME with every layer's norm below X. Example: iresnet train iresnet164-c0.7",
    )
    if models := shipped():
        console().say(
            f"Trained models that come with the library, for use like run folders: {', '.join(models)}. "
            f"Example: iresnet certify {models[0]}",
        )
