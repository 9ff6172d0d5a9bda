"""`iresnet sample`: draw samples from a trained density, as a plot and as arrays."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from torch import Tensor

from ..base import Posterior
from ..data import Schema, delimited, npy, read
from ..data.sampling import check_seed, seeded_generator
from ..evaluate import as_flow
from ..evaluate.solving import decode
from ..flow import Flow
from ..inverse import Decoder
from ..model import Model
from ..progress import part
from ..run import Run
from ..spelling import counted, hint, listed, quoted
from ..train.distributed import rank, world_size
from .console import Screen, console, ctrl_c, result, waiting, wants_json
from .options import Device, RunFolder, check_tolerance
from .output import MOST, cells, chunk_rows, open_run, plot_samples, print_csv, with_suffix
from .resumable import ResumableFile, describe_file, describe_parts, path_of_rank, share_of_rank


def sample(
    run: RunFolder,
    count: Annotated[int, typer.Option("-n", "--count", help="How many samples.", min=1, max=MOST)] = 64,
    seed: Annotated[int, typer.Option(help="Seed for the codes.")] = 0,
    temperature: Annotated[
        float, typer.Option(help="Scale of the codes around their mean; 1 samples the model itself.")
    ] = 1.0,
    kind: Annotated[
        str | None, typer.Option("--class", help="Sample only this class (hybrids with network.bayes=true).")
    ] = None,
    given: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="For a conditional density: a table of the given columns, used in turn."),
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest proven l2 error of each block's solve, in the block's units.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Output path, without suffix; - prints the rows of a table.", show_default="RUN/samples"),
    ] = None,
    device: Device = "auto",
) -> None:
    """Draw samples by inverting every block, with a proven error bound.

    Rows of a table are drawn and written in chunks. If the command is interrupted, the same command resumes it.

    On a GPU most of the time goes into preparing the inverse once; it is printed beside the total.

    Example: iresnet sample runs/demo -n 100 --seed 1

    Example: iresnet sample runs/demo -n 16 --class 7 --out sevens

    Example: iresnet sample runs/plans -n 100 --given people.csv
    """
    check_seed(seed)
    check_tolerance(tolerance)
    if not (0 < temperature < math.inf):
        raise ValueError(f"--temperature must be positive and finite; got {temperature}.")
    (opened, chosen), screen = open_run(run, device), console()
    drawing = _drawing(opened, chosen, count, seed, temperature, kind, given, tolerance)
    if out is not None and str(out) == "-" and not opened.schema.is_image:
        _print_samples(drawing, opened.schema, screen)
        return
    path, begin = opened.output / "samples" if out is None else out, time.perf_counter()
    shown: list[Tensor] = []
    if opened.schema.is_image:
        saved = _save_images(with_suffix(path, ".npz"), drawing, shown, screen)
    else:
        options = [count, seed, temperature, kind, given, tolerance, chosen, drawing.size]
        identity = {"model": opened.sha256(), "options": options} | describe_file(given)
        saved = _save_table(with_suffix(path, ".csv"), drawing, opened.schema, identity, shown, screen)
    seconds = time.perf_counter() - begin
    screen.say(f"Inverted in {_describe_time(seconds, drawing.decoder, chosen)}.")
    picture, words = _plot(path, shown[0], opened) if rank() == 0 else (None, "")
    content = {"samples": count, "seconds": seconds, "file": saved, "plot": picture}
    result(content, f"{counted(count, 'sample')} in {saved}{words}")
    screen.say(*filter(None, [describe_parts(with_suffix(path, ".csv"))]))


@dataclass(frozen=True, eq=False)
class Drawing:
    """Samples that are drawn `size` at a time, in memory that does not grow: chunk k is a function of (seed, k)."""

    flow: Flow
    count: int
    seed: int
    device: str
    size: int
    temperature: float
    options: dict[str, int]
    context: Tensor | None
    tolerance: float | None
    schema: Schema
    decoder: Decoder = field(default_factory=Decoder)

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return -(-self.count // self.size)

    @torch.no_grad()
    def chunk(self, k: int) -> Tensor:
        """Draw the samples of a chunk, in the units of the data."""
        rows = range(k * self.size, min((k + 1) * self.size, self.count))
        generator = torch.Generator(self.device).manual_seed(self.seed if k == 0 else _seed(self.seed, k))
        z = self.flow.base.rsample(len(rows), generator, temperature=self.temperature, **self.options)
        context = None if self.context is None else self.context[torch.tensor(rows) % len(self.context)].to(self.device)
        x = decode(self.flow.transform, z, context, tolerance=self.tolerance, decoder=self.decoder).cpu().double()
        return self.schema.restore(x)

    def starting_at(self, first: int, end: int | None, screen: Screen) -> Iterator[Tensor]:
        """Iterate over the chunks first, ..., end - 1, each a part of the work."""
        end = self.chunks if end is None else end
        with waiting(screen, f"Inverting {self.count:,} codes …"):
            for k in range(first, end):
                with part(k, self.chunks):
                    x = self.chunk(k)
                yield x


def _seed(seed: int, k: int) -> int:
    return seeded_generator(seed, "samples", k).initial_seed()


def _drawing(
    run: Run,
    device: str,
    count: int,
    seed: int,
    temperature: float,
    kind: str | None,
    given: str | None,
    tolerance: float | None,
) -> Drawing:
    model = run.model(device=device)
    flow = as_flow(model, "a sample")
    options = {} if kind is None else {"component": _component(kind, run, model)}
    size = chunk_rows(run.schema.dimension, torch.device(device))
    context = _context(run, given)
    return Drawing(flow, count, seed, device, size, temperature, options, context, tolerance, run.schema)


def _print_samples(drawing: Drawing, schema: Schema, screen: Screen) -> None:
    """Print the rows of a table as they are drawn; with --json, when all are."""
    rows: list[tuple[Any, ...]] = []
    for k, x in enumerate(drawing.starting_at(0, None, screen)):
        if wants_json():
            rows += cells(x, schema)
        else:
            print_csv(delimited.format_csv(None if k else schema.names, cells(x, schema)))
    if wants_json():
        result({"columns": schema.names, "rows": rows})


def _save_table(
    path: Path, drawing: Drawing, schema: Schema, identity: dict[str, Any], shown: list[Tensor], screen: Screen
) -> Path:
    """Write the rows of a table as they are drawn; those of the first chunk are to be shown."""
    first, end = share_of_rank(drawing.chunks)
    with ResumableFile(path_of_rank(path), identity, screen) as written, ctrl_c(written.describe):
        if written.chunks or end == 0:
            shown.append(drawing.chunk(0))
        for k, x in enumerate(drawing.starting_at(first + written.chunks, end, screen), first + written.chunks):
            shown += [] if shown else [x]
            written.append(delimited.format_csv(None if k else schema.names, cells(x, schema)), rows=len(x))
        return written.finish()


def _save_images(path: Path, drawing: Drawing, shown: list[Tensor], screen: Screen) -> Path:
    """Write images as they are drawn; those of the first chunk are to be shown."""
    if world_size() > 1:
        raise ValueError("under torchrun, processes share the samples of a table, not images. Use one process.")

    def arrays() -> Iterator[NDArray[Any]]:
        for x in drawing.starting_at(0, None, screen):
            shown.extend([] if shown else [x])
            yield x.numpy()

    return npy.save_npz_chunks(path, (drawing.count, *drawing.schema.shape), np.dtype(np.float64), arrays())


def _context(run: Run, file: str | None) -> Tensor | None:
    """Return the given columns of a file's rows, to be used in turn; None if the density is not conditional."""
    schema = run.schema
    columns = [name for name in schema.names if name not in schema.targets] if schema.targets else []
    if bool(columns) != (file is not None):
        listing = f"a table of {listed(columns)} with --given FILE." if columns else "no --given, which is for others."
        what = "conditional" if columns else "not conditional"
        raise ValueError(f"this density is {what}: it needs {listing}")
    if file is None:
        return None
    some = schema.select(columns)
    rows = read(file, some, labels=False).x
    if not bool(some.inside(rows).all()):
        raise ValueError(f"{file} holds a value that a column of the model cannot have. `iresnet score` shows which.")
    return rows


