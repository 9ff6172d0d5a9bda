"""`iresnet demo`: train, prove, invert and draw, in about two minutes on two cores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from .. import demo as job
from ..data import toy
from ..training import Report


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture, the figures and the certificates.")] = Path(
        "runs/demo"
    ),
    density: Annotated[
        list[str] | None, typer.Option(help=f"Densities to learn: {', '.join(toy.names())}. May be repeated.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps per density.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, data and samples.")] = 0,
) -> None:
    """Train certified flows on 2-D densities and draw what they learned.

    Example: iresnet demo --density spirals --steps 500 --out runs/spirals
    """
    names = tuple(density) if density else ("moons", "checkerboard")
    for name in names:
        toy.sample(name, 1)  # an unknown name is refused before anything is trained
    settings = job.DemoSettings()
    if steps is not None:
        settings = replace(settings, training=replace(settings.training, steps=steps))
    torch.set_num_threads(1)  # the networks are small: more threads would only wait for each other
    console = Console()
    with _bars(console) as bars:
        outcomes = job.run(out, names, settings, seed=seed, reporter=lambda name: _reporter(bars, name))
    console.print(_table(outcomes))
    console.print(
        f"Picture       {out / 'toy.png'}\nFigures       {out / 'toy.json'}\nCertificates  {out}/*-certificate.json"
    )
    if not all(o.certified for o in outcomes):
        raise RuntimeError("a flow has no certificate; see the certificates for the block that fails.")


@contextmanager
def _bars(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description:<13}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[nats]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield progress


def _reporter(bars: Progress, name: str) -> Report:
    task = bars.add_task(name, total=None, nats="")
    smooth: list[float] = []

    def report(step: int, steps: int, figures: dict[str, float]) -> None:
        smooth.append(figures["nats"])
        recent = smooth[-50:]
        bars.update(task, completed=step, total=steps, nats=f"{sum(recent) / len(recent):.3f} nats")

    return report


def _table(outcomes: list[job.Outcome]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title="Held-out points, certified weights",
        caption="floor: the entropy, which no model can beat; inverse: worst of 1,000",
    )
    for column in ("density", "nats", "floor", "Lip(g) ≤", "inverse\nproven to", "inverse\nmeasured"):
        table.add_column(column, justify="left" if column == "density" else "right", no_wrap=True)
    for o in outcomes:
        table.add_row(
            o.density,
            f"{o.nats:.3f} ± {o.nats_standard_error:.3f}",
            f"{o.floor:.3f}",
            f"{o.largest_lipschitz:.4f}",
            f"{o.largest_block_bound:.1e}",
            f"{o.measured_error:.1e}",
        )
    return table
