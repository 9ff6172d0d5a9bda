"""`iresnet demo`: train one network, then classify, score, sample, invert and certify; minutes on one CPU core."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.table import Table

from ..data import toy
from ..data.sampling import check_seed
from ..demo import digits
from ..demo import toy as plane
from ..run.progress import progress, reporter
from ..spelling import round_up
from .console import console, ctrl_c, result, table, use_threads


def demo(
    only: Annotated[
        str, typer.Option(help="digits: one network for four tasks; toy: two-dimensional densities.")
    ] = "digits",
    out: Annotated[
        Path,
        typer.Option(
            help="The run folder, or the folder for plots of toy densities. An earlier demo in it is overwritten."
        ),
    ] = Path("runs/demo"),
    density: Annotated[
        list[str] | None, typer.Option(help=f"A density for --only toy: {', '.join(toy.names())}. May be repeated.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed for weights, data and samples.")] = 0,
) -> None:
    """Train one certified network that classifies, scores, generates and inverts 8x8 digits, and write a report.

    Example: iresnet demo

    Example: iresnet demo --only toy --density spirals --steps 500 --out runs/spirals
    """
    if only not in ("digits", "toy"):
        raise ValueError(f"--only must be digits or toy; got {only!r}.")
    check_seed(seed)
    if density and only == "digits":
        raise ValueError("--density needs --only toy. Add it, or leave --density out.")
    use_threads(0)  # the networks are small: more threads would wait for each other
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
        screen.say(f"Stopped and saved. Resume with: iresnet train --resume --out {quote(str(out))}")
        raise typer.Exit(130)
    content = {"run": out, "report": outcome.page, "seconds": outcome.seconds, "anomalies": outcome.anomalies}
    content |= {name: asdict(getattr(outcome, name)) for name in ("error", "density", "inverse")}
    content |= {"certified": outcome.certificate.passed, "tightened": outcome.tightened, "changed": outcome.changed}
    result(content, _metrics(outcome), _anomalies(outcome), f"Report: {outcome.page}")
    if not outcome.certificate.passed:
        raise RuntimeError(f"the model is not certified; {out / 'certificate.json'} shows the block that fails.")


def _metrics(o: digits.DigitsResult) -> Table:
    made = table("one network, on test images", "", title=f"Trained in {o.seconds:.0f} s")
    blocks, inverse = o.certificate.blocks, o.inverse
    made.add_row("classification error", f"{o.error.value:.2f} %  ({o.error.wrong} of {o.error.rows})")
    made.add_row("  95 % interval", f"{o.error.low:.2f} to {o.error.high:.2f} %")
    made.add_row("negative log-likelihood", f"{o.density.value:.3f} ± {o.density.standard_error:.3f} {o.density.unit}")
    made.add_row("inverse: proven for every block", f"{inverse.proven} of {inverse.rows} images")
    made.add_row("  largest error bound of a block (proven)", round_up(inverse.largest_block_bound, ".1e"))
    made.add_row("  code residual (computed)", f"{inverse.code_residual:.1e}")
    made.add_row("  largest distance to the original (measured)", f"{inverse.measured_error:.1e}")
    made.add_row("certificate: blocks proven contractive", f"{sum(b.passed for b in blocks)} of {len(blocks)}")
    made.add_row("  largest Lip(g)", round_up(max(b.lipschitz for b in blocks), ".4f"))
    made.add_row("  layers tightened, predictions changed", f"{o.tightened}, {o.changed}")
    return made


def _anomalies(o: digits.DigitsResult) -> Table:
    made = table("corrupted test images", "less likely than an\noriginal (AUROC)", "median\nanomaly score")
    for entry in o.anomalies:
        made.add_row(entry["name"], f"{100 * entry['detection']:.1f} %", f"{entry['median_anomaly']:.2f}")
    return made


def _toy(out: Path, names: tuple[str, ...], steps: int | None, seed: int) -> None:
    for name in names:
        toy.sample(name, 1)  # refuse an unknown name before training
    settings = plane.ToySettings()
    if steps is not None:
        settings = replace(settings, training=replace(settings.training, steps=steps))
    with progress(console()) as bars:
        outcomes = plane.run(out, names, settings, seed=seed, reporter=lambda name: reporter(bars, name))
    files = f"Plot          {out / 'toy.png'}\nMetrics       {out / 'toy.json'}\nCertificates  {out}/*-certificate.json"
    result({"densities": [asdict(o) for o in outcomes], "plot": out / "toy.png"}, _densities(outcomes), files)
    if not all(o.certified for o in outcomes):
        raise RuntimeError("a flow is not certified; its certificate shows the block that fails.")


def _densities(outcomes: list[plane.ToyResult]) -> Table:
    made = table(
        "density", "nats", "entropy", "Lip(g) ≤", "inverse\nproven ≤", "inverse\nmeasured",
        title="Test points, certified weights",
    )  # fmt: skip
    made.caption = "entropy: lower bound on nats; inverse: l2 error, largest of 1,000 points"
    for column in made.columns:
        column.no_wrap = True
    for o in outcomes:
        made.add_row(
            o.density,
            f"{o.nats:.3f} ± {o.nats_standard_error:.3f}",
            f"{o.floor:.3f}",
            round_up(o.largest_lipschitz, ".4f"),
            round_up(o.largest_block_bound, ".1e"),
            f"{o.measured_error:.1e}",
        )
    return made
