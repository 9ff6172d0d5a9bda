"""`iresnet sample`: draw samples from a trained density, as a plot and as arrays."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from ..base import Posterior
from ..data import read
from ..data.dataset import check_seed
from ..evaluate import as_flow
from ..evaluate.solving import decode
from ..inverse import Decoder
from ..run import Run
from ..spelling import counted, hint, listed, quoted
from .console import Device, console, result, waiting
from .output import MOST, RunFolder, cells, check_tolerance, open_run, plot_samples, print_table, save_samples


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
    model = opened.model(device=chosen)
    flow = as_flow(model, "a sample")
    options = {} if kind is None else {"component": _component(kind, opened, model)}
    context = _context(opened, given, count, chosen)
    decoder, begin = Decoder(), time.perf_counter()
    with torch.no_grad(), waiting(screen, f"Inverting {count:,} codes …"):
        z = flow.base.rsample(count, torch.Generator(chosen).manual_seed(seed), temperature=temperature, **options)
        x = decode(flow.transform, z, context, tolerance=tolerance, decoder=decoder).cpu().double()
    x = opened.schema.restore(x)
    if out is not None and str(out) == "-" and not opened.schema.is_image:
        print_table(opened.schema.names, cells(x, opened.schema))
        return
    seconds = time.perf_counter() - begin
    screen.say(f"Inverted in {_describe_time(seconds, decoder, z)}.")
    path = opened.output / "samples" if out is None else out
    saved = save_samples(path, x, opened.schema)
    picture, words = _plot(path, x, opened)
    content = {"samples": count, "seconds": seconds, "file": saved, "plot": picture}
    result(content, f"{counted(count, 'sample')} in {saved}{words}")


def _context(run: Run, file: str | None, count: int, device: str) -> Tensor | None:
    """Return the given columns of `count` rows, those of a file in turn; None if the density is not conditional."""
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
    return rows[torch.arange(count) % len(rows)].to(device)


def _describe_time(seconds: float, decoder: Decoder, z: Tensor) -> str:
    """Return the time and, on a GPU, how much of it went into preparing the inverse, or why nothing was prepared."""
    if not z.is_cuda:
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


def _component(kind: str, run: Run, model: nn.Module) -> int:
    """Return the component of the base distribution that belongs to a class."""
    classes = run.schema.classes
    if not isinstance(getattr(model, "head", None), Posterior):
        raise ValueError(
            "--class needs a base with one component per class. Train a hybrid with --set network.bayes=true."
        )
    if kind not in classes:
        raise ValueError(f"there is no class {quoted(kind)}. {hint(kind, classes)}")
    return classes.index(kind)
