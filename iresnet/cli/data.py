"""`iresnet data`: list, download and verify datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from ..data import download as files
from ..data import names as built_in
from ..data.builtin import schema_of, split_sizes
from .completion import complete_download
from .console import console, result, table
from .options import with_common_options

Folder = Annotated[Path, typer.Option("--data-dir", envvar=files.ENVIRONMENT, help="The dataset directory.")]

data = typer.Typer(help="List, download and verify datasets.", no_args_is_help=True)


def list_datasets(folder: Folder = Path("data")) -> None:
    """List the built-in datasets and which of them are downloaded.

    Example: iresnet data list --data-dir data
    """
    made, content = table("dataset", "train", "test", "shape", "classes", "files"), []
    for name in built_in():
        rows, schema, status = split_sizes(name), schema_of(name), _files(name, folder)
        counts = [f"{rows[part]:,}" for part in ("train", "test")]
        classes = str(len(schema.classes) or "-")
        made.add_row(name, *counts, " x ".join(map(str, schema.shape)), classes, status)
        content.append({"name": name, **rows, "shape": schema.shape, "classes": schema.classes, "files": status})
    result({"datasets": content, "folder": folder}, made)
    console().say("A folder of images or a table (.csv, .tsv, .npy, .npz, .parquet) is given by its path.")


def download(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help=f"Any of {', '.join(files.REGISTRY)}.", autocompletion=complete_download
        ),
    ],
    folder: Folder = Path("data"),
) -> None:
    """Download datasets and verify their checksums; complete files are not downloaded again.

    Example: iresnet data download mnist cifar10
    """
    for name in names:
        if name in built_in() and name not in files.REGISTRY:
            raise ValueError(f"{name} is built in and needs no download. Train on it: iresnet train {name}")
        files.remote_files(name)  # refuse an unknown name before any download
    columns = (TextColumn("{task.description:<28}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console()) as bars:
        for name in names:
            files.download(name, folder, _reporter(bars))
    complete = {name: folder / name for name in names}
    result({"complete": complete}, *(f"{name}: complete in {path}" for name, path in complete.items()))


def verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME...]", help="Datasets that must be complete.", autocompletion=complete_download),
    ] = None,
    folder: Folder = Path("data"),
) -> None:
    """Verify downloaded files. Exit code 1 if a file is corrupt, or missing from a dataset that was named.

    Example: iresnet data verify mnist
    """
    checks = [check for name in names or files.REGISTRY for check in files.verify(name, folder)]
    made = table("dataset", "file", "status")
    for check in checks:
        made.add_row(check.name, check.file, check.verdict)
    content = [{"name": c.name, "file": c.file, "path": c.path, "status": c.verdict} for c in checks]
    result({"files": content}, made)
    bad = [c for c in checks if c.verdict == files.CORRUPT or (names and c.verdict == files.ABSENT)]
    if bad:
        c = bad[0]
        remedy = f"Remove {c.path} and run" if c.path else "Run"
        raise RuntimeError(f"{c.file} of {c.name} is {c.verdict}. {remedy} `iresnet data download {c.name}`.")


data.command("list")(with_common_options(list_datasets))
data.command()(with_common_options(download))
data.command()(with_common_options(verify))


def _files(name: str, folder: Path) -> str:
    if name not in files.REGISTRY:
        return "built in"
    size = sum(remote.size for remote in files.remote_files(name)) / 1e6
    return "present" if files.is_present(name, folder) else f"missing, {size:.0f} MB"


def _reporter(bars: Progress) -> files.Report:
    tasks: dict[str, TaskID] = {}

    def report(file: str, done: int, total: int) -> None:
        if file not in tasks:
            tasks[file] = bars.add_task(file, total=total)
        bars.update(tasks[file], completed=done)

    return report
