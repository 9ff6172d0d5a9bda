"""The experiments that have a name, and how one is found by it.

In reading order: `experiment` (data, network, aim and training as one thing), `general` (digits, tables, points),
`classifiers` (the paper's, and ResNets), `flows` (the paper's densities of images, and others), `rivals` (Glow and
others).
"""

from __future__ import annotations

import re
from pathlib import Path

from ..spelling import parts_hint
from .classifiers import CLASSIFIERS, with_coefficient
from .experiment import Experiment, changed, check_seed, read
from .flows import FLOWS
from .general import GENERAL
from .rivals import RIVALS

__all__ = ["PRESETS", "Experiment", "changed", "check_seed", "find", "read"]

PRESETS = {e.name: e for e in (*GENERAL, *FLOWS, *CLASSIFIERS, *RIVALS)}


def find(name: str) -> Experiment:
    """The preset of this name, or the experiment in the TOML file of this path.

    NAME-cX is a preset whose layers all have the coefficient X: iresnet164-c0.7.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if path.suffix == ".toml":
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no file {path}. Write one with: iresnet presets digits-hybrid > {path.name}"
            )
        return read(path)
    parts = re.fullmatch(r"(.+)-c(\d*\.?\d+(?:e[+-]?\d+)?)", name)
    if parts and parts[1] in PRESETS:
        return with_coefficient(PRESETS[parts[1]], parts[2])
    remedy = parts_hint(name, PRESETS, "iresnet presets")
    raise ValueError(f"there is no preset {name!r}. {remedy} A file of settings ends in .toml.")
