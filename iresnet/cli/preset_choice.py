"""Choose the preset of `iresnet train`: a dataset or a file in place of a preset gets the preset that suits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import join, quote

from .. import data, presets
from ..data.source import KINDS, files_beside
from ..presets import PRESETS, PURPOSES, Experiment
from ..run.missing import is_run
from ..spelling import nearest


@dataclass(frozen=True)
class Choice:
    """The experiment to train and its data; `note` tells the user which preset was chosen for a dataset or file."""

    experiment: Experiment
    source: str | None
    folder: Path | None = None
    note: str = ""


def choose_preset(
    what: str | None, source: str | None, label: str | None, out: Path | None, options: Sequence[str] = ()
) -> Choice:
    """Return the preset named by `what`, or the natural one for a dataset or file; refuse an ambiguous choice.

    `options` are other options of the command, for the note.
    """
    if source is not None and presets.is_preset(source) and not _is_data(source):
        raise ValueError(
            f"--data must be a dataset, a file or a folder; {source} is a preset. Use: iresnet train {source}"
        )
    if what is None and source is None:
        raise ValueError("name a preset, a dataset or a file. See them with: iresnet presets; iresnet data list")
    if what is None:
        return _for_data(str(source), label, out, options)
    if presets.is_preset(what) or not _is_data(what) or Path(what).suffix == ".toml":
        experiment = _find(what)
        if presets.is_preset(what) and source is not None:
            _refuse_unsuitable(experiment, source, label)
        return Choice(experiment, source)
    if source not in (None, what):
        raise ValueError(f"a run has one dataset; got {what!r} and --data {source!r}. Leave one out.")
    return _for_data(what, label, out, options)


def _find(name: str) -> Experiment:
    """Return a preset, or the settings in a TOML file; suggest a dataset or file if the name is closest to that."""
    files = files_beside(name) if Path(name).suffix and not Path(name).exists() else []
    others = [*data.names(), *files]
    near = nearest(name, [*others, *PRESETS])
    if not presets.is_preset(name) and near and near == nearest(name, others):
        raise ValueError(f"there is no preset{', dataset or file' if files else ' or dataset'} {name!r}.{near}")
    return presets.find(name)


def _for_data(source: str, label: str | None, out: Path | None, options: Sequence[str]) -> Choice:
    """Return the natural preset for the data; data with labels have several, which the error lists as commands."""
    if is_run(Path(source)):
        raise ValueError(
            f"{source} is a run folder. Resume it: iresnet train --resume --out {quote(source)}, or train again with "
            f"its settings: iresnet train {quote(f'{source}/config.toml')} --out runs/NEW"
        )
    names, known = presets.presets_for(source, label), source in data.names()
    if len(names) > 1:
        raise ValueError(f"{source} has labels, so a preset must be named. Use{_commands(names, source, label)}")
    folder = out or run_folder(source if known else Path(source).expanduser().resolve().stem)
    command = f"{_command(names[0], source, label)} {join([*options, '--out', str(folder)])}"
    kind = "a dataset" if known else "a folder" if Path(source).expanduser().is_dir() else "a file"
    note = f"{source} is {kind}: training the preset {names[0]} on it; the same as: {command}"
    return Choice(PRESETS[names[0]], source, folder, note)


def _refuse_unsuitable(experiment: Experiment, source: str, label: str | None) -> None:
    """Refuse a preset for tables where the data are images, and the other way round; name presets that fit."""
    images = presets.holds_images(source)
    if images is None or images == presets.is_for_images(experiment):
        return
    needs, holds = ("a table", "images") if images else ("images", "none")
    fitting = _commands(presets.presets_for(source, label), source, label)
    raise ValueError(f"the preset {experiment.name} is for {needs}; {source} holds {holds}. Use{fitting}")


def _commands(names: Sequence[str], source: str, label: str | None) -> str:
    """Return the rest of a sentence that begins with "Use": one command, or those for several purposes."""
    commands = [_command(name, source, label) for name in names]
    if len(names) == 1:
        return f": {commands[0]}"
    return f" one of: {'; '.join(f'{command} ({use})' for command, use in zip(commands, PURPOSES, strict=True))}."


def _command(preset: str, source: str, label: str | None) -> str:
    """Return the shell command that trains a preset on the data.

    >>> _command("digits-hybrid", "digits", None), _command("table-hybrid", "my file.csv", "kind")
    ('iresnet train digits-hybrid', "iresnet train table-hybrid --data 'my file.csv' --label kind")
    """
    words = ["iresnet", "train", preset]
    words += [] if PRESETS[preset].data.source == source and preset != "points-density" else ["--data", source]
    return join(words + (["--label", label] if label else []))


def _is_data(word: str) -> bool:
    """Whether a word is a dataset, an existing path, or the path of a data file by its suffix."""
    path = Path(word).expanduser()
    return word in data.names() or path.exists() or path.suffix.lower() in KINDS.split(", ")


def run_folder(name: str) -> Path:
    """Return the default folder of a run, runs/NAME; refuse a name that would lead out of runs/."""
    if name in ("", ".", "..") or not name.isprintable() or any(c in name for c in "/\\"):
        raise ValueError(
            f"the name of a run must be a plain name without slashes; got {name!r:.80}. Change it, or choose a folder "
            "with --out."
        )
    return Path("runs") / name
