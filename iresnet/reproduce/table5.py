"""Table 5: the time of a training step, Glow and i-ResNets with the same layers and channels on the same batch.

Five networks with the layout of Glow, 32 + 32 + 32 layers of 512 channels on 12 @ 16, 24 @ 8 and 48 @ 4: a Glow and two
i-ResNets (without and with spectral normalisation) that classify, a Glow and an i-ResNet that give likelihoods. Images
are random; a step is forward, backward, clipping and plain SGD, and the time is the median over rounds. The ratio is to
the Glow of the same purpose; the paper has one Glow for both.

Entries of OUT/table5.json from the same machine, versions and commit are kept: the command continues where it stopped.
Without that file everything is measured again.

The Glow has ActNorms alone, as the original; the classifier of Table 3 also has a BatchNorm before each conditioner.
All networks run alike, on a GPU as one CUDA graph with products in bfloat16:

engine    plain: nothing is compiled; compiled: residual blocks and couplings are, as in `iresnet train`
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from ..batch import Shape
from ..data.builtin import schema_of
from ..gpu import Acceleration
from ..lipschitz import defer_norms, refresh_
from ..models import Network, build
from ..results import provenance, read
from ..train import State, Training
from ..train.objective import Objective, ObjectiveSettings
from ..tree import parameter_count
from .cells import Cell
from .job import Job, Work
from .record import Entry, Row, new_entry, rows_per_run
from .result import Reproduction, Result, budget_costs, columns, refuse_choices, run_items

GLOW, GLOW_LOGDET = "Glow", "Glow log-det"
STYLE = "cifar10-iresnet-glow-style"
#: An i-ResNet for likelihoods in the layout of the classifier, with the paper's number of terms for CIFAR-10.
LOGDET = (
    *("objective.kind=density", "network.preprocessing=centre", "network.readout=linear", "network.pool=false"),
    *("network.preactivation=false", "network.estimator=series", "network.terms=5"),
)
#: The networks with the paper's seconds, as printed; the paper's Glow is the baseline of all.
CELLS = {
    cell.label: cell
    for cell in (
        Cell("cifar10", GLOW, "cifar10-glow-classifier", ("network.normalisation=actnorm",), 0.72),
        Cell("cifar10", "i-ResNet", STYLE, ("network.constrained=false",), 0.31),
        Cell("cifar10", "i-ResNet SN", STYLE, (), 0.57),
        Cell("cifar10", GLOW_LOGDET, "cifar10-glow", ("network.normalisation=actnorm",), 0.72),
        Cell("cifar10", "i-ResNet SN log-det", STYLE, LOGDET, 1.88),
    )
}
ENGINES = {"plain": Acceleration(compile="off"), "compiled": Acceleration()}
COLUMNS = columns(
    *("model", "ms", "to Glow", ("paper's", "paper, to Glow"), "parameters", ("opera-\ntions", "operations, 1e9")),
    *(("GiB", "memory GiB"), "batch"),
)


@dataclass(frozen=True)
class Size:
    """What is measured: the layers of every scale, their width, the batch size, and rounds of so many steps."""

    blocks: tuple[int, ...] = (32, 32, 32)
    width: int = 512
    batch: int = 128
    rounds: int = 5
    steps: int = 8
    warm: int = 10


def size(job: Job) -> Size:
    """Return the size for a job's budget and device; a CPU gets a small batch."""
    refuse_choices(job, "table5 measures networks of its own on random images")
    if job.budget == "smoke":
        return Size((1, 1, 1), 8, batch=4, rounds=2, steps=1, warm=1)
    return Size() if job.device.startswith("cuda") else Size(batch=4, rounds=3, steps=1, warm=2)


def network(cell: Cell, s: Size) -> Network:
    """Return the settings of a network."""
    return replace(cell.experiment.network, blocks=s.blocks, width=s.width)


def build_objective(cell: Cell, s: Size, x: Tensor, device: str) -> Objective:
    """Build the model of a cell and its loss, in training mode."""
    kind, schema = cell.experiment.objective.kind, schema_of("cifar10")
    torch.manual_seed(0)
    with defer_norms():
        model = build(network(cell, s), schema, kind, x).to(device)
    refresh_(model, settle=True)
    return ObjectiveSettings(kind=kind).build_objective(model, schema.levels).train()


