"""`iresnet evaluate`: error, likelihood and inverse of a trained model, each with its error bar; more if asked."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from torch import nn

from .. import atomic
from ..data import Dataset, some
from ..evaluation import Density, Error, Inverse, as_flow, has_inverse, outside, probe, protocol, robustness, strange
from ..evaluation import evaluate as judge
from ..evaluation.protocol import LIMIT
from ..evaluation.robustness import check_radius
from ..residual import EXACT_UP_TO
from ..results import finite
from ..run import Run
from .console import Device, choose_device, console, use_threads, waiting
from .output import DataFolder, DataOption, RunFolder, Split, rows_of

#: Rows that are judged where a likelihood is an estimate, which takes long.
MANY = 1000

#: Figures that are dropped where other rows are judged.
OF_ROWS = ("robustness", "probe")

#: Rows of each kind that are told apart.
STRANGE = 500

Rows = Annotated[
    int | None,
    typer.Option(
        help="How many rows, drawn at random.", min=1, show_default=f"all up to {EXACT_UP_TO} dimensions, else {MANY:,}"
    ),
]

Radii = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LENGTH",
        help="Also: which rows keep their class under every change of this l2 length, in the units of the data (36 "
        "of 255 grey levels is 36/255 for pixels in [0, 1]). May be given more than once.",
    ),
]
Linear = Annotated[
    bool, typer.Option("--probe", help="Also: the error of logistic regression on the codes of training rows.")
]
Bits = Annotated[
    bool,
    typer.Option(
        "--protocol",
        help="Also: the likelihood of all rows as the paper judges it, bias and standard error of the mean below "
        "--limit.",
    ),
]
Others = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DATA",
        help="Also: how well likelihood and typicality tell these rows from the run's own: a file, a folder, a "
        "set's name, or 'corrupted'. May be given more than once.",
    ),
]


def evaluate(
    run: RunFolder,
    data: DataOption = None,
    split: Split = "test",
    rows: Rows = None,
    draws: Annotated[int, typer.Option(help="Draws of noise a likelihood is averaged over.", min=2)] = 8,
    radius: Radii = None,
    linear: Linear = False,
    bits: Bits = False,
    limit: Annotated[float, typer.Option(help="Of --protocol, in bits per dimension.")] = LIMIT,
    ood: Others = None,
    data_dir: DataFolder = None,
    device: Device = "auto",
) -> None:
    """Error, likelihood and inverse on rows that were not trained on.

    The test part's figures are kept in RUN/evaluation.json.

    Example: iresnet evaluate runs/demo --split validation

    Example: iresnet evaluate runs/robust --radius 36 --radius 72

    Example: iresnet evaluate runs/flow --protocol --ood corrupted --ood fashion-mnist
    """
    opened, screen = Run.open(run).with_data_in(data_dir), console()
    use_threads(opened.schema.dimension)
    chosen = choose_device(device)
    available, model = rows_of(opened, data, split, labels=True), opened.model(device=chosen)
    radii = [_length(word) for word in radius or []]
    if linear and not has_inverse(model):
        raise ValueError("--probe reads codes; an ordinary ResNet, without invertible blocks, has none. Leave it out.")
    if bits or ood:
        as_flow(model, "--protocol" if bits else "--ood")  # what cannot be judged is refused first
    strangers = _strangers(opened, available, ood or [])
    content = judged(model, available, rows, screen, split=data or split, draws=draws)
    screen.print(f"{'rows':<9}{content['rows']:,} of {content['of']:,}", highlight=False)
    for name, cls in (("error", Error), ("density", Density), ("inverse", Inverse)):
        if name in content:
            screen.print(f"{name:<9}{cls(**content[name])}", highlight=False, soft_wrap=True)
    kept = data is None and split == "test"
    if kept:
        keep(opened, content)  # what follows may take long, or fail
    if radii:
        content["robustness"] = _moved(model, available, rows, radii, screen)
    if linear:
        content["probe"] = _probed(opened, model, available if rows is None else some(available, rows), screen)
    if bits:
        content["protocol"] = _by_protocol(model, available if rows is None else some(available, rows), limit, screen)
    if strangers:
        content["outside"] = _told_apart(opened, model, available, strangers, screen)
    if kept:
        screen.print(f"Figures in {keep(opened, content)}", highlight=False, soft_wrap=True)


def _length(word: str) -> float:
    """A radius as it was typed; a fraction is of pixels in [0, 1], which are not the units of the data."""
    try:
        radius = float(word)
    except ValueError:
        raise ValueError(
            f"--radius is one number, in the units of the data; got {word!r}. For 36/255 of pixels in [0, 1] with 256 "
            "grey levels, give 36."
        ) from None
    check_radius(radius)
    return radius


def _moved(
    model: nn.Module, data: Dataset, rows: int | None, radii: list[float], screen: Console
) -> list[dict[str, Any]]:
    """How robust the classes of the rows that were judged are, radius by radius."""
    found = []
    for radius in radii:
        with waiting(screen, f"Attacking rows within {radius:g} …"):
            robust = robustness(model, _rows(model, data, rows), radius)
        screen.print(f"{'robust':<9}{robust}", highlight=False, soft_wrap=True)
        found.append(asdict(robust))
    return found


def _probed(run: Run, model: nn.Module, data: Dataset, screen: Console) -> dict[str, Any]:
    device = next(model.parameters()).device
    with waiting(screen, "Fitting logistic regressions …"):
        found = probe(model, run.splits().train.to(device), data.to(device))
    screen.print(f"{'probe':<9}{found}", highlight=False, soft_wrap=True)
    return asdict(found)


def _by_protocol(model: nn.Module, data: Dataset, limit: float, screen: Console) -> dict[str, Any]:
    with waiting(screen, f"Judging {len(data):,} rows to the paper's protocol …"):
        found = protocol(model, data.to(next(model.parameters()).device), bias=limit, error=limit)
    screen.print(f"{'protocol':<9}{found}", highlight=False, soft_wrap=True)
    return asdict(found) | {"limit": limit}


def _strangers(run: Run, data: Dataset, sources: list[str]) -> dict[str, Dataset]:
    """The rows to tell from the data, by name; 'corrupted' stands for several kinds, made of the data."""
    found: dict[str, Dataset] = {}
    for source in sources:
        found |= strange(some(data, STRANGE)) if source == "corrupted" else {source: rows_of(run, source)}
    return found


def _told_apart(
    run: Run, model: nn.Module, data: Dataset, others: dict[str, Dataset], screen: Console
) -> list[dict[str, Any]]:
    """How well they are told apart, one line each; the entropy is that of the run's validation rows."""
    device = next(model.parameters()).device
    placed = {name: some(rows, STRANGE).to(device) for name, rows in others.items()}
    with waiting(screen, "Scoring strange rows …"):
        found = outside(model, some(data, STRANGE).to(device), placed, run.reference(), rows=STRANGE)
    for detection in found:
        screen.print(f"{'ood':<9}{detection}", highlight=False, soft_wrap=True)
    return [asdict(detection) for detection in found]


def judged(model: nn.Module, data: Dataset, rows: int | None, screen: Console, **options: Any) -> dict[str, Any]:
    """The figures of so many rows, judged where the model is; "of" says how many there were."""
    chosen = _rows(model, data, rows)
    with waiting(screen, f"Judging {len(chosen):,} of {len(data):,} rows …"):
        return judge(model, chosen, **options) | {"of": len(data)}


def _rows(model: nn.Module, data: Dataset, rows: int | None) -> Dataset:
    """So many of the rows, the same every time, where the model is."""
    if rows is None:
        rows = len(data) if data.schema.dimension <= EXACT_UP_TO else MANY
    return some(data, rows).to(next(model.parameters()).device)


def keep(run: Run, content: dict[str, Any]) -> Path:
    """Write the figures of the test part, beside what else was known of the same rows."""
    known = run.read_json("evaluation.json")
    if known.get("rows") != content["rows"]:
        known = {name: value for name, value in known.items() if name not in OF_ROWS}
    text = json.dumps(finite({**known, **content}), indent=1, allow_nan=False)
    return atomic.write(run.output / "evaluation.json", text + "\n")
