"""`iresnet demo`: train, classify, score, sample, invert, prove and draw, in minutes on one core."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from ..data import toy
from ..data.dataset import check_seed
from ..demo import digits
from ..demo import toy as plane
from .console import console, ctrl_c, progress, reporter, table


def demo(
    only: Annotated[str, typer.Option(help="digits: one network, four jobs; toy: densities in the plane.")] = "digits",
    out: Annotated[
        Path, typer.Option(help="Folder for the report, or for the picture; a run in it is replaced.")
    ] = Path("runs/demo"),
    density: Annotated[
        list[str] | None, typer.Option(help=f"With --only toy: {', '.join(toy.names())}. May be repeated.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, data and samples.")] = 0,
) -> None:
    """One certified network on 8x8 digits that classifies, scores, samples and is inverted, and a report about it.

    Example: iresnet demo

    Example: iresnet demo --only toy --density spirals --steps 500 --out runs/spirals
    """
    if only not in ("digits", "toy"):
        raise ValueError(f"only must be digits or toy; got {only!r}.")
    check_seed(seed)
    if density and only == "digits":
        raise ValueError("--density is for --only toy. Leave it out, or add --only toy.")
    torch.set_num_threads(1)  # the networks are small: more threads would only wait for each other
    if only == "toy":
        _toy(out, tuple(density or ("moons", "checkerboard")), steps, seed)
    else:
        _digits(out, steps, seed)


def _digits(out: Path, steps: int | None, seed: int) -> None:
    screen = console()
    with ctrl_c() as stop, progress(screen) as bars:
        outcome = digits.run(
            out, digits.experiment(seed, steps), report=reporter(bars, "digits"), stop=stop, say=bars.console.print
        )
    if outcome is None:
        screen.print(f"Stopped and saved. Go on with: iresnet train --resume --out {out}", soft_wrap=True)
        raise typer.Exit(130)
    screen.print(_metrics(outcome))
    screen.print(_anomalies(outcome))
    screen.say(f"Report {outcome.page}")
    if not outcome.certificate.passed:
        raise RuntimeError(f"the model has no certificate; see {out / 'certificate.json'} for the block that fails.")


def _metrics(o: digits.DigitsResult) -> Table:
    made = table("one network, test images it has not met", "", title=f"Trained in {o.seconds:.0f} s")
    blocks, inverse = o.certificate.blocks, o.inverse
    made.add_row("classifies: error", f"{o.error.value:.2f} %  ({o.error.wrong} of {o.error.rows})")
    made.add_row("  95 % interval", f"{o.error.low:.2f} to {o.error.high:.2f} %")
    made.add_row("gives likelihoods", f"{o.density.value:.3f} ± {o.density.standard_error:.3f} {o.density.unit}")
    made.add_row("is inverted: every block's solve proven", f"{inverse.proven} of {inverse.rows} images")
    made.add_row("  largest block bound (proven)", f"{inverse.largest_block_bound:.1e}")
    made.add_row("  code residual (evaluated)", f"{inverse.code_residual:.1e}")
    made.add_row("  distance to the true image (measured)", f"{inverse.measured_error:.1e}")
    made.add_row("is certified: blocks proven contractive", f"{sum(b.passed for b in blocks)} of {len(blocks)}")
    made.add_row("  largest Lip(g)", f"{max(b.lipschitz for b in blocks):.4f}")
    made.add_row("  layers tightened, test images changed by it", f"{o.tightened}, {o.changed}")
    return made


def _anomalies(o: digits.DigitsResult) -> Table:
    made = table("corrupted test images", "less likely than the\noriginals, of all pairs", "median\nanomaly")
    for entry in o.anomalies:
        made.add_row(entry["name"], f"{100 * entry['detection']:.1f} %", f"{entry['median_anomaly']:.2f}")
    return made


def _toy(out: Path, names: tuple[str, ...], steps: int | None, seed: int) -> None:
    for name in names:
        toy.sample(name, 1)  # an unknown name is refused before anything is trained
    settings = plane.ToySettings()
    if steps is not None:
        settings = replace(settings, training=replace(settings.training, steps=steps))
    screen = console()
    with progress(screen) as bars:
        outcomes = plane.run(out, names, settings, seed=seed, reporter=lambda name: reporter(bars, name))
    screen.print(_densities(outcomes))
    screen.say(
        f"Picture       {out / 'toy.png'}\nFigures       {out / 'toy.json'}\nCertificates  {out}/*-certificate.json",
    )
    if not all(o.certified for o in outcomes):
        raise RuntimeError("a flow has no certificate; see the certificates for the block that fails.")


def _densities(outcomes: list[plane.ToyResult]) -> Table:
    made = table(
        "density", "nats", "floor", "Lip(g) ≤", "inverse\nproven to", "inverse\nmeasured",
        title="Held-out points, certified weights",
    )  # fmt: skip
    made.caption = "floor: the entropy, which no model can beat; inverse: worst of 1,000"
    for column in made.columns:
        column.no_wrap = True
    for o in outcomes:
        made.add_row(
            o.density,
            f"{o.nats:.3f} ± {o.nats_standard_error:.3f}",
            f"{o.floor:.3f}",
            f"{o.largest_lipschitz:.4f}",
            f"{o.largest_block_bound:.1e}",
            f"{o.measured_error:.1e}",
        )
    return made
