"""Figure 6: the largest singular value of every convolution of trained nets, proven from above, estimated from below.

The paper computes them by the Fourier transform (Sedghi et al.), which is exact for circular padding; here the upper
bound holds for the zero padding that the nets have. As in the paper, a BatchNorm net's convolutions are shown alone;
the operator with the following BatchNorm folded in is in the file as well.
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
from ..plots import SpectrumLine, plot_spectra
from ..run import Run
from .cells import BATCHNORM, DIGITS, VANILLA, Cell, constrained, numbered, on
from .job import Work
from .record import Entry
from .result import Measured, Plan, costs, each, of_cells

COEFFICIENTS = constrained(0.9, 0.7, 0.5, 0.3)
PAPER = {
    **dict.fromkeys((VANILLA, BATCHNORM), "about two thirds above 1"),
    **dict.fromkeys(COEFFICIENTS, "all below 1, close to c"),
}
PLAN = Plan(
    "figure6",
    cells=on("cifar10", PAPER),
    smoke=on(DIGITS, (VANILLA, BATCHNORM, *constrained(0.9, 0.5))),
    others=(*on("mnist", tuple(PAPER)), *on("cifar100", tuple(PAPER))),
)
COLUMNS = {"data": "dataset"} | {name: name for name in ("model", "layers", "above 1", "median", "largest", "paper")}


def measure(work: Work, run: Run, cell: Cell) -> Measured:
    """The norms of every convolution of one trained net."""
    certificate = run.read_json("certificate.json").get("blocks", [])
    known = [part for block in certificate for part in block["layers"] if part["estimate"] is not None]
    layers = norms(work.model(run), run.schema.shape, known)
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
def norms(model: nn.Module, shape: tuple[int, ...], known: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """For every convolution, in the order of the forward pass: block, kernel, proven bound, estimate, folded bound.

    `known` are the same layers as a certificate has them, which saves proving them again; else they are proven here.
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
            "folded": _folded(layer, following, size),
        }
        for (block, layer, following, size), part in zip(found, known, strict=True)
    ]


def _convolutions(
    model: nn.Module, shape: tuple[int, ...]
) -> list[tuple[str, nn.Conv2d, nn.Module | None, tuple[int, ...] | None]]:
    """(name of its block, convolution, the layer after it, shape of its input), in the order of the forward pass."""
    found = []
    for name, block, at in residual_blocks(model, shape):
        layers = [layer for _, layer in leaves(unconstrained_copy(block.g))]
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            if isinstance(layer, nn.Conv2d):
                found.append((name, layer, following, None if at is None else (layer.in_channels, *at[1:])))
    return found


def _folded(layer: nn.Conv2d, following: nn.Module | None, size: tuple[int, ...] | None) -> float | None:
    """The bound of a convolution with the BatchNorm after it, as it stands in eval; None where there is none."""
    if not isinstance(following, nn.BatchNorm2d):
        return None
    scale = cast(Tensor, following.running_var).add(following.eps).rsqrt()
    scale = scale if following.weight is None else scale * following.weight
    both = copy.deepcopy(layer)
    both.weight.mul_(scale.view(-1, 1, 1, 1))
    return spectral.norm_bound(both, size)


def _line(e: Entry) -> SpectrumLine:
    layers, (_, c) = e["details"]["layers"], numbered(e["model"]) or ("", None)
    return SpectrumLine(e["model"], c, [v["bound"] for v in layers], [v["estimate"] for v in layers])


RESULT = of_cells(
    PLAN,
    measure,
    COLUMNS,
    about="largest singular value of every convolution: vanilla and BatchNorm, and c = .3 .5 .7 .9",
    says="about two thirds of the layers exceed 1 without the constraint; with it all stay below 1, close to c",
    costs=costs("4 cells of table2: seconds", "6 cells of table2, and seconds on a GPU"),
    notes=("the convolutions alone, as in the paper; BatchNorm folded in: see 'largest with BatchNorm' in the file",),
    pictures=each("figure6", "cifar10", lambda entries, path: plot_spectra([_line(e) for e in entries], path)),
)
