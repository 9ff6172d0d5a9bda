"""Figure 2: densities in the plane, learned by a Glow and by i-ResNets that are no larger.

All have hidden widths 64-64-64 (App. C.3). The Glow has 100 affine couplings with an invertible linear map before each;
the i-ResNets have 99 residual blocks with an ActNorm after each, since a block has 8,642 parameters and a coupling,
which reads one coordinate only, 8,578. One i-ResNet has the paper's ELU, the other sines. Learning rates and the
frequency of the sine were chosen on held-out points. Below every panel are the nats of test points, with exact
log-determinants; they cannot be below the entropy of the density, which is known. The paper shows two densities without
names, and no numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data import npy, toy
from ..evaluate import as_flow, log_likelihood
from ..plots import Plane, pixel_centres, plot_planes, square_window
from ..run import Run
from ..tree import parameter_count
from .cells import DENSITIES, PLANES, Cell
from .evaluation import run_facts
from .job import Job, Work
from .record import Arrays, Entry, Row, cached, load_arrays, rows_per_cell
from .result import Groups, Measurement, Plan, budget_costs, cells_by_dataset, columns, trained_result

#: The cells of every density, by label.
CELLS = cells_by_dataset(PLANES)
GLOW, OURS, SINE = MODELS = tuple(CELLS[DENSITIES[0]])
#: The word for a difference within its error.
NEITHER = "neither"
#: The densities shown by default; any other of `data.toy` may be requested.
DEFAULT = ("eight_gaussians", "rings", "spirals", "checkerboard")
#: Pixels along one side of a panel, those of the smoke budget, and points of the data.
PIXELS, FEW, POINTS = 180, 40, 4000
#: The file in the run folder with the arrays of the plot.
FILE, NAMES = "figure2.npz", ("data", "density", "window", "values")

COLUMNS = columns(
    *("dataset", "model", "nats", ("points\n±", "error over points"), ("seeds\n±", "spread"), "seeds"),
    *(("above\nfloor", "above the floor"), ("beats\nGlow by", "nearer than Glow by"), "parameters"),
)


class PlanePlan(Plan):
    """All models on every requested density."""

    def own_cells(self, job: Job) -> dict[str, dict[str, Cell]]:
        if unknown := [d for d in job.datasets if d not in DENSITIES]:
            raise ValueError(
                f"{self.name} uses densities in the plane; got {', '.join(unknown)}. "
                f"Choose among {', '.join(DENSITIES)}."
            )
        return {d: CELLS[d] for d in job.datasets or (DEFAULT[:1] if job.budget == "smoke" else DEFAULT)}


def measure_density(work: Work, run: Run, cell: Cell) -> Measurement:
    """Measure held-out nats of one flow."""
    flow = as_flow(work.model(run))
    values = torch.from_numpy(_plot_arrays(work, run)["values"])
    nats, error = float(-values.mean()), float(values.std()) / math.sqrt(len(values))
    floor = toy.entropy(cell.dataset)
    row: dict[str, Any] = {
        "nats": nats,
        "error over points": error,
        "points": len(values),
        "floor": floor,
        "above the floor": nats - floor,
        "parameters": parameter_count(flow),
        **run_facts(run, "steps", "batch", "blocks proven", "largest Lip(g)"),
        **_compare_with_glow(work, run, cell, values),
        "paper": None,
    }
    return row, {}, f"{nats:.3f} ± {error:.3f} nats; no model can do better than {floor:.3f}"


def _plot_arrays(work: Work, run: Run) -> Arrays:
    """Return data, density on pixels, and log-likelihood of every held-out point; computed once."""
    n, path = FEW if work.job.budget == "smoke" else PIXELS, run.output / FILE
    wanted = {"pixels": n, "points": len(work.splits(run).test)}

    def compute() -> dict[str, int]:
        _save_arrays(work, run, n, path)
        return wanted

    cached(run, "figure2", compute, lambda known: known == wanted and path.is_file())
    return load_arrays(path, *NAMES)


@torch.no_grad()
def _save_arrays(work: Work, run: Run, n: int, path: Path) -> None:
    flow = as_flow(work.model(run))
    test = work.splits(run).test.to(work.job.device)
    values, window = log_likelihood(flow, test).value, square_window(test.x.cpu())
    pixels = torch.split(pixel_centres(window, n).to(test.x), 4096)
    density = torch.cat([flow.log_prob(p).double() for p in pixels]).exp().reshape(n, n)
    data = test.x[:POINTS].float().cpu().numpy()
    npy.save_npz(
        path, data=data, density=density.float().cpu().numpy(), window=np.array(window), values=values.cpu().numpy()
    )


def _compare_with_glow(work: Work, run: Run, cell: Cell, values: Tensor) -> Row:
    """Compare the nats of this flow with those of the Glow trained with the same settings, on the same points."""
    folder = work.job.run_folder(CELLS[cell.dataset][GLOW], run.experiment.seed)
    unknown = dict.fromkeys(("nearer than Glow by", "error of the difference", "nearer"))
    if cell.label == GLOW or not (folder / FILE).is_file():
        return unknown
    theirs = torch.from_numpy(load_arrays(folder / FILE, "values")["values"])
    if not _same_training(Run.open(folder), run) or len(theirs) != len(values):
        return unknown
    d = values - theirs
    by, error = float(d.mean()), float(d.std()) / math.sqrt(len(d))
    return {"nearer than Glow by": by, "error of the difference": error, "nearer": nearer(cell.label, by, error)}


def nearer(model: str, by: float, error: float) -> str:
    """Return which is nearer to the floor, a model or Glow; a difference within two standard errors is a tie.

    >>> nearer("i-ResNet", 0.1, 0.01), nearer("i-ResNet", -0.1, 0.01), nearer("i-ResNet", 0.01, 0.01)
    ('i-ResNet', 'Glow', 'neither')
    """
    if not abs(by) > 2 * error:  # also for NaN
        return NEITHER
    return model if by > 0 else GLOW


def _same_training(a: Run, b: Run) -> bool:
    """Whether two runs had the same data, steps and batch size."""
    one, other = ((e.data, e.training.steps, e.training.batch) for e in (a.experiment, b.experiment))
    return one == other


def sort_rows(runs: Sequence[Entry]) -> list[Row]:
    """Return a row for every flow, Glow first of every density; `nearer` is what all seeds agree on."""
    rows = sorted(
        rows_per_cell(runs, metric="nats"), key=lambda r: (DENSITIES.index(r["dataset"]), MODELS.index(r["model"]))
    )
    return [{**r, "nearer": r["nearer"] if r["nearer"] in (*MODELS, None) else NEITHER} for r in rows]


def compare_models(rows: Sequence[Row]) -> str:
    """Say on which densities each i-ResNet is nearer to the floor than Glow, and on which it is not."""
    said = (_compare_model(model, [r for r in rows if r.get("model") == model]) for model in (OURS, SINE))
    return ". ".join(filter(None, said)) or "one of the models is missing: nothing to compare"


def _compare_model(model: str, rows: Sequence[Row]) -> str:
    names = {who: [_title(r["dataset"]) for r in rows if r.get("nearer") == who] for who in (model, GLOW, NEITHER)}
    words = {
        model: f"{model} is closer to the floor than Glow on",
        GLOW: "it is not on" if names[model] else f"Glow is closer to the floor than {model} on",
        NEITHER: "there is no significant difference on",
    }
    if names[NEITHER] and not (names[model] or names[GLOW]):
        words[NEITHER] = f"{model} and Glow do not differ significantly on"
    return "; ".join(f"{words[who]} {', '.join(names[who])}" for who in words if names[who])


def _title(density: str) -> str:
    return density.replace("_", " ")


def compare_groups(groups: Groups, rows: Sequence[Row] = ()) -> str:
    """Compare the models among comparable entries; `rows` have the same cells over all seeds."""
    first = {
        _cell_of(e): {**e["row"], "dataset": e["dataset"], "model": e["model"]} for g in groups.values() for e in g
    }
    over_seeds = {_cell_of(r): r for r in rows}
    return compare_models([over_seeds.get(key, row) for key, row in first.items()])


def _cell_of(e: Entry | Row) -> tuple[str, ...]:
    """Return what an entry and the row of its cell have in common."""
    settings = e.get("settings", "")
    text = settings if isinstance(settings, str) else " ".join(settings)
    return (*(e[k] for k in ("dataset", "model", "budget", "recipe")), text)


def _plot(work: Work, groups: Groups) -> list[Path]:
    """Plot all densities side by side."""
    planes = [_plane(d, entries, work.job) for d, entries in groups.items()]
    caption = _describe_steps(groups.values()) + compare_groups(groups)
    return [plot_planes(planes, work.job.out / "figure2.png", caption=caption)]


def _describe_steps(groups: Iterable[Sequence[Entry]]) -> str:
    """Say after how many steps, if the number is the same for all."""
    steps = {e["row"]["steps"] for entries in groups for e in entries}
    return f"after {steps.pop():,} steps " if len(steps) == 1 else ""


def _plane(density: str, entries: Sequence[Entry], job: Job) -> Plane:
    """Return the column of one density."""
    by = {e["model"]: e for m in MODELS for e in entries if e["model"] == m}
    arrays = {m: load_arrays(job.run_folder(CELLS[density][m], e["seed"]) / FILE, *NAMES) for m, e in by.items()}
    first = next(iter(arrays.values()))
    panels = {m: (arrays[m]["density"], e["row"]["nats"]) for m, e in by.items()}
    nearest = find_nearest({m: a["values"] for m, a in arrays.items()})
    return Plane(_title(density), first["data"], tuple(first["window"]), toy.entropy(density), panels, nearest)


def find_nearest(values: Mapping[str, NDArray[Any]]) -> str | None:
    """Return the model with the highest likelihoods of the same points; None if it ties with another, or is alone."""
    best = max(values, key=lambda m: float(values[m].mean()))
    differences = [torch.from_numpy(values[best] - theirs) for m, theirs in values.items() if m != best]
    ties = (float(d.mean()) <= 2 * float(d.std()) / math.sqrt(len(d)) for d in differences)
    return best if differences and not any(ties) else None


RESULT = trained_result(
    PlanePlan("figure2", PLANES, ()),
    measure_density,
    COLUMNS,
    about="densities in the plane: data, a Glow of 100 + 100 layers, i-ResNets that are no larger, with nats",
    says="plots of two densities without names: the i-ResNet fits them more accurately; no numbers",
    costs=budget_costs(
        "one density, four blocks, 30 steps: seconds",
        "4 densities, three models of about 100 layers: ten minutes for each seed and density on one core",
        "the same with 20,000 steps: hours each on one core",
    ),
    notes=(
        "nats of test points, exact; floor: the entropy of the density, which no model can beat",
        "points ±: standard error over test points; seeds ±: standard deviation over seeds",
    ),
    remarks=lambda rows, groups: [compare_groups(groups, rows)],
    rows=sort_rows,
    all_seeds=True,
    plots=_plot,
)
