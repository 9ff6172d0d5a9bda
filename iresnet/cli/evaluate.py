"""`iresnet evaluate`: error, likelihood and inverse of a trained model, each with its error bar; more if asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from torch import nn

from ..data import Dataset, subsample
from ..evaluate import (
    Density,
    Error,
    Inverse,
    as_flow,
    corrupted_datasets,
    has_inverse,
    ood_detection,
    probe,
    protocol,
    robustness,
)
from ..evaluate import evaluate as evaluate_model
from ..evaluate.protocol import LIMIT
from ..evaluate.robustness import check_radius
from ..logdet import EXACT_UP_TO
from ..run import Run
from ..run.fit import device_of
from .console import Device, Screen, console, waiting
from .output import DataFolder, DataOption, RunFolder, Split, open_run, rows_of

#: Rows that are judged where a likelihood is an estimate, which takes long.
MANY = 1000

#: Figures that are dropped where other rows are judged.
OF_ROWS = ("robustness", "probe")

#: Figures to keep, by name, and the lines that say them.
Part: TypeAlias = tuple[dict[str, Any], list[str]]

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
    (opened, chosen), screen = open_run(run, device, data_dir), console()
    sha256, available, model = opened.sha256(), rows_of(opened, data, split, labels=True), opened.model(device=chosen)
    radii, kept = [_length(word) for word in radius or []], data is None and split == "test"
    if linear and not has_inverse(model):
        raise ValueError("--probe reads codes; an ordinary ResNet, without invertible blocks, has none. Leave it out.")
    if bits or ood:
        as_flow(model, "--protocol" if bits else "--ood")  # what cannot be judged is refused first
    if kept:
        say_stale(opened, screen)  # nor is a damaged file found when all is done
    strangers, some_rows = (
        _strangers(opened, available, ood or []),
        available if rows is None else subsample(available, rows),
    )
    parts = [_evaluated(model, available, rows, screen, split=data or split, draws=draws)]
    parts += [_moved(model, available, rows, radii, screen)] if radii else []
    parts += [_probed(opened, model, some_rows, screen)] if linear else []
    parts += [_by_protocol(model, some_rows, limit, screen)] if bits else []
    parts += [_told_apart(opened, model, available, strangers, screen)] if strangers else []
    content: dict[str, Any] = {}
    for metrics, lines in chain.from_iterable(parts):
        content |= metrics
        path = keep(opened, content, sha256) if kept else None  # before it is said: what follows may take long, or fail
        screen.say(*lines)
    if kept:
        screen.say(f"Figures in {path}")


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


def _evaluated(model: nn.Module, data: Dataset, rows: int | None, screen: Screen, **options: Any) -> Iterator[Part]:
    """Error, likelihood and inverse."""
    content = evaluated(model, data, rows, screen, **options)
    lines = [f"{'rows':<9}{content['rows']:,} of {content['of']:,}"]
    kinds = {"error": Error, "density": Density, "inverse": Inverse}
    yield content, lines + [f"{name:<9}{kind(**content[name])}" for name, kind in kinds.items() if name in content]


def _moved(model: nn.Module, data: Dataset, rows: int | None, radii: list[float], screen: Screen) -> Iterator[Part]:
    """How robust the classes of the rows that were judged are, radius by radius."""
    found: list[dict[str, Any]] = []
    for radius in radii:
        with waiting(screen, f"Attacking rows within {radius:g} …"):
            robust = robustness(model, _rows(model, data, rows), radius)
        found.append(asdict(robust))
        yield {"robustness": found}, [f"{'robust':<9}{robust}"]


def _probed(run: Run, model: nn.Module, data: Dataset, screen: Screen) -> Iterator[Part]:
    device = device_of(model)
    with waiting(screen, "Fitting logistic regressions …"):
        found = probe(model, run.splits().train.to(device), data.to(device))
    yield {"probe": asdict(found)}, [f"{'probe':<9}{found}"]


def _by_protocol(model: nn.Module, data: Dataset, limit: float, screen: Screen) -> Iterator[Part]:
    with waiting(screen, f"Judging {len(data):,} rows to the paper's protocol …"):
        found = protocol(model, data.to(device_of(model)), bias=limit, error=limit)
    yield {"protocol": asdict(found) | {"limit": limit}}, [f"{'protocol':<9}{found}"]


def _strangers(run: Run, data: Dataset, sources: list[str]) -> dict[str, Dataset]:
    """The rows to tell from the data, by name; 'corrupted' stands for several kinds, made of the data."""
    found: dict[str, Dataset] = {}
    for source in sources:
        found |= (
            corrupted_datasets(subsample(data, STRANGE)) if source == "corrupted" else {source: rows_of(run, source)}
        )
    return found


def _told_apart(
    run: Run, model: nn.Module, data: Dataset, others: dict[str, Dataset], screen: Screen
) -> Iterator[Part]:
    """How well they are told apart, one line each; the entropy is that of the run's validation rows."""
    device = device_of(model)
    placed = {name: subsample(rows, STRANGE).to(device) for name, rows in others.items()}
    with waiting(screen, "Scoring strange rows …"):
        found = ood_detection(model, subsample(data, STRANGE).to(device), placed, run.reference(), rows=STRANGE)
    yield {"outside": [asdict(detection) for detection in found]}, [f"{'ood':<9}{detection}" for detection in found]


def evaluated(model: nn.Module, data: Dataset, rows: int | None, screen: Screen, **options: Any) -> dict[str, Any]:
    """The figures of so many rows, judged where the model is; "of" says how many there were."""
    chosen = _rows(model, data, rows)
    with waiting(screen, f"Judging {len(chosen):,} of {len(data):,} rows …"):
        return evaluate_model(model, chosen, **options) | {"of": len(data)}


def _rows(model: nn.Module, data: Dataset, rows: int | None) -> Dataset:
    """So many of the rows, the same every time, where the model is."""
    if rows is None:
        rows = len(data) if data.schema.dimension <= EXACT_UP_TO else MANY
    return subsample(data, rows).to(device_of(model))


def say_stale(run: Run, screen: Screen) -> None:
    """Say that figures of other weights are there, which are to be replaced."""
    path = run.output / "evaluation.json"
    if path.is_file() and not run.read_current_json(path.name):
        screen.say(f"{path} speaks of other weights, or of none, and is made anew.")


def keep(run: Run, content: dict[str, Any], sha256: str) -> Path:
    """Write the figures of the test part, beside what else was known of the same rows and the same weights."""
    known = run.read_current_json("evaluation.json")
    if known.get("rows") != content["rows"]:
        known = {name: value for name, value in known.items() if name not in OF_ROWS}
    return run.write_json("evaluation.json", {**known, **content}, sha256)
