"""`iresnet train`: train a preset, a dataset or a TOML file to a certified model in a run folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shlex import join, quote
from typing import Annotated, Any

import torch
import typer

from .. import config, presets
from ..data import Splits, load
from ..data.columns import SPELLINGS
from ..data.detection import numbers_rows
from ..device import choose_device
from ..models import INVERSES
from ..presets import Experiment
from ..run import TRUNCATION, FitResult, Run, SharedTraining, follow, resume, start, truncation_warning
from ..run.missing import is_run
from ..run.progress import progress, reporter
from ..run.trackers import TRACKERS, make_loggers
from ..spelling import counted, listed
from ..train import distributed
from ..train.guard import TrainingError
from .completion import complete_data, complete_preset, complete_run, complete_tracker, complete_training
from .console import console, ctrl_c, result, use_threads
from .options import Device
from .preset_choice import choose_preset, run_folder

#: The one setting that may change when a run is resumed.
LEARNING_RATE = "training.learning_rate"


def train(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="PRESET|DATA|CONFIG.toml",
            help="A preset, a dataset or file to train on, or a TOML file.",
            autocompletion=complete_training,
        ),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="The preset, as an option.", autocompletion=complete_preset)
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="A dataset, a folder of images, or a table (.csv, .tsv, .npy, .npz, .parquet).",
            autocompletion=complete_data,
        ),
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
    out: Annotated[
        Path | None, typer.Option(help="The run folder.", show_default="runs/NAME", autocompletion=complete_run)
    ] = None,
    resume_: Annotated[bool, typer.Option("--resume", help="Resume the run in --out.")] = False,
    log_to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="|".join(TRACKERS),
            help="Also log to this tracker. May be repeated.",
            show_default="tensorboard if installed",
            autocompletion=complete_tracker,
        ),
    ] = None,
    device: Device = "auto",
) -> None:
    """Train a model and certify it.

    Example: iresnet train moons

    Example: iresnet train digits-hybrid --set training.steps=500 --out runs/first

    Example: iresnet train table-hybrid --data measurements.csv --label kind

    Example: iresnet train customers.csv --id name --drop phone,city --kind plan=category --missing drop

    Several processes share a training: torchrun --nproc-per-node=4 -m iresnet train digits-hybrid

    Ctrl-C or SIGTERM saves a checkpoint; `--resume` continues from it, with another learning rate if training diverged:

    Example: iresnet train --resume --out runs/first --set training.learning_rate=0.001
    """
    if not distributed.is_main():
        return follow_main(device)
    if None not in (what, preset) and what != preset:
        raise ValueError(f"a run has one preset; got {what!r} and --preset {preset!r}. Leave one out.")
    what = preset if what is None else what
    learning_rate, splits, note, loggers = None, None, "", make_loggers(log_to or [])
    table = {"--columns": columns, "--drop": drop, "--context": context, "--id": id_, "--kind": kind or []}
    table["--missing"] = missing
    if resume_:
        if what is not None and is_run(Path(what)) and out in (None, Path(what)):
            words = ["iresnet", "train", "--resume", "--out", what, *_words({"--set": set_})]
            raise ValueError(f"the run folder to resume comes after --out. Use: {join(words)}")
        given = {"a preset": what, "--data": data, "--label": label, "--data-dir": data_dir, "--seed": seed}
        _refuse_changes({**given, **{word: value or None for word, value in table.items()}})
        if out is None:
            raise ValueError("--resume needs the run folder. Example: iresnet train --resume --out runs/digits-hybrid")
        learning_rate, folder, run = new_learning_rate(set_ or []), out, Run.open(out)
        experiment, schema = run.experiment, run.schema
    else:
        others = {"--set": set_ or [], "--seed": None if seed is None else str(seed), "--data-dir": data_dir}
        choice = choose_preset(what, data, label, out, _words({**table, **others}))
        chosen_columns = {"columns": _names(columns), "drop": _names(drop), "context": _names(context), "id": id_}
        chosen_columns |= {"missing": missing, "kinds": tuple(kind) if kind else None}
        experiment = override(choice.experiment, choice.source, label, data_dir, set_ or [], seed, **chosen_columns)
        folder = out or choice.folder or run_folder(experiment.name)
        splits, note = load(experiment.data), choice.note
        schema = splits.schema
    chosen, screen = choose_device(device), console()
    use_threads(schema.dimension)
    for line in filter(None, (note, *describe_table(experiment, splits))):
        screen.say(line)
    with (
        _advice(folder, experiment),
        distributed.joined(chosen) as group,
        ctrl_c(lambda: resume_hint(folder)) as stop,
        progress(screen) as bars,
    ):
        options: dict[str, Any] = {"device": chosen, "stop": stop, "loggers": loggers, "group": group}
        options["report"] = reporter(bars, experiment.name)
        if resume_:
            trained = resume(folder, learning_rate=learning_rate, **options)
        else:
            trained = start(experiment, folder, splits=splits, **options)
    finish(trained)


def follow_main(device: str) -> None:
    """Take part in the training of the main process, which prints and writes; all settings come from it."""
    chosen = choose_device(device)
    with distributed.joined(chosen) as group:
        shared: SharedTraining | None = group.share()
        if shared is not None:
            use_threads(shared.schema.dimension)
            with ctrl_c() as stop:
                follow(group, shared, chosen, stop)


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
    if splits.train.blocks is not None:
        lines.append(
            f"{splits.train.total:,} training rows are read in blocks (data.in_memory); kinds and scales of columns "
            f"come from {len(splits.train):,} of them."
        )
    elif splits.train.rows:
        count = sum(map(len, splits.parts.values()))
        lines.append(f"Rows with missing cells are left out; {count:,} are complete.")
    if schema.targets:
        given = [name for name in schema.names if name not in schema.targets]
        lines.append(f"The density of {listed(schema.targets)}, given {listed(given)}.")
    if schema.kinds and experiment.objective.kind != "classification":
        lines.append("Columns that are not just real numbers (change one with --kind COLUMN=KIND):")
        kinds = zip(schema.names, schema.kinds, strict=True)
        lines += [f"  {name}: {kind.describe()}" for name, kind in kinds if kind.name != "real"]
        if not schema.label and any(kind.categories for kind in schema.kinds):
            lines.append("A category that is to be predicted is named by --label.")
    if schema.constants:
        lines.append(f"Left out, since every row has the same value there: {listed(schema.constants)}.")
    for i, name in enumerate(schema.columns):
        if numbers_rows(torch.cat([part.x[:, i] for part in splits.parts.values()]).double().numpy()):
            lines.append(f"{name} numbers the rows, of which a model learns nothing: --id {quote(name)} leaves it out.")
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
def _advice(folder: Path, experiment: Experiment) -> Iterator[None]:
    """Add to the error of a training that diverged or lost a process how to resume from the last checkpoint."""
    try:
        yield
    except distributed.LostProcess as error:
        hint = resume_hint(folder).replace("\n ", "")  # an error is one line
        raise distributed.LostProcess(f"{error} {hint}") from error
    except TrainingError as error:
        if not (folder / "last.safetensors").is_file():
            raise
        lower = f"{experiment.training.learning_rate / 2:g}"
        raise TrainingError(
            f"{error} Resume from the last checkpoint with a lower learning rate: "
            f"iresnet train --resume --out {quote(str(folder))} --set {LEARNING_RATE}={lower}"
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
    return f"Resume with:\n  iresnet train --resume --out {quote(str(folder))}"


def finish(trained: FitResult) -> None:
    """Print the result of a training and the next commands."""
    folder, steps = trained.run.folder, trained.run.experiment.training.steps
    if not trained.finished:
        words = f"Stopped and saved at step {trained.step} of {steps}. {resume_hint(folder)}"
        result(_content(trained), words)
        raise typer.Exit(130)
    reason, certified = why_uncertified(trained), trained.certificate is not None and trained.certificate.passed
    result(_content(trained), *_summary(trained, reason and not certified))
    name = quote(str(folder))
    own = "" if "test" in trained.run.read_json("data.json") else " --data FILE"
    following = f"iresnet evaluate {name}{own}" + ("" if own else f"; iresnet report {name}")
    console().say(f"Model in {folder}. Next: {following}")
    if not (certified or reason):
        raise RuntimeError(f"the model is not certified; {folder / 'certificate.json'} shows the block that fails.")


def _content(trained: FitResult) -> dict[str, Any]:
    """Return the result of a training for --json."""
    certificate, steps = trained.certificate, trained.run.experiment.training.steps
    content = {"run": trained.run.folder, "finished": trained.finished, "step": trained.step, "steps": steps}
    content |= {"seconds": trained.seconds, "tightened": len(trained.tightened)}
    content["best"] = trained.run.best_metrics() if trained.finished else None
    content["certified"] = None if certificate is None else certificate.passed
    return content


def _summary(trained: FitResult, uncertified: object) -> list[str]:
    """Return the result of a finished training in sentences."""
    settings, best = trained.run.experiment.training, trained.run.best_metrics()
    words = ", ".join(f"{name} {value:.3f}" for name, value in best.items() if name not in ("step", TRUNCATION))
    early = ", ended early" if trained.step < settings.steps else ""
    when = "Best at" if settings.select == "best" else "After"
    lines = [
        f"Trained {counted(trained.step, 'step')} in {trained.seconds:.0f} s{early}. {when} step {best['step']:.0f}: "
        f"{words}.",
        truncation_warning(trained.run),
    ]
    if (torch.cuda.is_available() or distributed.world_size() > 1) and trained.engine:
        lines.append(f"Execution: {trained.engine}.")
    if trained.certificate is not None:
        note = f" ({counted(len(trained.tightened), 'layer')} tightened)" if trained.tightened else ""
        lines.append(trained.certificate.summary() + note)
    return [*filter(None, lines), *([f"Not certified: {why_uncertified(trained)}"] if uncertified else [])]


def why_uncertified(trained: FitResult) -> str:
    """Return why no certificate is expected for a model; empty if one is."""
    network = trained.run.experiment.network
    if network.family in INVERSES:
        return INVERSES[network.family]
    return "" if network.constrained else "it was trained without the Lipschitz constraint (constrained = false)."
