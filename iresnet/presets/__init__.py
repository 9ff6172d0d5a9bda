"""Presets: named experiments, and `find`, which looks one up.

They are TOML files: `general` (digits, tables, points), `flows` (the paper's image densities, and others),
`classifiers` (the paper's, and ResNets), `others` (Glow and other models). `experiment` defines the settings of an
experiment (data, network, objective, training), `reading` reads them from TOML, `coefficient` sets the paper's c,
`suitable` says which presets suit given data.
"""

from __future__ import annotations

import re
from pathlib import Path

from .coefficient import with_coefficient
from .experiment import Experiment, with_overrides
from .reading import PRESETS, grouped, read, unknown_preset
from .suitable import PURPOSES, holds_images, is_for_images, presets_for

__all__ = [
    "PRESETS", "PURPOSES", "Experiment", "with_overrides", "find", "grouped", "holds_images", "is_for_images",
    "is_preset", "presets_for", "read",
]  # fmt: skip

#: NAME-cX: a preset whose layers all have the coefficient X.
WITH_COEFFICIENT = re.compile(r"(.+)-c(\d*\.?\d+(?:e[+-]?\d+)?)")


def find(name: str) -> Experiment:
    """Return the preset of this name, or the experiment in the TOML file at this path.

    NAME-cX is the preset NAME with the coefficient X for every layer: iresnet164-c0.7.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if path.suffix == ".toml":
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist. Write one with: iresnet presets digits-hybrid > {path.name}"
            )
        return read(path)
    if (parts := WITH_COEFFICIENT.fullmatch(name)) and parts[1] in PRESETS:
        return with_coefficient(PRESETS[parts[1]], parts[2])
    raise ValueError(f"{unknown_preset(name)} A settings file must end in .toml.")


def is_preset(name: str) -> bool:
    """Whether `find` knows a preset of this name.

    >>> is_preset("iresnet164"), is_preset("iresnet164-c0.7"), is_preset("moons")
    (True, True, False)
    """
    parts = WITH_COEFFICIENT.fullmatch(name)
    return name in PRESETS or (parts is not None and parts[1] in PRESETS)
