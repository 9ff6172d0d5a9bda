"""`iresnet train`: from a preset or a TOML file to a certified model in a run folder."""

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

#: The one setting that a resumed run may be given anew.
RATE = "training.learning_rate"


def train(
    what: Annotated[
        str | None, typer.Argument(metavar="PRESET|CONFIG.toml", help="A preset's name, or a file of settings.")
    ] = None,
    preset: Annotated[str | None, typer.Option(metavar="NAME", help="The preset, given as an option.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="A set's name, a folder of images, or a table (.csv, .tsv, .npy, .npz, .parquet)."),
    ] = None,
    label: Annotated[str | None, typer.Option(help="The label column of a table.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where downloaded sets lie.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a setting. May be repeated.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, order and noise.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder.", show_default="runs/NAME")] = None,
    resume_: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    device: Device = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads.", show_default="one for small rows", min=1)] = None,
) -> None:
    """Train a model and certify it.

    Example: iresnet train digits-hybrid --set training.steps=500 --out runs/first

    Example: iresnet train table-hybrid --data measurements.csv --label kind

    Ctrl-C or SIGTERM saves; `--resume` goes on from there, with another learning rate if it diverged:

    Example: iresnet train --resume --out runs/first --set training.learning_rate=0.001
    """
    if None not in (what, preset) and what != preset:
        raise ValueError(f"a run has one preset; got {what!r} and --preset {preset!r}. Leave one out.")
    what = preset if what is None else what
    rate, splits, note = None, None, ""
    if resume_:
        _refuse_changes({"a preset": what, "--data": data, "--label": label, "--data-dir": data_dir, "--seed": seed})
        if out is None:
            raise ValueError("--resume needs the run folder. Example: iresnet train --resume --out runs/digits-hybrid")
        rate, folder, run = new_rate(set_ or []), out, Run.open(out)
        experiment, schema = run.experiment, run.schema
    else:
        choice = choose_preset(what, data, label, out)
        experiment = settle(choice.experiment, choice.source, label, data_dir, set_ or [], seed)
        folder = out or choice.folder or run_folder(experiment.name)
        splits, note = load(experiment.data), choice.note
        schema = splits.schema
    chosen, screen = choose_device(device), console()
    use_threads(schema.dimension, threads)
    if note:
        screen.say(note)
    with ctrl_c(lambda: go_on(folder)) as stop, progress(screen) as bars, _advised(folder, experiment):
        report = reporter(bars, experiment.name)
        if resume_:
            outcome = resume(folder, device=chosen, report=report, stop=stop, learning_rate=rate)
        else:
            outcome = start(experiment, folder, device=chosen, report=report, stop=stop, splits=splits)
    finish(outcome)


def _refuse_changes(given: dict[str, object]) -> None:
    changes = [word for word, value in given.items() if value is not None]
    if changes:
        raise ValueError(
            f"a resumed run keeps its settings; got {' and '.join(changes)}. Leave that out, or start anew."
        )


def new_rate(changes: list[str]) -> float | None:
    """The learning rate that a resumed run is given, which is the remedy for divergence; nothing else may change."""
    for assignment in changes:
        if config.setting_path(Experiment, assignment) != RATE:
            raise ValueError(
                f"a resumed run keeps its settings, all but {RATE}; got --set {assignment}. Leave that out, or start "
                "anew."
            )
    return presets.with_overrides(Experiment(), changes).training.learning_rate if changes else None


@contextmanager
def _advised(folder: Path, experiment: Experiment) -> Iterator[None]:
    """Say how to go on from the last checkpoint where training diverges."""
    try:
        yield
    except TrainingError as error:
        if not (folder / "last.safetensors").is_file():
            raise
        lower = f"{experiment.training.learning_rate / 2:g}"
        raise TrainingError(
            f"{error} Go on from the last checkpoint with a lower rate:\n  iresnet train --resume --out {folder} --set "
            f"{RATE}={lower}"
        ) from error


def settle(
    experiment: Experiment,
    data: str | None,
    label: str | None,
    data_dir: str | None,
    changes: list[str],
    seed: int | None,
) -> Experiment:
    """The experiment with what the command line says of it."""
    experiment = presets.with_overrides(experiment, changes)
    wishes = {"source": data, "label": label, "folder": data_dir}
    experiment = replace(
        experiment,
        data=replace(experiment.data, **{k: v for k, v in wishes.items() if v is not None}),  # type: ignore[arg-type]
    )
    return experiment if seed is None else replace(experiment, seed=seed)


def go_on(folder: Path) -> str:
    """How to go on with a run that was stopped."""
    if not (folder / "last.safetensors").is_file():
        return "Nothing was saved yet; start anew."
    return f"Go on with:\n  iresnet train --resume --out {folder}"


def finish(outcome: FitResult) -> None:
    """Say what came of it, and what can be done next."""
    screen, folder = console(), outcome.run.folder
    if not outcome.finished:
        screen.say(
            f"Stopped and saved at step {outcome.step} of {outcome.run.experiment.training.steps}. {go_on(folder)}",
        )
        raise typer.Exit(130)
    best = outcome.run.best_metrics()
    words = ", ".join(f"{name} {value:.3f}" for name, value in best.items() if name not in ("step", TRUNCATION))
    when = "Best at" if outcome.run.experiment.training.select == "best" else "After"
    screen.say(
        f"Trained {counted(outcome.step, 'step')} in {outcome.seconds:.0f} s. {when} step {best['step']:.0f}: {words}.",
    )
    if warning := truncation_warning(outcome.run):
        screen.say(warning)
    if torch.cuda.is_available() and outcome.engine:
        screen.say(f"Steps taken: {outcome.engine}.")
    if outcome.certificate is not None:
        count = len(outcome.tightened)
        note = f" ({count} layer{'s' * (count > 1)} tightened)" if count else ""
        screen.say(outcome.certificate.summary() + note)
    reason, certified = unproven(outcome), outcome.certificate is not None and outcome.certificate.passed
    if reason and not certified:
        screen.say(f"Not certified: {reason}")
    screen.say(f"Model in {folder}. Next: iresnet evaluate {folder}; iresnet report {folder}")
    if not (certified or reason):
        raise RuntimeError(f"the model has no certificate; see {folder / 'certificate.json'} for the block that fails.")


def unproven(outcome: FitResult) -> str:
    """Why nothing is expected to be proven of a model; empty where a proof is."""
    network = outcome.run.experiment.network
    if network.family in INVERSES:
        return INVERSES[network.family]
    return "" if network.constrained else "it was trained without the constraint, on purpose (constrained = false)."
