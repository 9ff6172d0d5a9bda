"""`iresnet sample`: draw rows from a trained density, as a picture and as arrays."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from ..base import Posterior
from ..data.dataset import check_seed
from ..evaluate import as_flow
from ..evaluate.solving import decode
from ..inverse import Decoder
from ..run import Run
from ..spelling import counted, hint, quoted
from .console import Device, console, waiting
from .output import MOST, RunFolder, check_tolerance, draw_rows, open_run, rows_of, save_rows


def sample(
    run: RunFolder,
    count: Annotated[int, typer.Option("-n", "--count", help="How many.", min=1, max=MOST)] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the codes.")] = 0,
    temperature: Annotated[
        float, typer.Option(help="Spread of the codes around their mean; 1 is the model's own.")
    ] = 1.0,
    kind: Annotated[
        str | None, typer.Option("--class", help="Only this class; for hybrids trained with network.bayes.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Proven l2 error of every block's solve, in the block's units.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Path without ending.", show_default="RUN/samples")] = None,
    device: Device = "auto",
) -> None:
    """Draw samples: every block is inverted, and every solve proven.

    On a GPU most of the time is spent once, on preparing; it is said beside the whole.

    Example: iresnet sample runs/demo -n 100 --seed 1

    Example: iresnet sample runs/demo -n 16 --class 7 --out sevens
    """
    check_seed(seed)
    check_tolerance(tolerance)
    if not (0 < temperature < math.inf):
        raise ValueError(f"temperature must be positive; got {temperature}.")
    (opened, chosen), screen = open_run(run, device), console()
    model = opened.model(device=chosen)
    flow = as_flow(model, "a sample")
    options = {} if kind is None else {"component": _component(kind, opened, model)}
    decoder, begin = Decoder(), time.perf_counter()
    with torch.no_grad(), waiting(screen, f"Solving {count:,} codes …"):
        z = flow.base.rsample(count, torch.Generator(chosen).manual_seed(seed), temperature=temperature, **options)
        x = decode(flow.transform, z, tolerance=tolerance, decoder=decoder).cpu()
    screen.say(f"Solved in {_spent(time.perf_counter() - begin, decoder, z)}.")
    path = opened.output / "samples" if out is None else out
    saved = save_rows(path, x, opened.schema)
    screen.say(f"{counted(count, 'sample')} in {saved}{_drawn(path, x, opened)}")


def _spent(seconds: float, decoder: Decoder, z: Tensor) -> str:
    """The time, and on a GPU how much of it went into preparing, or why nothing was prepared."""
    if not z.is_cuda:
        return f"{seconds:.1f} s"
    return f"{seconds:.1f} s, {decoder.reason.strip('.') or f'{decoder.seconds:.1f} s of it to prepare'}"


def _drawn(path: Path, x: Tensor, run: Run) -> str:
    """Draw samples, those of a table beside test rows, and say where; or why not, where the rows are gone."""
    try:
        data = x if run.schema.is_image else rows_of(run, None).x
    except (OSError, ValueError) as error:
        return f". No picture, since they are drawn beside test rows: {error}"
    return f", drawn in {draw_rows(path, x, data, run.schema)}"


def _component(kind: str, run: Run, model: nn.Module) -> int:
    """The component of the base that stands for a class."""
    classes = run.schema.classes
    if not isinstance(getattr(model, "head", None), Posterior):
        raise ValueError("--class needs a base with one normal a class. Train a hybrid with --set network.bayes=true.")
    if kind not in classes:
        raise ValueError(f"there is no class {quoted(kind)}. {hint(kind, classes)}")
    return classes.index(kind)
