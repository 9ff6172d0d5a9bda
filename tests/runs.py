"""The smallest possible trained runs, for tests of code that works on run folders."""

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from iresnet import run
from iresnet.presets import PRESETS, Experiment


def tiny(name: str = "digits-hybrid", **training) -> Experiment:
    preset = PRESETS[name]
    blocks = tuple(1 for _ in preset.network.blocks)
    settings = {"steps": 6, "epochs": 0, "batch": 16, "validate_every": 3, "save_every": 3, "warmup": 2} | training
    terms = 2 if preset.network.family == "iresnet" else preset.network.terms
    few = replace(preset.data, validation=48) if preset.data.source == "digits" else preset.data
    return replace(
        preset,
        data=few,
        network=replace(preset.network, blocks=blocks, width=4, terms=terms),
        training=replace(preset.training, **settings),
    )


@cache
def trained(name: str = "digits-hybrid") -> Path:
    """A finished run, trained once per process. Do not write to it; use `copy_of`."""
    folder = Path(mkdtemp()) / name
    run.start(tiny(name), folder)
    return folder


def copy_of(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to
