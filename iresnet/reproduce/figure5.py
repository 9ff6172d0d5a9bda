"""Figure 5 and App. F: samples of flows, CIFAR-10 and MNIST.

Codes are drawn from the base distribution and inverted by an `Inverter`, block by block, every solve proven to 1e-4 in
l2. The time is that of the inverse, from codes to images; that of the first call also includes proving all constants
and preparing the inverse. Pixels outside of the range are clipped in the plot, not in the metrics.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..data import npy
from ..evaluate import as_flow
from ..fixed_point import ChainSolution
from ..inverse import Inverter
from ..plots import plot_image_grid
from ..run import Run
from .cells import Cell
from .job import Work
from .record import load_arrays
from .result import Groups, Measurement, budget_costs, columns, flow_plan, plot_path, trained_result

SAMPLES, TOLERANCE = 100, 1e-4

#: App. D, for 100 CIFAR-10 images and 5 to 20 iterations, nothing proven; it has no time for samples.
PAPER = "0.15 to 0.75 s for 100 images, unproven"
COLUMNS = columns(
    *("dataset", "model", "samples", "proven", ("block\nbound", "largest block bound")),
    *(("evalua-\ntions", "evaluations of a block"), "seconds", "paper"),
)


def measure_samples(work: Work, run: Run, cell: Cell) -> Measurement:
    """Draw samples with a proof of every solve, and save the images."""
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
        "evaluations of a block": float(solution.iterations.double().mean()) / _count_blocks(run),
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


def _count_blocks(run: Run) -> int:
    return max(1, len(run.read_json("certificate.json").get("blocks", [])))


def _plots(work: Work, groups: Groups) -> list[Path]:
    """Plot a grid of samples for every flow."""
    files = []
    for dataset, entries in groups.items():
        for e in entries:
            name = "figure5" if e["model"] == "flow" else f"figure5-{e['model']}"
            arrays = load_arrays(work.job.out / e["details"]["images"], "x", "levels")
            x, path = torch.from_numpy(arrays["x"]), plot_path(work.job, name, dataset, "cifar10")
            files.append(plot_image_grid(x, path, levels=int(arrays["levels"])))
    return files


RESULT = trained_result(
    flow_plan("figure5", "cifar10", "mnist", paper={"cifar10": PAPER}),
    measure_samples,
    COLUMNS,
    about="samples of flows on CIFAR-10 and MNIST (with those of App. F), every solve proven",
    says="plots; inverting 100 CIFAR-10 images takes .15 to .75 s with 5 to 20 iterations",
    costs=budget_costs("a flow on 8x8 digits: seconds", "2 flows of table4, and seconds on a GPU"),
    notes=(
        f"every block's solve proven to {TOLERANCE:g} in l2, float64; evaluations of a block; seconds for all samples",
    ),
    plots=_plots,
)
