"""`iresnet invert`: inputs from codes, with the error of every row and what is proven of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import torch
import typer

from .. import atomic
from ..evaluation import inverse_of, reconstruct
from ..figures import reconstruction_picture
from ..fixed_point import Anderson, Banach
from ..run import Run
from ..transform import ChainSolution, Transform
from .console import Device, choose_device, console, use_threads
from .output import DataOption, RunFolder, Split, csv_text, draw_rows, rows_of, save_rows

PRECISIONS = {"float32": torch.float32, "float64": torch.float64}
SOLVERS = {"anderson": Anderson(), "banach": Banach()}


def invert(
    run: RunFolder,
    data: DataOption = None,
    split: Split = "test",
    codes: Annotated[Path | None, typer.Option(help="Codes to decode, an .npy array, instead of rows.")] = None,
    count: Annotated[int, typer.Option("-n", "--count", help="How many rows.", min=1)] = 16,
    tolerance: Annotated[float | None, typer.Option(help="Proven l2 error of every block's solve.")] = None,
    precision: Annotated[str, typer.Option(help="float32 or float64.")] = "float64",
    solver: Annotated[str, typer.Option(help="anderson or banach.")] = "anderson",
    out: Annotated[Path | None, typer.Option(help="Path without ending. [default: RUN/inverse]")] = None,
    device: Device = "auto",
) -> None:
    """Encode rows, solve their codes back, and say how far the result is off, row by row.

    Example: iresnet invert runs/demo -n 20

    Example: iresnet invert runs/demo --codes codes.npy --out decoded
    """
    for name, value, known in (("precision", precision, PRECISIONS), ("solver", solver, SOLVERS)):
        if value not in known:
            raise ValueError(f"{name} must be {' or '.join(known)}; got {value!r}.")
    opened, screen = Run.open(run), console()
    use_threads(math.prod(opened.schema.shape))
    path = run / "inverse" if out is None else out
    chosen = choose_device(device)
    options: dict[str, Any] = {"tolerance": tolerance, "solver": SOLVERS[solver]}
    if codes is not None:
        _decode(opened, codes, path, chosen, PRECISIONS[precision], options)
        return
    rows = rows_of(opened, data, split)
    rows = rows.take(torch.arange(min(count, len(rows)))).to(chosen)
    model = opened.model(device=chosen)
    solution, x = reconstruct(model, rows, precision=PRECISIONS[precision], **options)
    numbers = (solution.measured_error(x), solution.largest_block_bound, solution.code_residual, solution.iterations)
    names = ("row", "measured_error", "largest_block_bound", "code_residual", "evaluations", "proven")
    table = [
        [i, *(float(n[i]) for n in numbers[:3]), int(numbers[3][i]), bool(solution.converged[i])] for i in range(len(x))
    ]
    saved = [
        save_rows(path, solution.x, opened.schema),
        atomic.write(path.with_name(f"{path.name}-errors.csv"), csv_text(names, table)),
    ]
    if opened.schema.is_image:
        levels = opened.schema.levels or 256
        saved.append(
            reconstruction_picture(x.cpu(), solution.x.cpu(), numbers[0].cpu(), path.with_suffix(".png"), levels=levels)
        )
    screen.print(str(inverse_of(solution, x)), highlight=False, soft_wrap=True)
    screen.print(f"Written: {', '.join(map(str, saved))}", highlight=False, soft_wrap=True)
    _check(solution)


def _check(solution: ChainSolution) -> None:
    if not bool(solution.converged.all()):
        raise RuntimeError("not every solve was proven. Allow a larger --tolerance, or use --precision float64.")


def _decode(opened: Run, codes: Path, path: Path, device: str, precision: torch.dtype, options: dict[str, Any]) -> None:
    transform = cast(Transform, opened.model(device=device).transform).to(precision)
    z = torch.as_tensor(_read_codes(codes), dtype=precision, device=device)
    shape = transform.output_shape(opened.schema.shape)
    if z.shape[1:].numel() != math.prod(shape) or z.dim() < 2:
        raise ValueError(f"codes must have shape (n, {', '.join(map(str, shape))}); {codes} holds {tuple(z.shape)}.")
    solution = cast(ChainSolution, transform.solve(z.reshape(-1, *shape), **options))
    saved = save_rows(path, solution.x, opened.schema)
    picture = draw_rows(path.with_suffix(".png"), solution.x.cpu(), solution.x.cpu(), opened.schema)
    console().print(f"{solution}\nWritten: {saved}, {picture}", highlight=False, soft_wrap=True)
    _check(solution)


def _read_codes(path: Path) -> np.ndarray:
    try:
        values = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no .npy array of numbers: {error}. Save codes with numpy.save.") from None
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiu":
        raise ValueError(f"{path} must hold one array of numbers. Save codes with numpy.save.")
    return values
