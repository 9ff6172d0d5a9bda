"""`iresnet export`: write a trained model as files that run without this library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from ..data import Schema
from ..data.units import bin_centres
from ..evaluate import has_density
from ..export import export as write_files
from ..export.forward import COLUMNS
from ..run import Run
from .console import console, result, use_threads, waiting
from .options import RunFolder

#: Samples that an exported density is compared with the model on.
SAMPLES = 5


def export(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help="The output folder.", show_default="RUN/export")] = None,
) -> None:
    """Export plain weights, a torch.export program and, if its exporter is installed, ONNX.

    Both programs compute codes, the logits of a classifier and, for a density of a table with up to 64 columns, the
    log-likelihood and the anomaly score that `iresnet score` writes.

    Example: iresnet export runs/demo --out deploy
    """
    opened = Run.open(run)
    schema, model = opened.schema, opened.model()
    use_threads(schema.dimension)
    folder = opened.output / "export" if out is None else out
    with waiting(console(), "Tracing the forward pass …"):
        written = write_files(
            model,
            _example(model, schema),
            folder,
            schema=schema,
            reference=opened.reference() if has_density(model) else None,
            about={"schema": schema.to_dict()},
        )
    outputs = written["readme"].read_text(encoding="utf-8").partition(COLUMNS)[0].split("\n\n")[0].splitlines()
    result({"files": written}, *(f"{name:<10}{path}" for name, path in written.items()), *outputs)


def _example(model: Any, schema: Schema) -> Tensor:
    """Return samples of a density of rows; of other models inputs that are valid, since only their shape matters."""
    if has_density(model) and not schema.is_image and not schema.targets:
        return schema.restore(model.sample((SAMPLES,), generator=torch.Generator().manual_seed(0)))
    kind = torch.float32 if schema.levels is None else torch.uint8
    example = bin_centres(torch.zeros(2, *schema.shape, dtype=kind), schema.levels)
    return schema.restore(example + 1) if schema.kinds else example  # 0 is not positive
