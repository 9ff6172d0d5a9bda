"""`iresnet evaluate`: error, likelihood and inverse error of a trained model, each with its error bar, and more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Annotated, Any, TypeAlias

import typer

from ..data import Dataset, subsample
from ..data.chunked import ChunkedSource
from ..data.split import RandomRows
from ..device import device_of
from ..evaluate import (
    Baseline,
    Density,
    Error,
    Inverse,
    as_classifier,
    as_flow,
    corrupted_datasets,
    evaluate_chunks,
    has_density,
    has_inverse,
    ood_detection,
    probe,
    protocol,
    require_labels,
    robustness,
    shared_log_prob_draws,
)
from ..evaluate.attack import check_radius
from ..evaluate.protocol import LIMIT, check_limits
from ..model import Model
from ..run import Run
from ..train.distributed import ALONE, Group, is_main, joined, world_size
from .console import Screen, console, ctrl_c, result, show, waiting
from .metrics import Rows, chosen_samples, evaluate_some, fitting_splits, row_limit, save_metrics, warn_stale
from .options import DataFolder, DataOption, Device, RunFolder, Split
from .output import chunked_data, each_chunk, open_run, read_data, try_to_save
from .resumable import share_of_rank

#: What is said if `torchrun` stops this process.
STOPPED = "If another process has ended, its message, if any, is above. The same command starts anew."

#: Metrics to save, by name, and the lines to print.
Part: TypeAlias = tuple[dict[str, Any], list[str]]

#: Samples of each kind that are compared for --ood.
STRANGE = 500

Radii = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LENGTH",
        help="Also certify robustness: which samples keep their class under every change of this l2 norm, in the units "
        "of the data (36 grey levels of 255 is 36/255 for pixels in [0, 1]). May be repeated.",
    ),
]
Linear = Annotated[
    bool, typer.Option("--probe", help="Also report the error of logistic regression on the codes (a linear probe).")
]
Bits = Annotated[
    bool,
    typer.Option(
        "--protocol",
        help="Also report the likelihood of all samples by the paper's protocol, with bias and standard error below "
        "--limit.",
    ),
]
Others = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DATA",
        help="Also report how well likelihood and typicality detect out-of-distribution data: a file, a folder, a "
        "dataset, or 'corrupted'. May be repeated.",
    ),
]


def evaluate(
    run: RunFolder,
    data: DataOption = None,
    split: Split = "test",
    rows: Rows = None,
    draws: Annotated[int, typer.Option(help="Noise draws per sample for the likelihood.", min=2)] = 8,
    radius: Radii = None,
    linear: Linear = False,
    bits: Bits = False,
    limit: Annotated[
        float | None, typer.Option(help="Target error for --protocol, in bits/dim.", show_default=f"{LIMIT:g}")
    ] = None,
    ood: Others = None,
    data_dir: DataFolder = None,
    device: Device = "auto",
) -> None:
    """Evaluate a model on test data: classification error, likelihood and inverse error.

    The density of a table is compared with one Gaussian and a mixture of Gaussians, fitted to the run's training rows.

    Metrics of the test split are saved in RUN/evaluation.json. Exit code 2 if they cannot be; they are still printed.

    A file of --data may have any size: it is read in chunks, unless an option below needs all samples at once. Several
    processes share the chunks: torchrun --nproc-per-node=4 -m iresnet evaluate runs/flow --data new.parquet

    Example: iresnet evaluate runs/demo --split validation

    Example: iresnet evaluate runs/robust --radius 36 --radius 72

    Example: iresnet evaluate runs/flow --protocol --ood corrupted --ood fashion-mnist
    """
    if limit is not None and not bits:
        raise ValueError(f"--limit is the target error of --protocol, which was not given; got {limit:g}. Add it.")
    in_chunks = data is not None and not (radius or linear or bits or ood)
    if not (is_main() or in_chunks):  # under torchrun, one process evaluates what it needs at once
        return
    limit = LIMIT if limit is None else limit
    check_limits(limit, limit)
    (opened, chosen), screen = open_run(run, device, data_dir), console()
    sha256, model = opened.sha256(), opened.model(device=chosen)
    radii, kept = [_radius(word) for word in radius or []], data is None and split == "test"
    if data is not None and in_chunks:
        _evaluate_stream(opened, model, data, chosen, rows, draws, screen)
        return
    available = read_data(opened, data, split, labels=True)
    if linear and not has_inverse(model):
        raise ValueError(
            "--probe needs an invertible model; an ordinary ResNet has no codes, and those of a conditional density "
            "need a context. Leave it out."
        )
    if bits or ood:
        as_flow(model, "--protocol" if bits else "--ood")  # refuse models without a density before the evaluation
    if radii:
        as_classifier(model, "--radius needs a classifier")
        require_labels(available)
    if kept:
        warn_stale(opened, screen)  # and find a damaged file before it, too
    others, chosen_rows = _ood_data(opened, available, ood or []), subsample(available, rows) if rows else available
    fitting = fitting_splits(opened, model, screen)
    parts = [_basic_metrics(model, available, rows, screen, split=data or split, draws=draws, fitting=fitting)]
    parts += [_robustness(model, available, rows, radii, screen)] if radii else []
    parts += [_linear_probe(opened, model, chosen_rows, screen)] if linear else []
    parts += [_protocol(model, chosen_rows, limit, screen)] if bits else []
    parts += [_ood_detection(opened, model, available, others, screen)] if others else []
    content, path, unsaved = dict[str, Any](), None, ""
    for metrics, lines in chain.from_iterable(parts):
        content |= metrics
        if kept:  # before printing: what follows may take long, or fail
            path, unsaved = try_to_save(opened, partial(save_metrics, opened, content, sha256))
        show(*lines)
    if path:
        screen.say(f"Metrics in {path}")
    result(content | {"run": run, "file": path})
    if unsaved:
        raise OSError(unsaved)


def _radius(word: str) -> float:
    """Parse a radius; refuse a fraction, which would be for pixels in [0, 1] and not in the units of the data."""
    try:
        radius = float(word)
    except ValueError:
        raise ValueError(
            f"--radius must be one number, in the units of the data; got {word!r}. For 36/255 of pixels in [0, 1] with "
            "256 grey levels, use 36."
        ) from None
    check_radius(radius)
    return radius


def _evaluate_stream(
    run: Run, model: Model, data: str, device: str, rows: int | None, draws: int, screen: Screen
) -> None:
    """Evaluate a source of data that is read in chunks; processes share the work if it is a file."""
    source = chunked_data(run, data, device, labels=True)
    few = row_limit(rows, run.schema.dimension)
    shared = world_size() > 1 and source.is_file and (few is None or has_density(model))
    if not (is_main() or shared):
        return
    with joined("cpu") if shared else nullcontext(ALONE) as group, ctrl_c(lambda: STOPPED if shared else ""):
        fitting = fitting_splits(run, model, screen)
        options: dict[str, Any] = {"split": data, "draws": draws, "fitting": fitting}
        if few is None:
            content = _evaluate_all(model, source, group, screen, options)
        else:
            content = _evaluate_drawn(model, source, few, group, screen, options)
    if content:
        show(*_basic_lines(content))
        result(content | {"run": run.folder, "file": None})


def _evaluate_all(
    model: Model, source: ChunkedSource, group: Group, screen: Screen, options: dict[str, Any]
) -> dict[str, Any]:
    """Evaluate all samples of a source; in a group, rank 0 returns the metrics and the others nothing."""
    if group.any(options["fitting"] is None):  # baselines are of all rows, or of none
        options = options | {"fitting": None}
    place = share_of_rank(source) if group.is_shared else ()
    with waiting(screen, "Evaluating …"):
        content = evaluate_chunks(model, _parts(source, *place), group=group, size=source.size, **options)
    return content | {"of": content["rows"]} if content else content


def _evaluate_drawn(
    model: Model, source: ChunkedSource, few: int, group: Group, screen: Screen, options: dict[str, Any]
) -> dict[str, Any]:
    """Evaluate so many samples of a source, drawn at random; only these are kept, and a group shares their draws."""
    drawn, count = RandomRows(few), 0
    for part in _parts(source):
        drawn.add(part)
        count += len(part)
    if group.is_shared:
        with waiting(screen, f"Evaluating {len(drawn.dataset):,} of {count:,} samples …"):
            chosen = drawn.dataset.to(device_of(model))
            options = options | {"values": shared_log_prob_draws(model, chosen, options["draws"], group)}
    return {} if group.rank else evaluate_some(model, drawn.dataset, few, screen, **options) | {"of": count}


def _parts(source: ChunkedSource, *place: Any) -> Iterator[Dataset]:
    """Iterate over the samples of a source, each chunk a part of the work; `place` is that of `each_chunk`."""
    return (chunk.data for chunk in each_chunk(source, *place) if chunk.data is not None)


def _basic_metrics(model: Model, data: Dataset, rows: int | None, screen: Screen, **options: Any) -> Iterator[Part]:
    """Evaluate error, likelihood and inverse."""
    content = evaluate_some(model, data, rows, screen, **options)
    yield content, _basic_lines(content)


def _basic_lines(content: dict[str, Any]) -> list[str]:
    """Return the lines to print for error, likelihood and inverse."""
    lines = [f"{'samples':<9}{content['rows']:,} of {content['of']:,}"]
    kinds = {"error": Error, "density": Density, "inverse": Inverse}
    for name, kind in kinds.items():
        lines += [f"{name:<9}{kind(**content[name])}"] if name in content else []
        lines += _baseline_lines(content) if name == "density" else []
    return lines


def _baseline_lines(content: dict[str, Any]) -> list[str]:
    """Return a line for each baseline, and one that says what they were fitted to."""
    found = [Baseline(**baseline) for baseline in content.get("baselines", [])]
    lines = [f"{'baseline':<9}{baseline}" for baseline in found]
    for baseline in found[:1]:
        rows = f"fitted to {baseline.fitted:,} training rows, columns prepared as for the model"
        lines.append(f"{'':<9}({rows}; validation rows chose the mixture)")
    return lines


def _robustness(model: Model, data: Dataset, rows: int | None, radii: list[float], screen: Screen) -> Iterator[Part]:
    """Evaluate certified and attacked accuracy on the same samples, radius by radius."""
    found: list[dict[str, Any]] = []
    for radius in radii:
        with waiting(screen, f"Attacking samples within {radius:g} …"):
            robust = robustness(model, chosen_samples(model, data, rows), radius)
        found.append(asdict(robust))
        yield {"robustness": found}, [f"{'robust':<9}{robust}"]


def _linear_probe(run: Run, model: Model, data: Dataset, screen: Screen) -> Iterator[Part]:
    device = device_of(model)
    with waiting(screen, "Fitting logistic regressions …"):
        found = probe(model, run.splits().train.to(device), data.to(device))
    yield {"probe": asdict(found)}, [f"{'probe':<9}{found}"]


def _protocol(model: Model, data: Dataset, limit: float, screen: Screen) -> Iterator[Part]:
    with waiting(screen, f"Evaluating {len(data):,} samples by the paper's protocol …"):
        found = protocol(model, data.to(device_of(model)), bias=limit, error=limit)
    yield {"protocol": asdict(found) | {"limit": limit}}, [f"{'protocol':<9}{found}"]


def _ood_data(run: Run, data: Dataset, sources: list[str]) -> dict[str, Dataset]:
    """Return out-of-distribution datasets by name; 'corrupted' gives several, made from the data."""
    found: dict[str, Dataset] = {}
    for source in sources:
        found |= (
            corrupted_datasets(subsample(data, STRANGE)) if source == "corrupted" else {source: read_data(run, source)}
        )
    return found


def _ood_detection(run: Run, model: Model, data: Dataset, others: dict[str, Dataset], screen: Screen) -> Iterator[Part]:
    """Evaluate how well each is detected; typicality is relative to the run's validation data."""
    device = device_of(model)
    placed = {name: subsample(rows, STRANGE).to(device) for name, rows in others.items()}
    with waiting(screen, "Scoring out-of-distribution data …"):
        found = ood_detection(model, subsample(data, STRANGE).to(device), placed, run.reference(), rows=STRANGE)
    yield {"outside": [asdict(detection) for detection in found]}, [f"{'ood':<9}{detection}" for detection in found]
