"""Table 5: the time of a training step, Glow beside an i-ResNet with the same layers and channels on the same batch.

Five networks in the layout of Glow, 32 + 32 + 32 layers of 512 channels on 12 @ 16, 24 @ 8 and 48 @ 4: a Glow and two
i-ResNets (without and with spectral normalisation) that classify, a Glow and an i-ResNet that give likelihoods. Random
images; a step is forward, backward, clipping and plain SGD, and the time the median over rounds. The ratio is to the
Glow that does the same job; the paper has one Glow for both.

What OUT/table5.json has from the same machine, versions and commit is kept: the command goes on where it stopped, and
without that file it measures anew.

The Glow has ActNorms alone, as the original; the classifier of Table 3 also has a BatchNorm before each conditioner.
All networks are launched and multiplied alike, on a GPU as one CUDA graph with products in bfloat16:

engine    plain: nothing is compiled; compiled: residual blocks and couplings are, as `iresnet train` takes its steps
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from .. import presets
from ..data.source import schema_of
from ..gpu import Acceleration
from ..lipschitz import defer_norms, refresh_
from ..models import Network, build
from ..results import Results, provenance, read
from ..train import State, Training
from ..train.objective import Objective, ObjectiveKind, ObjectiveSettings
from ..transform import Shape
from .job import Job, Stopped, Work
from .record import Entry, Row, merge, named, one_by_one
from .result import Reproduction, Result, costs, refuse

#: Seconds, as printed; the paper's Glow is the baseline of all.
PAPER = {"Glow": 0.72, "i-ResNet": 0.31, "i-ResNet SN": 0.57, "i-ResNet SN LogDet": 1.88}
CLASSES: ObjectiveKind = "classification"
DENSITY: ObjectiveKind = "density"
#: What every case is, what it does, and its number in the paper.
CASES: dict[str, tuple[ObjectiveKind, str]] = {
    "Glow": (CLASSES, "Glow"),
    "i-ResNet": (CLASSES, "i-ResNet"),
    "i-ResNet SN": (CLASSES, "i-ResNet SN"),
    "Glow log-det": (DENSITY, "Glow"),
    "i-ResNet SN log-det": (DENSITY, "i-ResNet SN LogDet"),
}
BASELINES = {CLASSES: "Glow", DENSITY: "Glow log-det"}
#: Terms of the series, as the paper has for CIFAR-10.
TERMS = 5
ENGINES = {"plain": Acceleration(compile="off"), "compiled": Acceleration()}
COLUMNS = {
    "network": "model",
    "ms": "ms",
    "to\nGlow": "to Glow",
    "paper's": "paper, to Glow",
    "para-\nmeters": "parameters",
    "opera-\ntions": "operations, 1e9",
    "GiB": "memory GiB",
    "batch": "batch",
}


@dataclass(frozen=True)
class Size:
    """What is measured: the layers of every scale, their width, the batch, and rounds of so many steps."""

    blocks: tuple[int, ...] = (32, 32, 32)
    width: int = 512
    batch: int = 128
    rounds: int = 5
    steps: int = 8
    warm: int = 10


def size(job: Job) -> Size:
    """What a budget measures on this device; a CPU gets a small batch."""
    refuse(job, "table5 measures all its networks on random images; leave --set, --cells and --dataset out.")
    if job.budget == "smoke":
        return Size((1, 1, 1), 8, batch=4, rounds=2, steps=1, warm=1)
    return Size() if job.device.startswith("cuda") else Size(batch=4, rounds=3, steps=1, warm=2)


def network(name: str, s: Size) -> Network:
    """The settings of a case."""
    purpose, _ = CASES[name]
    if name in BASELINES.values():
        preset = "cifar10-glow-classifier" if purpose == CLASSES else "cifar10-glow"
        return replace(presets.find(preset).network, blocks=s.blocks, width=s.width, normalisation="actnorm")
    made = replace(presets.find("cifar10-iresnet-glow-style").network, blocks=s.blocks, width=s.width)
    if purpose == DENSITY:
        plain = replace(made, preprocessing="centre", readout="linear", pool=False)
        return replace(plain, preactivation=False, estimator="series", terms=TERMS)
    return replace(made, constrained="SN" in name)


def objective(name: str, s: Size, x: Tensor, device: str) -> Objective:
    """The model of a case and its loss, on a device, in training."""
    purpose, schema = CASES[name][0], schema_of("cifar10")
    torch.manual_seed(0)
    with defer_norms():
        model = build(network(name, s), schema, purpose, x).to(device)
    refresh_(model, settle=True)
    return ObjectiveSettings(kind=purpose).build_objective(model, schema.levels).train()


def images(s: Size) -> tuple[Tensor, Tensor]:
    """Random images and labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (s.batch, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return x, torch.randint(0, 10, (s.batch,), generator=generator)


def _backward_operations(grad: Shape, x: Shape, weight: Shape, *rest: Any, **_: Any) -> int:
    """Each gradient of a convolution takes as many as itself; torch counts that of grouped weights once a group."""
    transposed, _, _, wanted = rest[-4:]
    return int(sum(wanted[:2])) * int(conv_flop_count(list(x), list(weight), list(grad), transposed))


def operations(objective: Objective, x: Tensor, y: Tensor | None, generator: torch.Generator) -> float:
    """Multiplications and additions of convolutions and matrix products in one forward and backward pass, in 1e9."""
    counted = {torch.ops.aten.convolution_backward: _backward_operations}
    with FlopCounterMode(display=False, custom_mapping=counted) as counter:
        objective(x, y, generator=generator)[0].backward()
    objective.zero_grad(set_to_none=True)
    return float(counter.get_total_flops()) / 1e9


def measure(name: str, s: Size, device: str, engine: Acceleration) -> dict[str, Any]:
    """The row of one network: milliseconds a step, after the steps that prepare it."""
    x, labels = (t.to(device) for t in images(s))
    y = labels if CASES[name][0] == CLASSES else None
    made, generator = objective(name, s, x, device), torch.Generator(device).manual_seed(0)
    settings = Training(optimiser="sgd", learning_rate=1e-6, momentum=0.0)
    state = State(made, settings, generator, engine)
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    for _ in range(s.warm):
        state.advance(x, y)
    times = [_round(state, x, y, s, device) for _ in range(s.rounds)]
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.startswith("cuda") else None
    papers = PAPER[CASES[name][1]]
    return {
        "job": CASES[name][0],
        "ms": median(times),
        "spread ms": max(times) - min(times),
        "batch": s.batch,
        "parameters": sum(p.numel() for p in made.parameters()),
        "operations, 1e9": operations(made, x, y, generator),
        "memory GiB": memory,
        "steps taken": str(state.engine),
        "precision": state.engine.precision,
        "paper": papers,
        "paper, to Glow": papers / PAPER["Glow"],
    }


def _round(state: State, x: Tensor, y: Tensor | None, s: Size, device: str) -> float:
    """Milliseconds a step in one round."""
    _wait(device)
    begun = time.perf_counter()
    for state.step in range(s.warm, s.warm + s.steps):
        state.advance(x, y)
    _wait(device)
    return 1e3 * (time.perf_counter() - begun) / s.steps


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def compared(runs: Sequence[Entry]) -> list[Row]:
    """A row for every network in the paper's order, with the ratio to the Glow that does the same job in this way."""
    rows = one_by_one(runs)
    glows = {(r["job"], r["budget"], r.get("settings")): r["ms"] for r in rows if r["model"] in BASELINES.values()}
    order = list(CASES)
    for row in rows:
        glow = glows.get((row["job"], row["budget"], row.get("settings")))
        row["to Glow"] = None if glow is None else row["ms"] / glow
    return sorted(rows, key=lambda r: (r["budget"], r.get("settings") or "", order.index(r["model"])))


def _entry(name: str, s: Size, engine: str, job: Job) -> Entry:
    begun = time.perf_counter()
    row = measure(name, s, job.device, ENGINES[engine])
    made = provenance(
        seeds=[0], seconds=time.perf_counter() - begun, precision=row["precision"], parameters=row["parameters"]
    )
    return named(job, "cifar10", name, row, {}, made, _settings(engine, job))


def _settings(engine: str, job: Job) -> list[str]:
    return [f"on a {'GPU' if job.device.startswith('cuda') else 'CPU'}", f"engine {engine}"]


def _known(job: Job) -> dict[tuple[str, ...], Entry]:
    """What the file has that was measured in the circumstances of now; of a commit that was changed, nothing."""
    path, now = job.out / "table5.json", provenance(seeds=[0], seconds=0.0)
    if not path.is_file() or str(now["commit"]).endswith("-dirty"):
        return {}
    same = {**{k: now[k] for k in ("hardware", "versions", "commit")}, "budget": job.budget}
    entries = [e for e in read(path).runs if all(e.get(k) == v for k, v in same.items())]
    return {(e.get("model", ""), *e.get("settings", ())): e for e in entries}


def run(work: Work) -> Reproduction:
    """Measure every network; on a GPU twice, plain and compiled."""
    s, known, results = size(work.job), _known(work.job), Results("table5")
    engines = list(ENGINES) if work.job.device.startswith("cuda") else ["plain"]
    for engine in engines:
        for name in CASES:
            if work.stop():
                raise Stopped(f"table5 {name} was not begun")
            before = known.get((name, *_settings(engine, work.job)))
            made = before or _entry(name, s, engine, work.job)
            results = merge("table5", [made], work.job.out, compared)
            work.say(f"table5  {name}, {engine}: {made['row']['ms']:.2f} ms a step{', as before' if before else ''}")
    notes = (
        "ms: a training step, the median over rounds; to Glow: times that of the Glow which does the same job",
        "operations: those of convolutions and matrix products in a forward and backward pass, in billions",
    )
    return Reproduction(results, COLUMNS, (work.job.out / "table5.json",), notes)


RESULT = Result(
    name="table5",
    about="time of a training step: Glow, i-ResNet, with spectral norm, with log-determinant, of the same size",
    says="0.72 s Glow, 0.31 s i-ResNet, 0.57 s with spectral norm, 1.88 s with log-determinant",
    costs=costs(
        "three layers, a few steps: seconds",
        "minutes on a GPU, with a batch of 128; minutes on a CPU, with a batch of 4",
        "the same",
    ),
    run=run,
    check=size,
)
