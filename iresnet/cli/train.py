"""`iresnet train`: train a preset, a dataset or a TOML file to a certified model in a run folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from .. import config, presets
from ..data import load
from ..models import INVERSES
from ..presets import Experiment
from ..run import TRUNCATION, FitResult, Run, resume, start, truncation_warning
from ..spelling import counted
from ..train.guard import TrainingError
from .console import Device, choose_device, console, ctrl_c, progress, reporter, use_threads
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

    Ctrl-C or SIGTERM saves a checkpoint; `--resume` continues from it, with another learning rate if training diverged:

    Example: iresnet train --resume --out runs/first --set training.learning_rate=0.001
    """
    if None not in (what, preset) and what != preset:
        raise ValueError(f"a run has one preset; got {what!r} and --preset {preset!r}. Leave one out.")
    what = preset if what is None else what
    learning_rate, splits, note = None, None, ""
    if resume_:
        _refuse_changes({"a preset": what, "--data": data, "--label": label, "--data-dir": data_dir, "--seed": seed})
        if out is None:
            raise ValueError("--resume needs the run folder. Example: iresnet train --resume --out runs/digits-hybrid")
        learning_rate, folder, run = new_learning_rate(set_ or []), out, Run.open(out)
        experiment, schema = run.experiment, run.schema
    else:
        choice = choose_preset(what, data, label, out)
        experiment = override(choice.experiment, choice.source, label, data_dir, set_ or [], seed)
        folder = out or choice.folder or run_folder(experiment.name)
        splits, note = load(experiment.data), choice.note
        schema = splits.schema
    chosen, screen = choose_device(device), console()
    use_threads(schema.dimension, threads)
    if note:
        screen.say(note)
    with ctrl_c(lambda: resume_hint(folder)) as stop, progress(screen) as bars, _divergence_advice(folder, experiment):
        report = reporter(bars, experiment.name)
        if resume_:
            result = resume(folder, device=chosen, report=report, stop=stop, learning_rate=learning_rate)
        else:
            result = start(experiment, folder, device=chosen, report=report, stop=stop, splits=splits)
    finish(result)


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
) -> Experiment:
    """Return the experiment with the options of the command line applied."""
    experiment = presets.with_overrides(experiment, changes)
    options = {"source": data, "label": label, "folder": data_dir}
    experiment = replace(
        experiment,
        data=replace(experiment.data, **{k: v for k, v in options.items() if v is not None}),  # type: ignore[arg-type]
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
    screen.say(f"Model in {folder}. Next: iresnet evaluate {folder}; iresnet report {folder}")
    if not (certified or reason):
        raise RuntimeError(f"the model is not certified; {folder / 'certificate.json'} shows the block that fails.")


def why_uncertified(result: FitResult) -> str:
    """Return why no certificate is expected for a model; empty if one is."""
    network = result.run.experiment.network
    if network.family in INVERSES:
        return INVERSES[network.family]
    return "" if network.constrained else "it was trained without the Lipschitz constraint (constrained = false)."
