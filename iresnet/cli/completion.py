"""What the shell completes: presets, datasets, run folders, shipped models, and the names of tasks and results."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..bench import TASKS
from ..data import names
from ..data.download import REGISTRY
from ..presets import PRESETS
from ..reproduce import RESULTS
from ..run import shipped
from ..run.missing import is_run
from ..run.trackers import TRACKERS


def complete_preset(incomplete: str) -> list[str]:
    """Return the presets that begin so."""
    return _starting(incomplete, PRESETS)


def complete_data(incomplete: str) -> list[str]:
    """Return the datasets, files and folders that begin so."""
    return _starting(incomplete, names()) + _paths(incomplete)


def complete_training(incomplete: str) -> list[str]:
    """Return what `train` takes: presets, datasets, files and folders."""
    return _starting(incomplete, dict.fromkeys([*PRESETS, *names()])) + _paths(incomplete)


def complete_run(incomplete: str) -> list[str]:
    """Return run folders, the folders that may hold some, and shipped models."""
    runs = [str(folder) for folder in Path("runs").glob("*") if is_run(folder)]
    folders = [path for path in _paths(incomplete) if path.endswith("/") or is_run(Path(path))]
    return sorted(
        {*_starting(incomplete, [*runs, *shipped()]), *(f.rstrip("/") if is_run(Path(f)) else f for f in folders)}
    )


def complete_download(incomplete: str) -> list[str]:
    """Return the datasets that can be downloaded."""
    return _starting(incomplete, REGISTRY)


def complete_result(incomplete: str) -> list[str]:
    """Return the tables and figures that can be reproduced."""
    return _starting(incomplete, RESULTS)


def complete_task(incomplete: str) -> list[str]:
    """Return the tasks that can be measured."""
    return _starting(incomplete, TASKS)


def complete_tracker(incomplete: str) -> list[str]:
    """Return the trackers that a training can be logged to."""
    return _starting(incomplete, TRACKERS)


def _starting(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def _paths(incomplete: str) -> list[str]:
    """Return the paths that begin so, folders with a slash; hidden ones only if a dot was typed."""
    parent, slash, start = incomplete.rpartition("/")
    found = sorted(Path(parent + slash or ".").glob("*"))
    shown = [path for path in found if path.name.startswith(start) and (start or not path.name.startswith("."))]
    return [parent + slash + path.name + "/" * path.is_dir() for path in shown]
