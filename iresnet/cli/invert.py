"""`iresnet invert`: reconstruct inputs from codes, with the measured error and the proven bound of each."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from .. import atomic
from ..data import Dataset, delimited, npy
from ..evaluate import reconstruct, summarise_inverse
from ..evaluate.solving import proven_samples, solve_codes
from ..fixed_point import Anderson, Banach, ChainSolution, Newton
from ..models import INVERSES
from ..plots import plot_reconstructions
from ..run import Run
from .console import console, result, waiting
from .options import DataFolder, DataOption, Device, RunFolder, Split, check_tolerance
from .output import open_run, plot_samples, read_data, save_samples, with_suffix

PRECISIONS = {"float32": torch.float32, "float64": torch.float64}
SOLVERS = {"anderson": Anderson(), "banach": Banach(), "newton": Newton()}
COLUMNS = ("row", "measured_error", "largest_block_bound", "code_residual", "evaluations", "proven")


def invert(
    run: RunFolder,
    data: DataOption = None,
    split: Split = "test",
    codes: Annotated[
        Path | None, typer.Option(help="Decode the codes in this .npy file instead of encoding data first.")
    ] = None,
    count: Annotated[int, typer.Option("-n", "--count", help="How many samples.", min=1)] = 16,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest proven l2 error of each block's solve, in the block's units.")
    ] = None,
    precision: Annotated[str, typer.Option(help="float32 or float64.")] = "float64",
    solver: Annotated[
        str | None, typer.Option(help="anderson, banach or newton.", show_default="the fastest available")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output path, without suffix.", show_default="RUN/inverse")] = None,
    data_dir: DataFolder = None,
    device: Device = "auto",
) -> None:
    """Encode samples, invert the codes, and report the error of every reconstruction.

    Example: iresnet invert runs/demo -n 20

    Example: iresnet invert runs/demo --codes codes.npy --out decoded
    """
    for name, value, known in (("precision", precision, PRECISIONS), ("solver", solver, SOLVERS)):
        if value is not None and value not in known:
            *others, last = known
            raise ValueError(f"{name} must be {', '.join(others)} or {last}; got {value!r}.")
    check_tolerance(tolerance)
    opened, chosen = open_run(run, device, data_dir)
    path = opened.output / "inverse" if out is None else out
    options: dict[str, Any] = {
        "precision": PRECISIONS[precision], "tolerance": tolerance, "solver": solver and SOLVERS[solver],
    }  # fmt: skip
    if codes is not None:
        _decode(opened, codes, path, chosen, options)
        return
    rows = read_data(opened, data, split)
    _reconstruct(opened, rows.take(torch.arange(min(count, len(rows)))).to(chosen), path, chosen, options)


def _reconstruct(run: Run, rows: Dataset, path: Path, device: str, options: dict[str, Any]) -> None:
    with waiting(console(), f"Inverting {len(rows):,} codes …"):
        solution, x = reconstruct(run.model(device=device), rows, **options)
    saved = [
        save_samples(path, solution.x, run.schema),
        atomic.write(with_suffix(path, "-errors.csv"), delimited.format_csv(COLUMNS, _errors(solution, x))),
    ]
    if run.schema.is_image:
        rebuilt = torch.nan_to_num(solution.x.cpu()).clamp(-1e6, 1e6)  # without a bound, values may be anything
        tensors = (x.cpu(), rebuilt, solution.measured_error(x).cpu())
        saved.append(plot_reconstructions(*tensors, with_suffix(path, ".png"), levels=run.schema.levels or 256))
    summary = summarise_inverse(solution, x)
    result(asdict(summary) | {"files": saved}, str(summary), f"Written: {', '.join(map(str, saved))}")
    _check_proven(solution, run)


def _errors(solution: ChainSolution, x: Tensor) -> list[tuple[Any, ...]]:
    """One line per sample, in the order of COLUMNS."""
    numbers = (
        solution.measured_error(x), solution.largest_block_bound, solution.code_residual,
        solution.iterations, proven_samples(solution),
    )  # fmt: skip
    return list(zip(range(len(x)), *(n.tolist() for n in numbers), strict=True))


def _check_proven(solution: ChainSolution, run: Run) -> None:
    if bool(solution.largest_block_bound.isinf().any()) and run.experiment.network.family in INVERSES:
        raise RuntimeError(
            "no error bound is known for this inverse; the files hold its result and the measured errors."
        )
    if bool(solution.largest_block_bound.isinf().any()):
        raise RuntimeError(
            "this inverse is not proven, since not every block is proven to be a contraction; the files hold the "
            f"result of the iteration. See: iresnet certify {quote(str(run.folder))}"
        )
    if solution.reason:
        raise RuntimeError(f"this inverse is not proven; the files hold its result. {solution.reason}")
    if not bool(proven_samples(solution).all()):
        raise RuntimeError(
            "not every inverse is proven to the tolerance. Use a larger --tolerance, or --precision float64."
        )


def _decode(run: Run, codes: Path, path: Path, device: str, options: dict[str, Any]) -> None:
    model = run.model(device=device)
    z = torch.as_tensor(_read_codes(codes), dtype=options["precision"], device=device)
    shape = model.transform.output_shape(run.schema.shape)
    if z.shape[1:].numel() != math.prod(shape) or z.dim() < 2:
        raise ValueError(f"codes must have shape (n, {', '.join(map(str, shape))}); {codes} holds {tuple(z.shape)}.")
    with waiting(console(), f"Inverting {len(z):,} codes …"):
        solution = solve_codes(model, z.reshape(-1, *shape), **options)
    saved = save_samples(path, solution.x, run.schema)
    picture = plot_samples(path, solution.x, solution.x, run.schema)
    content: dict[str, Any] = {"rows": len(z), "proven": int(proven_samples(solution).sum()), "files": [saved, picture]}
    for name in ("largest_block_bound", "code_residual", "composed_bound"):
        content[name] = float(getattr(solution, name).max())
    result(content, f"{solution}\nWritten: {saved}, {picture}")
    _check_proven(solution, run)


def _read_codes(path: Path) -> np.ndarray:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}. Save codes with numpy.save.")
    try:
        values = npy.load_array(path)
    except ValueError as error:
        raise ValueError(f"{error} Save codes with numpy.save.") from None
    if values.dtype.kind not in "fiu":
        raise ValueError(f"{path} must hold one array of numbers. Save codes with numpy.save.")
    with np.errstate(over="ignore"):  # numbers beyond float64 become infinite
        values = values.astype(np.float64)  # any precision and byte order
    if not values.size or not np.isfinite(values).all():
        raise ValueError(f"{path} must hold at least one code, of finite numbers. Correct it.")
    return values
