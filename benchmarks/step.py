"""Time a training step of the paper's classifier, and the cost of its Lipschitz constraint.

    python3 benchmarks/step.py --out results                          on a GPU
    python3 benchmarks/step.py --blocks 1 1 1 --batch 4 --steps 2     a dry run on a CPU

Random images, SGD with momentum, forward + backward + clipping + optimiser, one power iteration per step. Measured are
the accelerated step, the same network without its constraint, twice the batch size, and with --eager the eager step.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from iresnet import presets
from iresnet.data.builtin import schema_of
from iresnet.gpu import Acceleration
from iresnet.lipschitz import defer_norms, refresh_
from iresnet.models import build
from iresnet.results import Results, provenance, require_commit, write
from iresnet.train import State
from iresnet.train.objective import Classification
from iresnet.tree import parameter_count

#: Milliseconds of the paper's released code on the same hardware; the target; the target ratio with / without the
#: constraint.
RELEASED, TARGET, TARGET_RATIO = 205.4, 8.0, 1.15

FAST, PLAIN = Acceleration(), Acceleration("off", "off", "float32")


@dataclass(frozen=True)
class Case:
    """A network, its batch size and the acceleration of its steps."""

    preset: str
    batch: int
    acceleration: Acceleration = FAST


def prepare(case: Case, blocks: list[int], device: str) -> tuple[State, Tensor, Tensor, int]:
    """The training of a case, a batch of random images and labels, and the number of parameters."""
    experiment, schema = presets.find(case.preset), schema_of("cifar10")
    torch.manual_seed(0)
    x = torch.randint(0, 256, (case.batch, *schema.shape), dtype=torch.uint8)
    y = torch.randint(0, 10, (case.batch,), device=device)
    with defer_norms():
        model = build(replace(experiment.network, blocks=tuple(blocks)), schema, "classification", x).to(device)
    refresh_(model, settle=True)
    objective = Classification(model, schema.levels).train()
    state = State(objective, experiment.training, torch.Generator(device).manual_seed(0), case.acceleration)
    return state, x.to(device), y, parameter_count(model)


def measure(case: Case, blocks: list[int], device: str, steps: int) -> dict[str, Any]:
    """Milliseconds per step: the median of five rounds, after eight warm-up steps."""
    start = time.perf_counter()
    state, x, y, parameters = prepare(case, blocks, device)
    for _ in range(8):
        state.advance(x, y)
    _wait(device)
    setup, times = time.perf_counter() - start, []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(steps):
            state.advance(x, y)
        _wait(device)
        times.append(1e3 * (time.perf_counter() - begin) / steps)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    return {
        "network": case.preset, "batch": case.batch, "steps taken": str(state.engine),
        "precision": state.engine.precision, "ms": median(times),
        "spread ms": max(times) - min(times), "setup s": setup, "memory GiB": memory, "parameters": parameters,
    }  # fmt: skip


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure all cases, print them, and write results/step.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", type=int, nargs=3, default=[18, 18, 18])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--eager", action="store_true", help="also measure an eager step")
    options = parser.parse_args()
    if options.out:
        require_commit(options.out)
    cases = [Case("iresnet164", options.batch), Case("vanilla164", options.batch)]
    cases += [Case("iresnet164", 2 * options.batch)]
    cases += [Case("iresnet164", options.batch, PLAIN)] if options.eager else []
    start, rows = time.perf_counter(), []
    for case in cases:
        if options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        rows.append(measure(case, options.blocks, options.device, options.steps))
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    rows[0] |= {
        "released code ms": RELEASED, "target ms": TARGET, "target ratio": TARGET_RATIO,
        "with constraint / without": rows[0]["ms"] / rows[1]["ms"],
    }  # fmt: skip
    print(f"with the constraint / without it: {rows[0]['with constraint / without']:.3f}")
    if options.out:
        run = provenance(seeds=[0], seconds=time.perf_counter() - start, precision=rows[0]["precision"])
        print(write(Results("step", [row | {"run": 0} for row in rows], [run]), options.out))


if __name__ == "__main__":
    main()
