"""`iresnet train`: train a preset, a dataset or a TOML file to a certified model in a run folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .. import config, presets
from ..data import Splits, load
from ..data.columns import SPELLINGS
from ..models import INVERSES
from ..presets import Experiment
from ..run import TRUNCATION, FitResult, Run, resume, start, truncation_warning
from ..run.progress import progress, reporter
from ..spelling import counted, listed
from ..train.guard import TrainingError
from .console import Device, choose_device, console, ctrl_c, use_threads
from .preset_choice import choose_preset, run_folder

#: The one setting that may change when a run is resumed.
LEARNING_RATE = "training.learning_rate"


def train(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="PRESET|DATA|CONFIG.toml", help="A preset, a dataset or file to train on, or a TOML file."
        ),
    ] = None,
    preset: Annotated[str | None, typer.Option(metavar="NAME", help="The preset, as an option.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="A dataset, a folder of images, or a table (.csv, .tsv, .npy, .npz, .parquet)."),
    ] = None,
    label: Annotated[str | None, typer.Option(help="The label column of a table.")] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="A,B,…", help="The columns of a table to train on.", show_default="all")
    ] = None,
    drop: Annotated[str | None, typer.Option(metavar="A,B,…", help="The columns of a table to leave out.")] = None,
    context: Annotated[
        str | None,
        typer.Option(metavar="A,B,…", help="The columns of a table that are given: the density of the others."),
    ] = None,
    id_: Annotated[
        str | None, typer.Option("--id", help="The column of a table that names its rows; `score` writes it.")
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN=KIND", help=f"The kind of a column: {', '.join(SPELLINGS.values())}. May be repeated."
        ),
    ] = None,
    missing: Annotated[
        str | None, typer.Option(metavar="refuse|drop", help="What to do with rows with missing cells.")
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="The dataset directory.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting. May be repeated.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed for weights, data order and noise.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder.", show_default="runs/NAME")] = None,
    resume_: Annotated[bool, typer.Option("--resume", help="Resume the run in --out.")] = False,
    device: Device = "auto",
    threads: Annotated[
        int | None, typer.Option(help="CPU threads.", show_default="one for small inputs", min=1)
    ] = None,
) -> None:
    """Train a model and certify it.

    Example: iresnet train moons

    Example: iresnet train digits-hybrid --set training.steps=500 --out runs/first

    Example: iresnet train table-hybrid --data measurements.csv --label kind

    Example: iresnet train customers.csv --id name --drop phone,city --kind plan=category --missing drop

    Ctrl-C or SIGTERM saves a checkpoint; `--resume` continues from it, with another learning rate if training diverged:

    Example: iresnet train --resume --out runs/first --set training.learning_rate=0.001
    """
    if None not in (what, preset) and what != preset:
        raise ValueError(f"a run has one preset; got {what!r} and --preset {preset!r}. Leave one out.")
    what = preset if what is None else what
    learning_rate, splits, note = None, None, ""
    table = {"--columns": columns, "--drop": drop, "--context": context, "--id": id_, "--kind": kind or []}
    table["--missing"] = missing
    if resume_:
        given = {"a preset": what, "--data": data, "--label": label, "--data-dir": data_dir, "--seed": seed}
        _refuse_changes({**given, **{word: value or None for word, value in table.items()}})
        if out is None:
            raise ValueError("--resume needs the run folder. Example: iresnet train --resume --out runs/digits-hybrid")
        learning_rate, folder, run = new_learning_rate(set_ or []), out, Run.open(out)
        experiment, schema = run.experiment, run.schema
    else:
        choice = choose_preset(what, data, label, out, _words(table))
        options = {"columns": _names(columns), "drop": _names(drop), "context": _names(context), "id": id_}
        options |= {"missing": missing, "kinds": tuple(kind) if kind else None}
        experiment = override(choice.experiment, choice.source, label, data_dir, set_ or [], seed, **options)
        folder = out or choice.folder or run_folder(experiment.name)
        splits, note = load(experiment.data), choice.note
        schema = splits.schema
    chosen, screen = choose_device(device), console()
    use_threads(schema.dimension, threads)
    for line in filter(None, (note, *describe_table(experiment, splits))):
        screen.say(line)
    with ctrl_c(lambda: resume_hint(folder)) as stop, progress(screen) as bars, _divergence_advice(folder, experiment):
        report = reporter(bars, experiment.name)
        if resume_:
            result = resume(folder, device=chosen, report=report, stop=stop, learning_rate=learning_rate)
        else:
            result = start(experiment, folder, device=chosen, report=report, stop=stop, splits=splits)
    finish(result)


def _words(options: Mapping[str, str | list[str] | None]) -> list[str]:
    """Return options as words of a command; a list repeats its option."""
    given = ((name, value if isinstance(value, list) else [value]) for name, value in options.items() if value)
    return [word for name, values in given for value in values for word in (name, str(value))]


def _names(columns: str | None) -> tuple[str, ...] | None:
    """Split a list of column names at its commas; a name with a comma needs --set data.drop='["a, b"]'."""
    return None if columns is None else tuple(filter(None, (name.strip() for name in columns.split(","))))


def describe_table(experiment: Experiment, splits: Splits | None) -> list[str]:
    """Say which columns are not real numbers to the density, and how many rows are left where some are missing."""
    if splits is None or splits.schema.is_image:
        return []
    lines, schema = list[str](), splits.schema
    if splits.train.rows:
        count = sum(map(len, splits.parts.values()))
        lines.append(f"Rows with missing cells are left out; {count:,} are complete.")
    if schema.targets:
        given = [name for name in schema.names if name not in schema.targets]
        lines.append(f"The density of {listed(schema.targets)}, given {listed(given)}.")
    if schema.kinds and experiment.objective.kind != "classification":
        lines.append("Columns that are not just real numbers (change one with --kind COLUMN=KIND):")
        kinds = zip(schema.names, schema.kinds, strict=True)
        lines += [f"  {name}: {kind.describe()}" for name, kind in kinds if kind.name != "real"]
    return lines


def _refuse_changes(given: dict[str, object]) -> None:
    changes = [word for word, value in given.items() if value is not None]
    if changes:
        raise ValueError(
            f"a resumed run keeps its settings; got {' and '.join(changes)}. Leave that out, or start a new run."
        )


def new_learning_rate(changes: list[str]) -> float | None:
    """Return the new learning rate of a resumed run, the remedy for divergence; refuse any other change."""
    for assignment in changes:
        if config.setting_path(Experiment, assignment) != LEARNING_RATE:
            raise ValueError(
                f"a resumed run keeps its settings except {LEARNING_RATE}; got --set {assignment}. Leave that out, or "
                "start a new run."
            )
    return presets.with_overrides(Experiment(), changes).training.learning_rate if changes else None


@contextmanager
def _divergence_advice(folder: Path, experiment: Experiment) -> Iterator[None]:
    """Add to the error of a diverged training how to resume from the last checkpoint."""
    try:
        yield
    except TrainingError as error:
        if not (folder / "last.safetensors").is_file():
            raise
        lower = f"{experiment.training.learning_rate / 2:g}"
        raise TrainingError(
            f"{error} Resume from the last checkpoint with a lower learning rate:\n"
            f"  iresnet train --resume --out {folder} --set {LEARNING_RATE}={lower}"
        ) from error


def override(
    experiment: Experiment,
    data: str | None,
    label: str | None,
    data_dir: str | None,
    changes: list[str],
    seed: int | None,
    **table: Any,
) -> Experiment:
    """Return the experiment with the options of the command line applied; `table` are those for a table."""
    experiment = presets.with_overrides(experiment, changes)
    options = {"source": data, "label": label, "folder": data_dir, **table}
    experiment = replace(
        experiment,
        data=replace(experiment.data, **{k: v for k, v in options.items() if v is not None}),
    )
    return experiment if seed is None else replace(experiment, seed=seed)


def resume_hint(folder: Path) -> str:
    """Say how to resume a stopped run."""
    if not (folder / "last.safetensors").is_file():
        return "Nothing was saved yet; start again."
    return f"Resume with:\n  iresnet train --resume --out {folder}"


def finish(result: FitResult) -> None:
    """Print the result of a training and the next commands."""
    screen, folder = console(), result.run.folder
    if not result.finished:
        screen.say(
            f"Stopped and saved at step {result.step} of {result.run.experiment.training.steps}. {resume_hint(folder)}",
        )
        raise typer.Exit(130)
    best = result.run.best_metrics()
    words = ", ".join(f"{name} {value:.3f}" for name, value in best.items() if name not in ("step", TRUNCATION))
    early = ", ended early" if result.step < result.run.experiment.training.steps else ""
    when = "Best at" if result.run.experiment.training.select == "best" else "After"
    screen.say(
        f"Trained {counted(result.step, 'step')} in {result.seconds:.0f} s{early}. {when} step {best['step']:.0f}: "
        f"{words}.",
    )
    if warning := truncation_warning(result.run):
        screen.say(warning)
    if torch.cuda.is_available() and result.engine:
        screen.say(f"Execution: {result.engine}.")
    if result.certificate is not None:
        count = len(result.tightened)
        note = f" ({count} layer{'s' * (count > 1)} tightened)" if count else ""
        screen.say(result.certificate.summary() + note)
    reason, certified = why_uncertified(result), result.certificate is not None and result.certificate.passed
    if reason and not certified:
        screen.say(f"Not certified: {reason}")
    own = "" if "test" in result.run.read_json("data.json") else " --data FILE"
    following = f"iresnet evaluate {folder}{own}" + ("" if own else f"; iresnet report {folder}")
    screen.say(f"Model in {folder}. Next: {following}")
    if not (certified or reason):
        raise RuntimeError(f"the model is not certified; {folder / 'certificate.json'} shows the block that fails.")


def why_uncertified(result: FitResult) -> str:
    """Return why no certificate is expected for a model; empty if one is."""
    network = result.run.experiment.network
    if network.family in INVERSES:
        return INVERSES[network.family]
    return "" if network.constrained else "it was trained without the Lipschitz constraint (constrained = false)."
