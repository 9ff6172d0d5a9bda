"""Time a training step of the paper's flows: milliseconds, the cost of the log-determinant, and memory.

    python3 benchmarks/flow.py --out results                                        on a GPU
    python3 benchmarks/flow.py --out results --profile                              also print the slowest kernels
    python3 benchmarks/flow.py --blocks 1 --width 16 --batch 2 --steps 1            a dry run on a CPU

Random images, Adam, forward + backward + clipping + optimiser, one power iteration per step. The shapes are those of
the released script (12 @ 16, 24 @ 8, 48 @ 4) and of the appendix (3 @ 32, 12 @ 16, 48 @ 8), with 16 blocks per scale.
Each flow is compared with the same flow without its log-determinant, in time and in counted operations. Then follow a
roulette instead of the series, twice the batch size, and with --eager the same step run eagerly. Cases are measured in
this order until --seconds is over.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from iresnet import lipschitz as lip
from iresnet import presets, timing
from iresnet.data.builtin import schema_of
from iresnet.data.units import nats_per_unit, unit_name
from iresnet.flow import Flow
from iresnet.gpu import Acceleration, planned
from iresnet.lipschitz import defer_norms, refresh_
from iresnet.logdet import Estimator, PowerSeries, RussianRoulette
from iresnet.models import build
from iresnet.outermost import outermost_call
from iresnet.results import Results, provenance, require_commit, write
from iresnet.train import State
from iresnet.train.objective import Loss, MaximumLikelihood, Objective
from iresnet.transforms.dequantisation import dequantise_for
from iresnet.tree import parameter_count

#: The targets in milliseconds; the paper's released code on the same hardware; the target ratio with / without log-det.
TARGETS = {"cifar10-flow": 36.0, "cifar10-flow-appendix": 100.0}
RELEASED, RELEASED_GIB, TARGET_GIB, TARGET_RATIO = 893.8, 33.4, 8.0, 3.7

#: Warm-up steps before the first timed step.
WARM_UP = 8

FAST, PLAIN = Acceleration(), Acceleration("off", "off", "float32")
SERIES, ROULETTE = PowerSeries(terms=5), RussianRoulette(terms=3)


@dataclass(frozen=True)
class Case:
    """A flow, its estimator (None: without a log-determinant), and the acceleration of its steps."""

    preset: str
    batch: int
    estimator: Estimator | None = SERIES
    acceleration: Acceleration = FAST


@dataclass(frozen=True)
class Scale:
    """The size of the networks, the device, and the number of timed steps."""

    blocks: int
    width: int
    device: str
    steps: int


class WithoutDeterminant(Objective):
    """The negative log-density of the code alone: the cost of the flow without its log-determinant."""

    model: Flow

    def __init__(self, model: Flow, levels: int | None) -> None:
        super().__init__()
        self.model, self.levels = model, levels

    def forward(
        self,
        x: Tensor,
        y: Tensor | None = None,
        *,
        estimator: Estimator | None = None,
        generator: torch.Generator | None = None,
    ) -> Loss:
        x, _ = dequantise_for(self.model, x, self.levels, generator)
        with outermost_call(self.model, x):
            nats = -self.model.base.log_prob(self.model.transform(x)).mean()
        loss = nats / nats_per_unit(x.shape[1:], self.levels)
        return loss, {unit_name(self.levels): loss.detach()}


def prepare(case: Case, scale: Scale) -> tuple[Objective, Tensor]:
    """The objective of a case, and a batch of random images."""
    experiment, schema = presets.find(case.preset), schema_of("cifar10")
    torch.manual_seed(0)
    x = torch.randint(0, 256, (case.batch, *schema.shape), dtype=torch.uint8)
    network = replace(experiment.network, blocks=(scale.blocks,) * 3, width=scale.width)
    with defer_norms():
        model = cast(Flow, build(network, schema, "density", x)).to(scale.device)
    refresh_(model, settle=True)
    if case.estimator is None:
        return WithoutDeterminant(model, schema.levels).train(), x.to(scale.device)
    model.estimator = case.estimator
    return MaximumLikelihood(model, schema.levels).train(), x.to(scale.device)


def operations(case: Case, scale: Scale) -> float:
    """The TFLOPs of one step's matrix products and convolutions, forward and backward.

    They are counted eagerly for two images and one block per scale, without power iteration, whose cost does not grow
    with the batch.
    """
    objective, x = prepare(replace(case, batch=2), replace(scale, blocks=1))
    generator = torch.Generator(scale.device).manual_seed(0)
    objective(x, None, generator=generator)  # initialises ActNorms
    with (
        lip.freeze_norms(objective),
        planned(objective, torch.float32, compiled=False) as view,
        FlopCounterMode(display=False) as counter,
    ):
        view(x, None, generator=generator)[0].backward()
    return float(counter.get_total_flops() * scale.blocks * case.batch / 2 / 1e12)


def measure(case: Case, scale: Scale, profile: bool) -> dict[str, Any]:
    """Milliseconds per step: the median of five rounds, after the warm-up steps."""
    counted = operations(case, scale) if case.estimator is None or isinstance(case.estimator, PowerSeries) else None
    _clear(scale.device)
    start = time.perf_counter()
    objective, x = prepare(case, scale)
    training = replace(presets.find(case.preset).training, optimiser="adam")
    state = State(objective, training, torch.Generator(scale.device).manual_seed(0), case.acceleration)
    timed = range(WARM_UP, WARM_UP + scale.steps)  # the same in every round, so that a roulette draws the same terms
    for step in range(WARM_UP + (scale.steps if isinstance(case.estimator, RussianRoulette) else 0)):
        take(state, x, step)
    _wait(scale.device)
    setup, times = time.perf_counter() - start, []
    for _ in range(5):
        begin = time.perf_counter()
        for step in timed:
            take(state, x, step)
        _wait(scale.device)
        times.append(1e3 * (time.perf_counter() - begin) / scale.steps)
    if profile:
        print_profile(state, x, timed[0])
    cuda = scale.device == "cuda"
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    return {
        "network": case.preset, "blocks": 3 * scale.blocks, "batch": case.batch,
        "log-determinant": "none" if case.estimator is None else str(case.estimator),
        "mean terms": mean_terms(state, timed), "steps taken": str(state.engine), "precision": state.engine.precision,
        "ms": median(times),
        "spread ms": max(times) - min(times), "setup s": setup,
        "memory GiB": held() if cuda and state.engine.graph else peak, "peak GiB": peak,
        "operations": counted, "parameters": parameter_count(objective),
    }  # fmt: skip


def held() -> float:
    """GiB reserved by steps that run as one CUDA graph: weights, optimiser state and intermediate buffers.

    The peak counts all steps so far, and the first ones run eagerly in float32.
    """
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() / 2**30


def take(state: State, x: Tensor, step: int) -> None:
    """Run the training step with this number."""
    state.step = step
    state.advance(x)


def mean_terms(state: State, steps: range) -> float | None:
    """The mean number of terms that a roulette draws in these steps; None for other estimators."""
    counts = []
    for state.step in steps:
        drawn = state.draw_terms()
        counts += [] if drawn is None else [drawn.count]
    return mean(counts) if counts else None


def print_profile(state: State, x: Tensor, step: int, rows: int = 30) -> None:
    """Print the kernels in which one step spends most of its time."""
    kind = torch.profiler.ProfilerActivity.CUDA if x.is_cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profiler:
        take(state, x, step)
        _wait(x.device.type)
    name = "self_device_time_total" if x.is_cuda else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda e: getattr(e, name), reverse=True)
    whole = sum(getattr(e, name) for e in events)
    print(f"{whole / 1e3:9.3f} ms in {sum(e.count for e in events)} kernels of {len(events)} kinds")
    for e in events[:rows]:
        print(f"{getattr(e, name) / 1e3:9.3f} ms {e.count:6d} x {getattr(e, name) / e.count:8.1f} us  {e.key[:110]}")


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _clear(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def cases(batch: int, eager: bool) -> list[Case]:
    """The cases to measure, the most important first."""
    first, second = TARGETS
    found = [Case(first, batch), Case(first, batch, None), Case(first, batch, ROULETTE)]
    found += [Case(second, batch), Case(second, batch, None), Case(first, 2 * batch)]
    return found + ([Case(first, batch, SERIES, PLAIN)] if eager else [])


def compared(row: dict[str, Any], without: dict[str, Any]) -> dict[str, Any]:
    """A row with its ratios to the row of the same flow without a log-determinant."""
    return row | {
        "target ms": TARGETS[row["network"]], "target GiB": TARGET_GIB, "target ratio": TARGET_RATIO,
        "with log-det / without": row["ms"] / without["ms"],
        "operations with / without": row["operations"] / without["operations"],
        "TFLOP/s": 1e3 * row["operations"] / row["ms"],
    }  # fmt: skip


def main() -> None:
    """Measure the cases, print them, and write results/flow.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", type=int, default=16, help="blocks per scale")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20, help="steps in each of five rounds")
    parser.add_argument("--seconds", type=float, default=300.0, help="start no case after this time")
    parser.add_argument("--cases", type=int, nargs="*", help="run only these cases, numbered from 0 in the order above")
    parser.add_argument("--eager", action="store_true", help="also measure an eager step")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one step of each case")
    options = parser.parse_args()
    if options.out:
        require_commit(options.out)
    scale = Scale(options.blocks, options.width, options.device, options.steps)
    start, rows = time.perf_counter(), list[dict[str, Any]]()
    chosen = cases(options.batch, options.eager)
    for case in chosen if options.cases is None else [chosen[i] for i in options.cases]:
        if time.perf_counter() - start > options.seconds:
            print(f"skipped, no time left: {case}")
            continue
        row = measure(case, scale, options.profile)
        if case.estimator is None and rows and rows[-1]["network"] == case.preset:
            rows[-1] = compared(rows[-1], row)
        if case == Case("cifar10-flow", options.batch):
            row |= {"released code ms": RELEASED, "released code GiB": RELEASED_GIB}
        rows.append(row)
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    if options.profile:
        for what, ways, times in timing.MEASURED:
            print(what, ", ".join(f"{way}: {t:.1f} us" for way, t in zip(ways, times, strict=True)), sep=": ")
    for row in rows:
        if "with log-det / without" in row:
            with_, counted = row["with log-det / without"], row["operations with / without"]
            print(f"{row['network']}: with log-det / without {with_:.3f}; operations {counted:.3f}; {row['ms']:.2f} ms")
    if options.out:
        run = provenance(seeds=[0], seconds=time.perf_counter() - start, precision=rows[0]["precision"])
        print(write(Results("flow", [row | {"run": 0} for row in rows], [run]), options.out))


if __name__ == "__main__":
    main()
