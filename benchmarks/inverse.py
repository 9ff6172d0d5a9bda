"""The inverse of a deep chain at the paper's scale: proven block by block, and timed.

    python3 benchmarks/inverse.py --out results/inverse.json --device cuda
    python3 benchmarks/inverse.py --blocks 1 1 1 --images 4 --device cpu          a rehearsal
    python3 benchmarks/inverse.py --device cuda --sweep                           variants beside each other

The chain is that of `iresnet164`: 18 + 18 + 18 blocks on 16 x 32 x 32, 64 x 16 x 16 and 256 x 8 x 8, an ActNorm before
each, every layer at its coefficient of 0.9. `--weights random` scales random weights up until the constraint bites: few
singular values are at the coefficient. `--weights flat` has nearly all of them there, the hardest case. `--run FOLDER`
takes a trained model and its test images instead.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn

from iresnet import (
    ActNorm,
    Chain,
    InjectivePad,
    ResidualBlock,
    Squeeze,
    Standardise,
    Transform,
    contractive_convnet,
    tighten_,
)
from iresnet.acceleration import refinement
from iresnet.acceleration.arithmetic import Arithmetic, captured
from iresnet.acceleration.convolution import CONVOLUTIONS
from iresnet.acceleration.inverse import Inverter
from iresnet.acceleration.refinement import Schedule
from iresnet.lipschitz import refresh_
from iresnet.results import Results, circumstances, write
from iresnet.transform import ChainSolution

Row = dict[str, Any]

#: Proven l2 error of every block's solve, and the iterations of the research code.
TOLERANCE, PLAIN_ITERATIONS = 1e-5, 20


# ------------------------------------------------------------------------------------------------- what is inverted


def build(blocks: Sequence[int], weights: str, images: Tensor) -> Chain:
    """The chain with every layer at its coefficient, ActNorms set by the images, Lip(g) <= 0.9^3 proven."""
    chain: list[Transform] = [Standardise([0.5] * 3, [0.25] * 3), InjectivePad(13)]
    channels = 16
    for scale, count in enumerate(blocks):
        if scale:
            chain.append(Squeeze())
            channels *= 4
        first = ResidualBlock(contractive_convnet(channels, channels, coefficient=0.9, preactivation=True))
        for _ in range(count):
            chain += [ActNorm(channels), copy.deepcopy(first)]
    model = Chain(*chain, ActNorm(channels)).to(images.device)
    for module in model.modules():  # `eval` would settle every layer on its own
        module.training = False
    draw_(model, weights)
    with torch.no_grad():
        show_(model, images)
        refresh_(model, settle=True)
        tighten_(model, tuple(images.shape[1:]))
        show_(model, images)
    return model


@torch.no_grad()
def draw_(model: nn.Module, weights: str) -> None:
    """Weights far above the coefficient."""
    for name, p in model.named_parameters():
        if name.endswith("original"):
            p.copy_(torch.randn_like(p))
            if weights == "flat":
                p.mul_(0.1 / p[0].numel() ** 0.5)
                p[:, :, p.shape[2] // 2, p.shape[3] // 2] += torch.linalg.qr(
                    torch.randn(len(p), len(p), device=p.device)
                )[0]
            p.mul_(5)
        elif name.endswith("bias"):
            p.copy_(0.1 * torch.randn_like(p))


def show_(model: Chain, x: Tensor) -> None:
    """Let every layer see its input and every ActNorm be set by it."""
    for t in model:
        if isinstance(t, ActNorm):
            t.initialise_(x)
        x = t(x)


def trained(folder: Path, images: int, device: str) -> tuple[Transform, Tensor]:
    """The transform of a run and test images."""
    from iresnet.objective import centred
    from iresnet.run import Run

    run = Run.open(folder)
    data = run.splits().test
    x = centred(data.x[:images], data.schema.levels).to(device)
    return cast(Transform, cast(Any, run.model(device=device)).transform), x


# ------------------------------------------------------------------------------------------------- timing


def milliseconds(function: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """The median time of a call, after one that does not count."""
    times: list[float] = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            start, end = (cast(Any, torch.cuda.Event)(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            function()
            times.append(1e3 * (time.perf_counter() - begin))
    return median(times[1:])


@torch.no_grad()
def phases(inverter: Inverter, z: Tensor) -> dict[str, float]:
    """Milliseconds of one pass through all blocks: g in the working precision, its Jacobian, g in float64."""
    codes, x = [], z.double()
    for part in inverter.parts:
        if part.branch is not None:
            codes.append((part.branch, x))
        x = part.transform.inverse(x) if part.branch is None else x - part.branch(x)
    codes = [(b, x.contiguous(memory_format=torch.channels_last)) for b, x in codes]
    compiled = inverter.arithmetic.compiled
    low = [(b, x.to(b.dtype), refinement.traced(b.program, x.to(b.dtype), b.working)[1]) for b, x in codes]

    def working(_: Tensor) -> tuple[Tensor, ...]:
        return tuple([refinement.plain_step(b.program, compiled)(x, x, b.working) for b, x, _ in low][-1:])

    def jacobian(_: Tensor) -> tuple[Tensor, ...]:
        return tuple([refinement.series_step(b.program, compiled)(x, x, b.working, s) for b, x, s in low][-1:])

    def exact(_: Tensor) -> tuple[Tensor, ...]:
        return tuple([refinement.residual(b, x, x) for b, x in codes][-1:])

    device, none = z.device, torch.zeros(1, device=z.device)
    with inverter.arithmetic.precision(device):
        functions = {"g": working, "Jacobian": jacobian, "float64 residual": exact}
        ready = {name: captured(f, none) if z.is_cuda else f for name, f in functions.items()}
        return {name: milliseconds(partial(f, none), device, 5) for name, f in ready.items()}


@torch.no_grad()
def research(transform: Chain, z: Tensor) -> Tensor:
    """The released code's way: so many plain iterations for every block in float32, nothing proven."""
    for t in reversed(list(transform)):
        if isinstance(t, ResidualBlock):
            x = z
            for _ in range(PLAIN_ITERATIONS):
                x = z - t.g(x)
            z = x
        else:
            z = t.inverse(z)
    return z