def random_images(s: Size) -> tuple[Tensor, Tensor]:
    """Draw images and labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (s.batch, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return x, torch.randint(0, 10, (s.batch,), generator=generator)


def _backward_operations(grad: Shape, x: Shape, weight: Shape, *rest: Any, **_: Any) -> int:
    """Count the gradients of a convolution like the convolution; torch counts those of grouped weights per group."""
    transposed, _, _, wanted = rest[-4:]
    return int(sum(wanted[:2])) * int(conv_flop_count(list(x), list(weight), list(grad), transposed))


def count_operations(objective: Objective, x: Tensor, y: Tensor | None, generator: torch.Generator) -> float:
    """Count operations of convolutions and matrix products in one forward and backward pass, in 1e9."""
    counted = {torch.ops.aten.convolution_backward: _backward_operations}
    with FlopCounterMode(display=False, custom_mapping=counted) as counter:
        objective(x, y, generator=generator)[0].backward()
    objective.zero_grad(set_to_none=True)
    return float(counter.get_total_flops()) / 1e9


def measure_step(cell: Cell, s: Size, device: str, engine: Acceleration) -> dict[str, Any]:
    """Return the row of one network: milliseconds per step, after warm-up."""
    x, labels = (t.to(device) for t in random_images(s))
    purpose, cuda = cell.purpose, device.startswith("cuda")
    y = labels if purpose == "classification" else None
    objective = build_objective(cell, s, x, device)
    generator = torch.Generator(device).manual_seed(0)
    settings = Training(optimiser="sgd", learning_rate=1e-6, momentum=0.0)
    state = State(objective, settings, generator, engine)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(s.warm):
        state.advance(x, y)
    times = [_time_round(state, x, y, s, device) for _ in range(s.rounds)]
    return {
        "job": purpose,
        "ms": median(times),
        "spread ms": max(times) - min(times),
        "batch": s.batch,
        "parameters": parameter_count(objective),
        "operations, 1e9": count_operations(objective, x, y, generator),
        "memory GiB": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "steps taken": str(state.engine),
        "precision": state.engine.precision,
        "paper": cell.paper,
        "paper, to Glow": cell.paper / CELLS[GLOW].paper,
    }


def _time_round(state: State, x: Tensor, y: Tensor | None, s: Size, device: str) -> float:
    """Return the milliseconds per step in one round."""
    _synchronise(device)
    begun = time.perf_counter()
    for state.step in range(s.warm, s.warm + s.steps):
        state.advance(x, y)
    _synchronise(device)
    return 1e3 * (time.perf_counter() - begun) / s.steps


def _synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def rows_with_ratio(runs: Sequence[Entry]) -> list[Row]:
    """Return a row for every network in the paper's order, with the ratio to Glow of the same purpose and engine."""
    rows, order = rows_per_run(runs), list(CELLS)
    glows = {_glow_key(r): r["ms"] for r in rows if r["model"] in (GLOW, GLOW_LOGDET)}
    for row in rows:
        glow = glows.get(_glow_key(row))
        row["to Glow"] = None if glow is None else row["ms"] / glow
    return sorted(rows, key=lambda r: (r["budget"], r.get("settings") or "", order.index(r["model"])))


def _glow_key(row: Row) -> tuple[Any, ...]:
    return row["job"], row["budget"], row.get("settings")


def _measure_network(
    job: Job, s: Size, known: dict[tuple[str, ...], Entry], name: str, engine: str
) -> tuple[Entry, str]:
    """Return the known entry of a network and engine, or measure it."""
    settings = [f"on a {'GPU' if job.device.startswith('cuda') else 'CPU'}", f"engine {engine}"]
    entry, note = known.get((name, *settings)), ", as before"
    if entry is None:
        begun, note = time.perf_counter(), ""
        row = measure_step(CELLS[name], s, job.device, ENGINES[engine])
        seconds, more = time.perf_counter() - begun, {k: row[k] for k in ("precision", "parameters")}
        entry = new_entry(job, "cifar10", name, row, {}, provenance(seeds=[0], seconds=seconds, **more), settings)
    return entry, f"{entry['row']['ms']:.2f} ms per step{note}"


def _known_entries(job: Job) -> dict[tuple[str, ...], Entry]:
    """Return the entries of the file from this machine, these versions and this commit; none of a dirty commit."""
    path, now = job.out / "table5.json", provenance(seeds=[0], seconds=0.0)
    if not path.is_file() or str(now["commit"]).endswith("-dirty"):
        return {}
    same = {**{k: now[k] for k in ("hardware", "versions", "commit")}, "budget": job.budget}
    entries = [e for e in read(path).runs if all(e.get(k) == v for k, v in same.items())]
    return {(e.get("model", ""), *e.get("settings", ())): e for e in entries}


def run(work: Work) -> Reproduction:
    """Measure every network; on a GPU twice, plain and compiled."""
    measure = partial(_measure_network, work.job, size(work.job), _known_entries(work.job))
    engines = list(ENGINES) if work.job.device.startswith("cuda") else ["plain"]
    items = [(f"{name}, {engine}", partial(measure, name, engine)) for engine, name in product(engines, CELLS)]
    results = run_items(work, "table5", items, rows_with_ratio)
    notes = (
        "ms: a training step, the median over rounds; to Glow: relative to the Glow of the same purpose",
        "operations: of convolutions and matrix products in a forward and backward pass, in billions",
    )
    return Reproduction(results, COLUMNS, (work.job.out / "table5.json",), notes)


RESULT = Result(
    name="table5",
    about="time of a training step: Glow, i-ResNet, with spectral norm, with log-determinant, of the same size",
    says="0.72 s Glow, 0.31 s i-ResNet, 0.57 s with spectral norm, 1.88 s with log-determinant",
    costs=budget_costs(
        "three layers, a few steps: seconds",
        "minutes on a GPU, with a batch of 128; minutes on a CPU, with a batch of 4",
        "the same",
    ),
    run=run,
    check=size,
)
