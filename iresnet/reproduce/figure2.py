"""Figure 2: densities in the plane, data beside what a Glow and an i-ResNet of as many layers learn of them.

Both have 100 layers whose networks have the widths 64-64-64 (App. C.3): residual blocks of an i-ResNet with an ActNorm
after each, or affine couplings of a Glow with an invertible linear map before each. A block has 8,642 parameters, a
coupling 8,578, since it sees one coordinate only; the paper has the i-ResNet slightly smaller in all, here it is
slightly larger. Under every picture stand the nats of held-out points, with exact log-determinants: they cannot be
below the entropy of the density, which is known. The paper has two densities, which it does not name, and no numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data import npy, toy
from ..evaluate import as_flow, log_likelihood
from ..plots import Plane, pixel_centres, plot_planes, square_window
from ..run import Run
from .cells import DENSITIES, PLANES, Cell
from .evaluation import facts
from .job import Job, Work
from .record import Arrays, Entry, Row, arrays, kept, one_by_one
from .result import Groups, Measured, Plan, by_dataset, costs, of_cells

#: The cells of every density, by label.
CELLS = by_dataset(PLANES)
GLOW, OURS = CELLS[DENSITIES[0]]
#: The word for a difference that may be chance.
NEITHER = "neither"
#: Those that are made without being asked for; any other of `data.toy` may be.
USUAL = ("eight_gaussians", "rings", "spirals", "checkerboard")
#: Pixels of a density's picture along one side, and those of the budget smoke; points of its data.
PIXELS, FEW, POINTS = 180, 40, 4000
#: Where a run folder keeps what the picture shows.
FILE, NAMES = "figure2.npz", ("data", "density", "window", "values")

COLUMNS = {
    "density": "dataset",
    "model": "model",
    "nats": "nats",
    "±": "error over points",
    "above\nfloor": "above the floor",
    "nearer than\nGlow by": "nearer than Glow by",
    "para-\nmeters": "parameters",
    "steps": "steps",
}


class Densities(Plan):
    """Both models on every density that is asked for."""

    def own(self, job: Job) -> dict[str, dict[str, Cell]]:
        if strangers := [d for d in job.datasets if d not in DENSITIES]:
            raise ValueError(
                f"{self.name} is made of densities in the plane; got {', '.join(strangers)}. "
                f"Ask for some of {', '.join(DENSITIES)}."
            )
        return {d: CELLS[d] for d in job.datasets or (USUAL[:1] if job.budget == "smoke" else USUAL)}


def measure(work: Work, run: Run, cell: Cell) -> Measured:
    """Held-out nats of one flow, and its density on the pixels of the picture."""
    flow, seen = as_flow(work.model(run)), _seen(work, run)
    values = torch.from_numpy(seen["values"])
    nats, error = float(-values.mean()), float(values.std()) / math.sqrt(len(values))
    floor = toy.entropy(cell.dataset)
    row: dict[str, Any] = {
        "nats": nats,
        "error over points": error,
        "points": len(values),
        "floor": floor,
        "above the floor": nats - floor,
        "parameters": sum(p.numel() for p in flow.parameters()),
        **facts(run, "steps", "batch", "blocks proven", "largest Lip(g)"),
        **_beside_glow(work, run, cell, values),
        "paper": None,
    }
    return row, {}, f"{nats:.3f} ± {error:.3f} nats; no model can do better than {floor:.3f}"


def _seen(work: Work, run: Run) -> Arrays:
    """What the picture needs: data, the density on pixels, and the likelihood of every held-out point; made once."""
    n, path = FEW if work.job.budget == "smoke" else PIXELS, run.output / FILE
    asked = {"pixels": n, "points": len(work.splits(run).test)}

    def made() -> dict[str, int]:
        _look(work, run, n, path)
        return asked

    kept(run, "figure2", made, lambda found: found == asked and path.is_file())
    return arrays(path, *NAMES)


@torch.no_grad()
def _look(work: Work, run: Run, n: int, path: Path) -> None:
    flow, test = as_flow(work.model(run)), work.splits(run).test.to(work.job.device)
    values, window = log_likelihood(flow, test).value, square_window(test.x.cpu())
    pixels = torch.split(pixel_centres(window, n).to(test.x), 4096)
    density = torch.cat([flow.log_prob(p).double() for p in pixels]).exp().reshape(n, n)
    data = test.x[:POINTS].float().cpu().numpy()
    npy.save_npz(
        path, data=data, density=density.float().cpu().numpy(), window=np.array(window), values=values.cpu().numpy()
    )


def _beside_glow(work: Work, run: Run, cell: Cell, values: Tensor) -> Row:
    """How much nearer to the floor this flow comes than the Glow that was made alike, on the same points."""
    folder = work.job.run_folder(CELLS[cell.dataset][GLOW], run.experiment.seed)
    unknown = dict.fromkeys(("nearer than Glow by", "error of the difference", "nearer"))
    if cell.label == GLOW or not (folder / FILE).is_file():
        return unknown
    theirs = torch.from_numpy(arrays(folder / FILE, "values")["values"])
    if not _alike(Run.open(folder), run) or len(theirs) != len(values):
        return unknown
    d = values - theirs
    by, error = float(d.mean()), float(d.std()) / math.sqrt(len(d))
    return {"nearer than Glow by": by, "error of the difference": error, "nearer": nearer(by, error)}


def nearer(by: float, error: float) -> str:
    """Which model comes nearer to the floor; a difference within two standard errors is none.

    >>> nearer(0.1, 0.01), nearer(-0.1, 0.01), nearer(0.01, 0.01)
    ('i-ResNet', 'Glow', 'neither')
    """
    if not abs(by) > 2 * error:  # nor does one win whose difference is no number
        return NEITHER
    return OURS if by > 0 else GLOW


def _alike(a: Run, b: Run) -> bool:
    """Whether two runs had the same points, as many steps and as large batches."""
    one, other = ((e.data, e.training.steps, e.training.batch) for e in (a.experiment, b.experiment))
    return one == other


def in_order(runs: Sequence[Entry]) -> list[Row]:
    """A row for every flow; of a density, Glow comes first."""
    return sorted(one_by_one(runs), key=lambda r: (DENSITIES.index(r["dataset"]), (GLOW, OURS).index(r["model"])))


def verdict(rows: Sequence[Row]) -> str:
    """Where the i-ResNet wins and where it does not, in a sentence."""
    names = {who: [_spoken(r["dataset"]) for r in rows if r.get("nearer") == who] for who in (OURS, GLOW, NEITHER)}
    words = {
        OURS: "the i-ResNet comes nearer to the floor than Glow on",
        GLOW: "it does not on" if names[OURS] else "Glow comes nearer to the floor than the i-ResNet on",
        NEITHER: "the two cannot be told apart on",
    }
    parts = [f"{words[who]} {', '.join(names[who])}" for who in words if names[who]]
    return "; ".join(parts) or "one of the two models is missing: nothing to compare"


def _spoken(density: str) -> str:
    return density.replace("_", " ")


def sentence(groups: Groups) -> str:
    """Where the i-ResNet wins among what was made alike."""
    return verdict([{"dataset": d, **e["row"]} for d, entries in groups.items() for e in entries])


def _picture(work: Work, groups: Groups) -> list[Path]:
    """All densities side by side."""
    planes = [_plane(d, entries, work.job) for d, entries in groups.items()]
    caption = _after(groups.values()) + sentence(groups)
    return [plot_planes(planes, work.job.out / "figure2.png", caption=caption)]


def _after(groups: Iterable[Sequence[Entry]]) -> str:
    """After how many steps, where it is the same number for all."""
    steps = {e["row"]["steps"] for entries in groups for e in entries}
    return f"after {steps.pop():,} steps " if len(steps) == 1 else ""


def _plane(density: str, entries: Sequence[Entry], job: Job) -> Plane:
    """What the picture shows of one density."""
    by = {e["model"]: e for m in (GLOW, OURS) for e in entries if e["model"] == m}
    found = {m: arrays(job.run_folder(CELLS[density][m], e["seed"]) / FILE, *NAMES) for m, e in by.items()}
    first = next(iter(found.values()))
    panels = {m: (found[m]["density"], e["row"]["nats"]) for m, e in by.items()}
    nearest = next((e["row"]["nearer"] for e in by.values() if e["row"].get("nearer") in (GLOW, OURS)), None)
    return Plane(_spoken(density), first["data"], tuple(first["window"]), toy.entropy(density), panels, nearest)


RESULT = of_cells(
    Densities("figure2", PLANES, ()),
    measure,
    COLUMNS,
    about="densities in the plane: data, a Glow of 100 + 100 layers, an i-ResNet of 100 blocks, with held-out nats",
    says="pictures of two densities, unnamed: the i-ResNet fits them more accurately; no numbers",
    costs=costs(
        "one density, four blocks, 30 steps: seconds",
        "4 densities, both models with 100 layers: ten minutes a cell on one core",
        "the same with 20,000 steps: hours a cell on one core",
    ),
    notes=(
        "nats of held-out points, exact; floor: the entropy of the density, which no model can beat; ±: over points",
    ),
    remarks=lambda rows, groups: [sentence(groups)],
    rows=in_order,
    pictures=_picture,
)
