"""Figure 5 and App. F: samples of flows, CIFAR-10 and MNIST.

Codes are drawn from the base and solved back by an `Inverter`, block by block, every solve proven to 1e-4 in l2; the
time is that of the solve, from codes to images. Proving all constants and preparing the solve is counted in the first
call, whose time stands beside it. Pixels outside of the range are clipped in the picture, not in the figures.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..data import npy
from ..evaluate import as_flow
from ..inverse import Inverter
from ..plots import plot_image_grid
from ..run import Run
from ..transform import ChainSolution
from .cells import Cell
from .job import Work
from .record import arrays
from .result import Groups, Measured, costs, of_cells, of_flows, picture_path

SAMPLES, TOLERANCE = 100, 1e-4

#: App. D, for 100 CIFAR-10 images and 5 to 20 iterations, nothing proven; it has no time for samples.
PAPER = "0.15 to 0.75 s for 100 images, unproven"
COLUMNS = {
    "data": "dataset",
    "model": "model",
    "samples": "samples",
    "proven": "proven",
    "block\nbound": "largest block bound",
    "evalua-\ntions": "evaluations of a block",
    "seconds": "seconds",
    "paper": "paper",
}


def measure(work: Work, run: Run, cell: Cell) -> Measured:
    """Draw samples, prove every solve, and keep the images."""
    flow = as_flow(work.model(run))
    z = flow.base.rsample(SAMPLES, torch.Generator(work.job.device).manual_seed(run.experiment.seed)).detach()
    inverter = Inverter(flow.transform, z, tolerance=TOLERANCE)
    _, more = _timed(inverter, z)
    first, (solution, seconds) = inverter.seconds + more, _timed(inverter, z)
    proven = int(solution.converged.sum()) if solution.proven else 0
    row = {
        "samples": SAMPLES,
        "proven": proven,
        "largest block bound": float(solution.largest_block_bound.max()),
        "code residual": float(solution.code_residual.max()),
        "evaluations of a block": float(solution.iterations.double().mean()) / _blocks(run),
        "seconds": round(seconds, 3),
        "seconds of the first call": round(first, 3),
        "paper": cell.paper,
    }
    path = work.job.out / f"figure5-{cell.folder}.npz"
    npy.save_npz(path, x=solution.x.float().cpu().numpy(), levels=np.array(run.schema.levels or 256))
    return row, {"images": path.name}, f"{proven} of {SAMPLES} samples proven in {seconds:.2f} s"


def _timed(inverter: Inverter, z: Tensor) -> tuple[ChainSolution, float]:
    begun = _now(z)
    return inverter.solve(z), _now(z) - begun


def _now(z: Tensor) -> float:
    if z.is_cuda:
        torch.cuda.synchronize(z.device)
    return time.perf_counter()


def _blocks(run: Run) -> int:
    return max(1, len(run.read_json("certificate.json").get("blocks", [])))


def _pictures(work: Work, groups: Groups) -> list[Path]:
    """A grid for every flow."""
    files = []
    for dataset, entries in groups.items():
        for e in entries:
            name = "figure5" if e["model"] == "flow" else f"figure5-{e['model']}"
            found = arrays(work.job.out / e["details"]["images"], "x", "levels")
            x, path = torch.from_numpy(found["x"]), picture_path(work.job, name, dataset, "cifar10")
            files.append(plot_image_grid(x, path, levels=int(found["levels"])))
    return files


RESULT = of_cells(
    of_flows("figure5", "cifar10", "mnist", paper={"cifar10": PAPER}),
    measure,
    COLUMNS,
    about="samples of flows on CIFAR-10 and MNIST (with those of App. F), every solve proven",
    says="pictures; inverting 100 CIFAR-10 images takes .15 to .75 s with 5 to 20 iterations",
    costs=costs("a flow on 8x8 digits: seconds", "2 flows of table4, and seconds on a GPU"),
    notes=(
        f"every block's solve proven to {TOLERANCE:g} in l2, float64; evaluations of a block; seconds for all samples",
    ),
    pictures=_pictures,
)
