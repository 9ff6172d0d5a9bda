"""Figure 6: the largest singular value of every convolution of trained networks, with a proven upper bound.

The paper computes it by the Fourier transform (Sedghi et al.), which is exact for circular padding; here the upper
bound holds for the zero padding of the networks. As in the paper, the convolutions of a BatchNorm network are shown
alone; the file also has the norm with the following BatchNorm folded in.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import spectral
from ..branch import unconstrained_copy
from ..certificate import residual_blocks
from ..lipschitz import leaves
from ..model import Model
from ..plots import SpectrumLine, plot_spectra
from ..run import Run
from .cells import BATCHNORM, DIGITS, VANILLA, Cell, cells_on, number_labels, parse_number
from .job import Work
from .record import Entry
from .result import Measurement, Plan, budget_costs, columns, plot_each_dataset, trained_result

COEFFICIENTS = number_labels("c", 0.9, 0.7, 0.5, 0.3)
PAPER = {
    **dict.fromkeys((VANILLA, BATCHNORM), "about two thirds above 1"),
    **dict.fromkeys(COEFFICIENTS, "all below 1, close to c"),
}
PLAN = Plan(
    "figure6",
    cells=cells_on("cifar10", PAPER),
    smoke=cells_on(DIGITS, (VANILLA, BATCHNORM, *number_labels("c", 0.9, 0.5))),
    other_datasets=(*cells_on("mnist", tuple(PAPER)), *cells_on("cifar100", tuple(PAPER))),
)
COLUMNS = columns("dataset", "model", "layers", "above 1", "median", "largest", "paper")


def measure_norms(work: Work, run: Run, cell: Cell) -> Measurement:
    """Measure the norms of all convolutions of one network."""
    certificate = run.read_json("certificate.json").get("blocks", [])
    known = [part for block in certificate for part in block["layers"] if part["estimate"] is not None]
    layers = convolution_norms(work.model(run), run.schema.shape, known)
    bounds = [layer["bound"] for layer in layers]
    folded = [layer["folded"] for layer in layers if layer["folded"] is not None]
    row = {
        "layers": len(bounds),
        "above 1": sum(b > 1 for b in bounds),
        "smallest": min(bounds),
        "median": statistics.median(bounds),
        "largest": max(bounds),
        "largest gap to the estimate": max(layer["bound"] - layer["estimate"] for layer in layers),
        "largest with BatchNorm": max(folded) if folded else None,
        "paper": cell.paper,
    }
    sentence = f"{row['above 1']} of {row['layers']} convolutions above 1, largest {row['largest']:.3f}"
    return row, {"layers": layers}, sentence


@torch.no_grad()
def convolution_norms(
    model: Model, shape: tuple[int, ...], known: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return block, kernel, proven bound, estimate and folded bound of every convolution, in order of the forward pass.

    `known` are the same layers from a certificate; without them the bounds are computed here.
    """
    found = _convolutions(model, shape)
    if len(known) != len(found):
        known = [{"bound": spectral.norm_bound(c, s), "estimate": spectral.norm_estimate(c, s)} for _, c, _, s in found]
    return [
        {
            "block": block,
            "kernel": layer.kernel_size[0],
            "bound": part["bound"],
            "estimate": part["estimate"],
            "folded": _folded_bound(layer, following, size),
        }
        for (block, layer, following, size), part in zip(found, known, strict=True)
    ]


def _convolutions(
    model: Model, shape: tuple[int, ...]
) -> list[tuple[str, nn.Conv2d, nn.Module | None, tuple[int, ...] | None]]:
    """Return (name of its block, convolution, next layer, input shape), in order of the forward pass."""
    found = []
    for name, block, at in residual_blocks(model, shape):
        layers = [layer for _, layer in leaves(unconstrained_copy(block.g))]
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            if isinstance(layer, nn.Conv2d):
                found.append((name, layer, following, None if at is None else (layer.in_channels, *at[1:])))
    return found


def _folded_bound(layer: nn.Conv2d, following: nn.Module | None, size: tuple[int, ...] | None) -> float | None:
    """Bound the norm of a convolution followed by BatchNorm in eval mode; None where no BatchNorm follows."""
    if not isinstance(following, nn.BatchNorm2d):
        return None
    scale = cast(Tensor, following.running_var).add(following.eps).rsqrt()
    scale = scale if following.weight is None else scale * following.weight
    both = copy.deepcopy(layer)
    both.weight.mul_(scale.view(-1, 1, 1, 1))
    return spectral.norm_bound(both, size)


def _line(e: Entry) -> SpectrumLine:
    layers, (_, c) = e["details"]["layers"], parse_number(e["model"]) or ("", None)
    return SpectrumLine(e["model"], c, [v["bound"] for v in layers], [v["estimate"] for v in layers])


RESULT = trained_result(
    PLAN,
    measure_norms,
    COLUMNS,
    about="largest singular value of every convolution: vanilla and BatchNorm, and c = .3 .5 .7 .9",
    says="about two thirds of the layers exceed 1 without the constraint; all are below 1 with it, close to c",
    costs=budget_costs("4 networks of table2: seconds", "6 networks of table2, and seconds on a GPU"),
    notes=("the convolutions alone, as in the paper; with BatchNorm: 'largest with BatchNorm' in the file",),
    plots=plot_each_dataset("figure6", "cifar10", lambda entries, path: plot_spectra(list(map(_line, entries)), path)),
)
