"""The arithmetic of docs/explanation/scaling.md: data-parallel training on 8 to 1,024 GPUs, from one measured GPU.

Measured on one H200 (results/step.json, flow.json, inverse.json, sampling.json): the time and the memory of a step at
32 x 32, the number of parameters, the time of an inverse. Everything else is assumed, and stated:

    64 x 64 images     four times the pixels: four times the arithmetic and the activations, the same weights
    all-reduce         rings at two levels: among the GPUs of a node, each of which then holds the sum of a share of
                       the gradient, and among nodes; a ring of n with bandwidth B takes 2 (n - 1) / n * bytes / B
                       + 2 (n - 1) * latency
    overlap            gradients travel while the rest of the backward pass, 2/3 of the step, is computed
    input              images are read as bytes over the node's Ethernet

A table of the page is a function here; `tools.tables` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iresnet.results import markdown_table, read

Row = dict[str, Any]

#: The numbers of GPUs, GPUs in a node, and the memory of a GPU in GiB.
GPUS, PER_NODE, GPU_GIB = (8, 64, 256, 1024), 8, 139.0

#: Bytes per parameter: of its gradient, and of weight, gradient and the two averages of Adam.
GRADIENT_BYTES, STATE_BYTES = 4, 16

#: How many times the pixels of a measured image, and the bytes of an image at that size.
PIXELS, IMAGE_BYTES = 4, 3 * 64 * 64

#: The share of a step during which gradients can travel: the backward pass.
BACKWARD = 2 / 3

#: The images of a step on all GPUs together, where that number is fixed.
GLOBAL_BATCH = 8192


@dataclass(frozen=True)
class Link:
    """A connection: bytes per second each way and seconds per message; whether all GPUs of a node share it."""

    name: str
    bandwidth: float
    latency: float
    shared: bool = False


NVLINK = Link("NVLink 4", 450e9, 3e-6)
INFINIBAND = Link("InfiniBand NDR", 400e9 / 8, 5e-6)
ETHERNET = Link("25 GbE", 25e9 / 8, 30e-6, shared=True)


@dataclass(frozen=True)
class Step:
    """A measured training step: milliseconds, GiB and images per step on one GPU, and the number of parameters."""

    network: str
    ms: float
    gib: float
    batch: int
    parameters: int

    @property
    def gradient(self) -> int:
        """The bytes of the gradient."""
        return GRADIENT_BYTES * self.parameters

    @property
    def state_gib(self) -> float:
        """GiB that do not grow with the batch."""
        return STATE_BYTES * self.parameters / 2**30

    def larger(self, times: float = PIXELS) -> Step:
        """Extrapolate to images of so many times the pixels."""
        gib = self.state_gib + times * (self.gib - self.state_gib)
        return Step(self.network, times * self.ms, gib, self.batch, self.parameters)

    @property
    def largest_batch(self) -> int:
        """The images that fit into the memory of a GPU."""
        return math.floor((GPU_GIB - self.state_gib) / (self.gib - self.state_gib) * self.batch)


def ring(bytes_: float, ranks: int, link: Link) -> float:
    """Return the seconds of an all-reduce in a ring.

    >>> ring(100e6, 2, Link("a link", 1e9, 0.0))
    0.1
    """
    return 2 * (ranks - 1) / ranks * bytes_ / link.bandwidth + 2 * (ranks - 1) * link.latency


def all_reduce(bytes_: float, gpus: int, between: Link) -> float:
    """Return the seconds of an all-reduce among so many GPUs, in nodes that are connected by this link.

    Within a node it is a ring on NVLink. Among nodes every GPU passes its share on, by a port of its own or, if the
    link is shared, all of them by one.
    """
    inside = ring(bytes_, min(gpus, PER_NODE), NVLINK)
    nodes = gpus // PER_NODE
    return inside if nodes <= 1 else inside + ring(bytes_ / (1 if between.shared else PER_NODE), nodes, between)


def with_communication(compute: float, communication: float, *, overlap: bool) -> float:
    """Return the time of a step; with overlap, only what the backward pass does not hide is added.

    >>> with_communication(9.0, 4.0, overlap=True), with_communication(9.0, 7.0, overlap=True)
    (9.0, 10.0)
    """
    return compute + max(0.0, communication - BACKWARD * compute) if overlap else compute + communication


def input_rate(step: Step, seconds: float) -> float:
    """Return the bytes per second that the GPUs of one node read."""
    return PER_NODE * step.batch * IMAGE_BYTES / seconds


def bottleneck(step: Step, gpus: int, between: Link) -> str:
    """Name what limits the speed first: whatever takes longest, the arithmetic of the step, gradients or input."""
    compute = step.ms / 1e3
    times = {
        "arithmetic": compute,
        f"gradients over {NVLINK.name if gpus <= PER_NODE else between.name}": all_reduce(step.gradient, gpus, between),
        f"input over {ETHERNET.name}": input_rate(step, compute) * compute / ETHERNET.bandwidth,
    }
    return max(times, key=lambda name: times[name])


# ------------------------------------------------------------------------------------------------- measured numbers


def measured_steps(results: Path) -> list[Step]:
    """Read the steps at 32 x 32 and a batch of 128: the classifier, and both flows with five terms."""
    rows = read(results / "step.json").rows[:1]
    rows += [r for r in read(results / "flow.json").rows if "PowerSeries" in r["log-determinant"]]
    return [Step(r["network"], r["ms"], r["memory GiB"], r["batch"], r["parameters"]) for r in rows]


def step_of_batch(results: Path, batch: float) -> float:
    """Return the seconds of a step of the classifier at 32 x 32: a line through the two measured batches."""
    small, large = (r for r in read(results / "step.json").rows if r["network"] == "iresnet164")
    slope = (large["ms"] - small["ms"]) / (large["batch"] - small["batch"])
    return float(small["ms"] + slope * (batch - small["batch"])) / 1e3


# ------------------------------------------------------------------------------------------------- tables


def measured(results: Path) -> list[Row]:
    """The measured steps, and what follows at once: bytes of the gradient, time and memory at 64 x 64."""
    return [
        {
            "network": s.network, "batch": s.batch, "parameters": s.parameters, "gradient MB": s.gradient / 1e6,
            "ms at 32 x 32": s.ms, "GiB at 32 x 32": s.gib, "ms at 64 x 64": s.larger().ms,
            "GiB at 64 x 64": s.larger().gib, "largest batch at 64 x 64": s.larger().largest_batch,
        }
        for s in measured_steps(results)
    ]  # fmt: skip


def weak(results: Path) -> list[Row]:
    """The same batch on every GPU at 64 x 64: time of the all-reduce, efficiency, images per second, bottleneck."""
    return [_weak_row(s.larger(), n, link) for s in measured_steps(results) for n, link in _clusters()]


def _clusters() -> list[tuple[int, Link]]:
    return [(n, link) for n in GPUS for link in (INFINIBAND, ETHERNET) if n > PER_NODE or link is INFINIBAND]


def _weak_row(step: Step, gpus: int, link: Link) -> Row:
    compute, communication = step.ms / 1e3, all_reduce(step.gradient, gpus, link)
    hidden, apart = (with_communication(compute, communication, overlap=o) for o in (True, False))
    return {
        "network": step.network, "GPUs": gpus, "between nodes": link.name if gpus > PER_NODE else "-",
        "step ms": step.ms, "all-reduce ms": 1e3 * communication, "efficiency with overlap": compute / hidden,
        "efficiency without": compute / apart, "images / s": gpus * step.batch / hidden,
        "input GB / s and node": input_rate(step, hidden) / 1e9, "first bottleneck": bottleneck(step, gpus, link),
    }  # fmt: skip


def strong(results: Path) -> list[Row]:
    """The classifier with 8,192 images per step on all GPUs together, at 64 x 64 with InfiniBand."""
    first, rows = measured_steps(results)[0], list[Row]()
    for gpus in GPUS:
        batch = GLOBAL_BATCH / gpus
        compute, fixed = (PIXELS * step_of_batch(results, b) for b in (batch, 0))
        communication = all_reduce(first.gradient, gpus, INFINIBAND)
        step = with_communication(compute, communication, overlap=True)
        rows.append(
            {
                "GPUs": gpus, "images per GPU": int(batch), "step ms": 1e3 * compute,
                "of it independent of the batch": fixed / compute, "all-reduce ms": 1e3 * communication,
                "images / s": GLOBAL_BATCH / step,
                "speed-up over 8 GPUs": PIXELS * step_of_batch(results, GLOBAL_BATCH / GPUS[0]) / step,
            }
        )  # fmt: skip
    return rows


def solving(results: Path) -> list[Row]:
    """Inverses and samples at 64 x 64, which need no communication: images per second."""
    inverse = next(r for r in read(results / "inverse.json").rows if "residual: float64" in r["method"])
    sample = next(r for r in read(results / "sampling.json").rows if r["method"] == "Flow.sample")
    rows = []
    for what, images, ms in (
        ("inverse through 54 blocks, proven to 1e-5", inverse["images"], inverse["ms"]),
        (f"samples of {sample['model']}, proven to {sample['tolerance']:g}", sample["samples"], sample["ms"]),
    ):
        one = {"what": what, "ms at 32 x 32": ms, "images": images}
        rows.append(one | {f"images / s, {n:,} GPUs": n * images / (PIXELS * ms / 1e3) for n in (1, *GPUS)})
    return rows


#: The tables of the page, by name.
TABLES: dict[str, Callable[[Path], list[Row]]] = {
    "measured": measured,
    "weak": weak,
    "strong": strong,
    "solving": solving,
}


def scaling_table(name: str, results: Path) -> str:
    """Return one of the tables as Markdown."""
    if name not in TABLES:
        raise ValueError(f"scaling must be one of {', '.join(TABLES)}; got {name!r}. Change the marker.")
    return markdown_table(TABLES[name](results))