def _describe_time(seconds: float, decoder: Decoder, device: str) -> str:
    """Return the time and, on a GPU, how much of it went into preparing the inverse, or why nothing was prepared."""
    if not device.startswith("cuda"):
        return f"{seconds:.1f} s"
    return f"{seconds:.1f} s, {decoder.reason.strip('.') or f'{decoder.seconds:.1f} s of it to prepare'}"


def _plot(path: Path, x: Tensor, run: Run) -> tuple[Path | None, str]:
    """Plot samples, those of a table beside held-out data; return where in words, or why the data cannot be read."""
    try:
        data = x if run.schema.is_image else run.splits().held_out_data.x
    except (OSError, ValueError) as error:
        return None, f". No plot, since it needs the test data: {error}"
    picture = plot_samples(path, x, data, run.schema)
    return picture, f", plotted in {picture}"


def _component(kind: str, run: Run, model: Model) -> int:
    """Return the component of the base distribution that belongs to a class."""
    classes = run.schema.classes
    if not isinstance(getattr(model, "head", None), Posterior):
        raise ValueError(
            "--class needs a base with one component per class. Train a hybrid with --set network.bayes=true."
        )
    if kind not in classes:
        raise ValueError(f"there is no class {quoted(kind)}. {hint(kind, classes)}")
    return classes.index(kind)
