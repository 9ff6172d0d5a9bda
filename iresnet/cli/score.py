"""`iresnet score`: log-likelihood, anomaly scores and class of every row of a file, as CSV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from shlex import join
from typing import Annotated, Any, NamedTuple

import typer

from ..data import Dataset, delimited
from ..data.chunked import Chunk, ChunkedSource
from ..run import Scorer
from ..run.missing import is_run
from ..run.weights import resolve_folder
from ..spelling import counted
from ..train.distributed import rank
from .completion import complete_data
from .console import Screen, console, ctrl_c, result, waiting, wants_json
from .options import DataFolder, Device, RunFolder, check_tolerance
from .output import chunked_data, each_chunk, open_run, print_csv
from .resumable import ResumableFile, describe_parts, describe_source, path_of_rank, share_of_rank

#: The names of columns that are written; an id column with such a name gets another.
SCORES = ("row", "log_likelihood", "standard_error", "bias_bound", "anomaly", "atypicality", "class", "probability")


#: Suffixes of data files that are not written.
OTHER_FORMATS = (".parquet", ".npy", ".npz", ".xlsx", ".json")


def score(
    run: RunFolder,
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="A table, a folder of images, or a dataset.", autocompletion=complete_data),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The CSV file to write; - prints it.", show_default="print it")
    ] = None,
    id_: Annotated[
        str | None,
        typer.Option("--id", help="The column of a table that names its rows.", show_default="as in training"),
    ] = None,
    missing: Annotated[
        str, typer.Option(metavar="refuse|drop", help="What to do with rows of a table with missing cells.")
    ] = "refuse",
    explain: Annotated[
        int, typer.Option(help="Write this many columns of a table that make a row unlikely.", min=0, max=1000)
    ] = 0,
    draws: Annotated[
        int | None,
        typer.Option(
            help="Noise draws per sample for the likelihood.", min=2, max=100_000, show_default="8, or by --tolerance"
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest standard error of a log-likelihood, in nats, where at most 16 draws reach it.",
            show_default="beyond 64 dimensions, 2.5 % of the spread of validation data",
        ),
    ] = None,
    data_dir: DataFolder = None,
    device: Device = "auto",
) -> None:
    """Score every row of a file or image of a folder, and write a CSV file.

    log_likelihood is ln p(x) in nats and in the units of the file, with its standard error and a bound on its bias.
    Every sample gets as many draws of noise as --tolerance needs, whatever the other samples are.

    anomaly is the fraction of validation data that is more likely, interpolated and continued beyond them: it ranks
    samples as log_likelihood does, and stays below 1.

    atypicality is the same for the distance of the log-likelihood from its mean. It also detects inputs that are too
    likely, such as blank images.

    --explain 3 adds, for each row of a table, the three columns in which an ordinary value would raise its
    log-likelihood most, and by how many nats.

    A value that a column cannot have, such as an unknown category, has the log-likelihood -inf and the anomaly 1.

    A model with a classifier adds the class and its probability.

    Files of any size are read and written in chunks. If the command is interrupted, the same command resumes it.

    A class or file name that begins like a formula (=, +, -, @) gets a leading apostrophe, which iresnet ignores when
    reading.

    Example: iresnet score runs/mine new.csv --out scores.csv

    Example: zcat new.csv.gz | iresnet score runs/mine - --id name --explain 3
    """
    if missing not in ("refuse", "drop"):
        raise ValueError(f"--missing must be refuse or drop; got {missing!r}.")
    check_tolerance(tolerance)
    if out is not None and out.suffix in OTHER_FORMATS:
        raise ValueError(f"--out must be a CSV file, which scores are written as; got {str(out)!r}.")
    if is_run(Path(file)) and not is_run(resolve_folder(run)):
        raise ValueError(f"the run folder comes first. Use: {join(['iresnet', 'score', file, str(run)])}")
    (opened, chosen), screen = open_run(run, device, data_dir), console()
    source = chunked_data(opened, file, chosen, id=id_ or "", skip_missing=missing == "drop")
    scorer = Scorer(opened, draws=draws, tolerance=tolerance, explain=explain, device=chosen)
    name = "file" if opened.schema.is_image else id_ or opened.schema.id
    if out is None or str(out) == "-":
        _print_scores(source, _scored(scorer, source, name, screen))
        return
    identity = describe_source(opened, source) | {"options": [name, missing, explain, draws, tolerance, chosen]}
    first, end = share_of_rank(source)
    with ResumableFile(path_of_rank(out), identity, screen) as written, ctrl_c(written.describe):
        done = written.totals.get("rows", 0)
        for scores in _scored(scorer, source, name, screen, first + written.chunks, end, done):
            names = scores.names if rank() == 0 and not written.totals.get("samples") else None
            text = delimited.format_csv(names, scores.lines) if scores.lines else ""
            written.append(text, rows=scores.rows, samples=len(scores.lines), impossible=scores.impossible)
        header = ""
        if rank() == 0 and not written.totals.get("samples"):  # the header of the parts below is in this one
            header = _header(source, () if end is None else _scored(scorer, source, name, screen, end))
        written.finish(header)
        _report(written, screen)
        screen.say(*filter(None, [describe_parts(out)]))


class Scores(NamedTuple):
    """The scores of a chunk: the names of the columns, and a line for each sample; of how many rows of the file.

    `impossible` counts the samples with a value that its column cannot have.
    """

    names: list[str]
    lines: list[tuple[Any, ...]]
    rows: int
    impossible: int


def _scored(scorer: Scorer, source: ChunkedSource, name: str, screen: Screen, *place: Any) -> Iterator[Scores]:
    """Score the chunks of a source; `place` says which, as for `each_chunk`."""
    total = "" if source.rows is None else f" {source.rows:,} samples"
    with waiting(screen, f"Scoring{total} …"):
        for chunk in each_chunk(source, *place):
            yield _scores(scorer, chunk, name)


def _scores(scorer: Scorer, chunk: Chunk, name: str) -> Scores:
    if chunk.data is None:
        return Scores([], [], chunk.rows, 0)
    columns = _columns(scorer, chunk.data, name)
    inside = chunk.data.schema.inside(chunk.data.x)
    impossible = int((~inside).sum()) if "log_likelihood" in columns else 0
    return Scores(list(columns), list(zip(*columns.values(), strict=True)), chunk.rows, impossible)


def _columns(scorer: Scorer, data: Dataset, name: str = "file") -> dict[str, list[Any]]:
    """Return the table, column by column: the names of the samples, in a column `name`, and all scores of the model."""
    columns: dict[str, list[Any]] = {"row": list(data.rows or range(len(data)))}
    if data.names:
        columns[name if name not in SCORES else f"id: {name}"] = list(data.names)
    columns |= scorer.score(data)
    if not wants_json():  # all digits of float64, so that samples rank as by ln p
        columns |= {
            name: [f"{a:.15g}" for a in columns[name]] for name in ("anomaly", "atypicality") if name in columns
        }
    return columns


def _print_scores(source: ChunkedSource, chunks: Iterable[Scores]) -> None:
    """Print a table as it is computed; with --json, when it is complete."""
    names, lines, count = list[str](), list[tuple[Any, ...]](), 0
    for scores in chunks:
        if wants_json():
            names, lines = scores.names or names, lines + scores.lines
        elif scores.lines:
            print_csv(delimited.format_csv(None if count else scores.names, scores.lines))
        count += len(scores.lines)
    _refuse_none(source, count)
    if wants_json():
        result({"columns": names, "rows": lines})


def _header(source: ChunkedSource, below: Iterable[Scores]) -> str:
    """Return the header of a part without samples, from the first chunk below that has some."""
    names = next((scores.names for scores in below if scores.lines), [])
    _refuse_none(source, len(names))
    return delimited.format_csv(names, [])


def _refuse_none(source: ChunkedSource, samples: int) -> None:
    if not samples:
        raise ValueError(f"{source.path}: every row has a missing cell, so none is left. Drop the columns they are in.")


def _report(written: ResumableFile, screen: Screen) -> None:
    """Say what was written."""
    samples, impossible = (written.totals.get(name, 0) for name in ("samples", "impossible"))
    if impossible:
        screen.say(
            f"{impossible:,} of {samples:,} samples hold a value that its column cannot have; --explain 1 names it."
        )
    result({"samples": samples, "file": written.path}, f"{counted(samples, 'sample')} scored in {written.path}")