# ------------------------------------------------------------------------------------------------- reports


def describe(solution: ChainSolution, x: Tensor) -> dict[str, float]:
    """The numbers that belong together, of the worst image."""
    return {
        "proven": float(solution.converged.double().mean()),
        "largest block bound": float(solution.largest_block_bound.max()),
        "code residual": float(solution.code_residual.max()),
        "measured error": float(solution.measured_error(x).max()),
        "evaluations": float(solution.iterations.double().mean()),
    }


def compare(transform: Chain, x: Tensor, z: Tensor, arithmetic: Arithmetic) -> list[Row]:
    """Our inverse, `Chain.solve` and the research code's iterations, side by side."""
    begin = time.perf_counter()
    inverter = Inverter(transform, z, tolerance=TOLERANCE, arithmetic=arithmetic)
    setup = 1e3 * (time.perf_counter() - begin)
    if inverter.reason:
        raise RuntimeError(f"the chain must be one that is accelerated; it is {inverter.reason}")
    print("schedules, last block first:", [(s.coarse, *s.refinements) for s in inverter.schedules])
    print("float64 convolutions:", {str(k): w.__name__ for k, w in inverter.ways.items()})
    print("one pass, ms:", {k: round(v, 2) for k, v in phases(inverter, z).items()})
    rows = [{"method": "Inverter", "ms": milliseconds(partial(inverter.solve, z), z.device), "setup ms": setup}]
    rows[0] |= describe(inverter.solve(z), x)
    print(row_line(rows[0]), flush=True)
    inner = inverter.transform
    ordinary = partial(inner.solve, z.double(), tolerance=TOLERANCE)
    rows.append({"method": "Chain.solve in float64", "ms": milliseconds(ordinary, z.device, 1)})
    rows[1] |= describe(cast(ChainSolution, ordinary()), x)
    print(row_line(rows[1]), flush=True)
    plain = copy.deepcopy(inner).float()
    low = cast(Chain, plain)
    with inverter.arithmetic.precision(z.device):
        rows.append({"method": "20 plain iterations in float32, nothing proven"})
        rows[2]["ms"] = milliseconds(partial(research, low, z.float()), z.device, 3)
        found = research(low, z.float())
        residual = (inner.reference(found) - z.double()).flatten(1).norm(dim=1)
    rows[2] |= {"code residual": float(residual.max())}
    rows[2] |= {"measured error": float((found.double() - x.double()).flatten(1).norm(dim=1).max())}
    print(row_line(rows[2]), flush=True)
    return rows


