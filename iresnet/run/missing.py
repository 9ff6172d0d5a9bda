"""The answer where a run folder is expected and there is none: what the name is, and the exact next command."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from .. import data
from ..data.images import is_image
from ..data.source import KINDS
from ..presets import is_preset
from ..spelling import closest, listed
from .weights import RENAMED, shipped


def explain_missing(folder: Path) -> str:
    """Say why a path is not a run folder, and what to type instead.

    >>> explain_missing(Path("moons"))
    'moons is a dataset, not a run folder. Train a model on it first: iresnet train moons'
    """
    if folder.is_dir():
        return _explain_folder(folder)
    if folder.is_file():
        return _explain_file(folder)
    name, default = str(folder), Path("runs") / folder
    if name in RENAMED:
        return f"the model {name!r} that comes with the library is now called {RENAMED[name]!r}. Use that name."
    if is_run(default):
        return f"{name} is not a run folder. Use the run folder {default}."
    if is_preset(name):
        return f"{name} is a preset, not a run folder. Train it first: iresnet train {name}"
    if name in data.names():
        models = [model for model in shipped() if model.startswith(f"{name}-")]
        ready = f", or use a model that comes with the library: {', '.join(models)}" if models else ""
        return f"{name} is a dataset, not a run folder. Train a model on it first: iresnet train {name}{ready}"
    return f"{name} does not exist.{_closest(folder)} Train first: iresnet train digits-hybrid --out {quote(name)}"


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run."""
    return (folder / "config.toml").is_file()


def _explain_folder(folder: Path) -> str:
    if runs := _runs_in(folder):
        return f"{folder} is not a run folder but holds some. Use one of {listed(runs)}."
    if any(is_image(path) for path in folder.iterdir()):
        return f"{folder} holds images, not a run. Train a model on them first: iresnet train {quote(str(folder))}"
    return (
        f"{folder} is not a run folder: it has no config.toml. Train first: iresnet train digits-hybrid --out "
        f"{quote(str(folder))}"
    )


def _explain_file(file: Path) -> str:
    if is_run(file.parent):
        return f"{file} is a file of a run. Use the run folder {file.parent}."
    if file.suffix.lower() in (*KINDS.split(", "), ".toml"):
        return f"{file} is a file, not a run folder. Train a model with it first: iresnet train {quote(str(file))}"
    return f"{file} is a file, not a run folder. Train first: iresnet train digits-hybrid"


def _closest(folder: Path) -> str:
    """A hint at the run folder or shipped model whose name is closest; empty if none is close.

    Run folders are searched for beside the missing one and in runs/.
    """
    found = {Path(run).name: run for parent in (Path("runs"), folder.parent) for run in _runs_in(parent)}
    near = closest(folder.name, [*found, *shipped()])
    if near is None:
        return ""
    return (
        f" Did you mean {found[near]!r}?" if near in found else f" Did you mean {near!r}, which comes with the library?"
    )


def _runs_in(folder: Path) -> list[str]:
    return sorted(str(path.parent) for path in folder.glob("*/config.toml"))