def row_line(row: Row) -> str:
    """A row for the screen."""
    return "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{v:<36}" for k, v in row.items())


def sweep(transform: Chain, x: Tensor, z: Tensor) -> list[Row]:
    """Variants: ways to convolve, working precisions, with and without the compiler, fixed schedules."""
    cuda = z.is_cuda
    variants: list[tuple[Arithmetic, Schedule | None]] = [
        (Arithmetic("float16" if cuda else "float32", way), Schedule(6, (5,))) for way in CONVOLUTIONS
    ]
    precisions = ("float16", "bfloat16", "tf32", "float32") if cuda else ("float32", "bfloat16")
    variants += [(Arithmetic(p, "auto"), None) for p in precisions]
    if cuda:
        variants.append((Arithmetic("float16", "auto", compiled=True), None))
    shorter = [(n, r) for n in (4, 6, 8, 10, 12) for r in ((3,), (6,), (3, 2), (6, 3))]
    if cuda:
        variants += [(Arithmetic("float16", "auto"), Schedule(n, r)) for n, r in shorter]
    rows = []
    transform = cast(Chain, Inverter(transform, z, tolerance=TOLERANCE).transform)  # knows its bounds from here on
    for arithmetic, schedule in variants:
        begin = time.perf_counter()
        inverter = Inverter(transform, z, tolerance=TOLERANCE, arithmetic=arithmetic, schedule=schedule)
        name = f"{arithmetic.working} {arithmetic.exact}{' compiled' if arithmetic.compiled else ''}"
        plan = "calibrated" if schedule is None else f"{schedule.coarse} + {list(schedule.refinements)}"
        row: Row = {"method": f"{name}, {plan}", "setup ms": 1e3 * (time.perf_counter() - begin)}
        row |= {"ms": milliseconds(partial(inverter.attempt, z), z.device, 3)} | describe(inverter.attempt(z), x)
        if schedule is None or arithmetic.exact != "auto":
            row |= phases(inverter, z)
        rows.append(row)
        print(row_line(row), flush=True)
        del inverter
    return rows


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description="Time the proven inverse of a deep chain.")
    parser.add_argument("--out", type=Path, help="results file to write, NAME.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", type=int, nargs="+", default=[18, 18, 18])
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--weights", choices=["random", "flat"], default="random")
    parser.add_argument("--run", type=Path, help="folder of a trained model")
    parser.add_argument("--sweep", action="store_true", help="compare variants instead of methods")
    parser.add_argument("--working", help="working precision: float16, bfloat16, tf32 or float32")
    parser.add_argument("--compiled", action="store_true", help="let torch.compile join elementwise work")
    options = parser.parse_args()
    begin = time.perf_counter()
    torch.manual_seed(0)
    device = torch.device(options.device)
    if options.run is None:
        images = torch.rand(options.images, 3, 32, 32).to(device)
        transform: Transform = build(options.blocks, options.weights, images)
    else:
        transform, images = trained(options.run, options.images, options.device)
    with torch.no_grad():
        z = transform.reference(images)
    print(f"chain ready after {time.perf_counter() - begin:.1f} s", flush=True)
    chain = cast(Chain, transform)
    usual = Arithmetic.on(device)
    arithmetic = replace(usual, working=options.working or usual.working, compiled=options.compiled)
    rows = sweep(chain, images, z) if options.sweep else compare(chain, images, z, arithmetic)
    if options.out:
        seconds = time.perf_counter() - begin
        name = options.out.stem
        common = {"images": options.images, "weights": str(options.run or options.weights), "run": 0}
        run = circumstances(seeds=[0], seconds=seconds, precision=f"{arithmetic.working} and float64")
        print(write(Results(name, [row | common for row in rows], [run]), options.out.parent))


if __name__ == "__main__":
    main()
