"""Time the inverse of a deep chain at the paper's scale, every block's solve proven.

    python3 benchmarks/inverse.py --out results/inverse.json --device cuda
    python3 benchmarks/inverse.py --blocks 1 1 1 --images 4 --device cpu          a dry run
    python3 benchmarks/inverse.py --device cuda --weights random flat             both kinds of weights
    python3 benchmarks/inverse.py --device cuda --run FOLDER                      a trained model and its test images

The chain is that of `iresnet164`: 18 + 18 + 18 blocks on 16 x 32 x 32, 64 x 16 x 16 and 256 x 8 x 8, an ActNorm before
each, every layer at its coefficient of 0.9. `--weights random` scales random weights up until the constraint is active:
few singular values reach the coefficient. `--weights flat` brings nearly all of them there, the hardest case.
The Inverter is timed in three variants: the forward pass in float64 that gives the code residual also proves the blocks
("forward"); every block is proven by its own residual, with a code residual ("float64"); or without one ("none").
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections import Counter
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
from iresnet.branch import to_channels_last
from iresnet.cuda_graph import as_cuda_graph
from iresnet.fixed_point import ChainSolution
from iresnet.inverse import refinement
from iresnet.inverse.arithmetic import Arithmetic
from iresnet.inverse.inverter import Inverter
from iresnet.inverse.refinement import Schedule
from iresnet.lipschitz import defer_norms, refresh_
from iresnet.proof import sample_norms
from iresnet.results import Results, provenance, require_commit, write
from iresnet.transform import flat_steps, run_inverse

Row = dict[str, Any]

#: The proven l2 error of each block's solve, and the number of iterations in the released code.
TOLERANCE, PLAIN_ITERATIONS = 1e-5, 20


# ------------------------------------------------------------------------------------------------- chains


def build(blocks: Sequence[int], weights: str, images: Tensor) -> Chain:
    """A chain with every layer at its coefficient, ActNorms initialised on the images, and Lip(g) <= 0.9^3 proven."""
    chain: list[Transform] = [Standardise([0.5] * 3, [0.25] * 3), InjectivePad(13)]
    channels = 16
    with defer_norms():  # norms are measured once, on the device
        for scale, count in enumerate(blocks):
            if scale:
                chain.append(Squeeze())
                channels *= 4
            first = ResidualBlock(contractive_convnet(channels, channels, coefficient=0.9, preactivation=True))
            for _ in range(count):
                chain += [ActNorm(channels), copy.deepcopy(first)]
        model = Chain(*chain, ActNorm(channels)).to(images.device).eval()
    draw_(model, weights)
    with torch.no_grad():
        show_(model, images)
        refresh_(model, settle=True)
        tighten_(model, tuple(images.shape[1:]))
        show_(model, images)
    return model


@torch.no_grad()
def draw_(model: nn.Module, weights: str) -> None:
    """Draw weights whose norms are far above the coefficient."""
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


def show_(transform: Transform, x: Tensor) -> None:
    """Run the transform so that every layer records its input size and every ActNorm is initialised on its input."""
    stack = [x]
    for t in flat_steps(transform):
        if isinstance(t, Transform):
            if isinstance(t, ActNorm):
                t.initialise_(stack[-1])
            stack.append(t(stack.pop()))
        else:
            t.forward(stack)


def trained(folder: Path, images: int, device: str) -> tuple[Transform, Tensor]:
    """The transform of a run, and test images."""
    from iresnet.data.units import bin_centres
    from iresnet.run import Run

    run = Run.open(folder)
    data = run.splits().test
    x = bin_centres(data.x[:images], data.schema.levels).to(device)
    return run.model(device=device).transform, x


# ------------------------------------------------------------------------------------------------- timing


def milliseconds(function: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """The median time of a call, after one warm-up call."""
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
    """Milliseconds of one pass through all blocks, for each kind of computation."""
    codes, x = [], z.double()
    for part in inverter.parts:
        if part.branch is not None:
            codes.append((part.branch, to_channels_last(x)))
        x = part.transform.inverse(x) if part.branch is None else x - part.branch.exact(x)
    low = [(b, x.to(b.dtype), b.working.value_and_slopes(x.to(b.dtype))[1]) for b, x in codes]
    functions: dict[str, Callable[[], list[Any]]] = {
        "g": lambda: [x - b.working(x) for b, x, _ in low],
        "J": lambda: [x - b.working.jvp(x, s) for b, x, s in low],
        "float32 residual": lambda: [refinement.single_residual(b, x, x) for b, x in codes if b.single is not None],
        "float64 residual": lambda: [refinement.residual(b, x, x) for b, x in codes],
    }
    none = torch.zeros(1, device=z.device)
    with inverter.arithmetic.precision(z.device):
        ready = {name: partial(lambda f, _: tuple(f()[-1:]), f) for name, f in functions.items()}
        runs = {name: as_cuda_graph(f, none) if z.is_cuda else f for name, f in ready.items()}
        return {name: milliseconds(partial(f, none), z.device, 5) for name, f in runs.items()}


@torch.no_grad()
def iterate(transform: Transform, z: Tensor, iterations: int = PLAIN_ITERATIONS) -> Tensor:
    """The released code's inverse: a fixed number of plain iterations per block, nothing proven."""

    def act(t: Transform, code: Tensor) -> Tensor:
        if not isinstance(t, ResidualBlock):
            return t.inverse(code)
        x = code
        for _ in range(iterations):
            x = code - t.g(x)
        return x

    return run_inverse(list(flat_steps(transform)), z, act)


# ------------------------------------------------------------------------------------------------- reports


def describe(solution: ChainSolution, x: Tensor) -> dict[str, float]:
    """The error metrics of the worst image; a code residual only if it was computed."""
    numbers = {
        "proven": float(solution.converged.double().mean()),
        "largest block bound": float(solution.largest_block_bound.max()),
        "code residual": float(solution.code_residual.max()),
        "measured error": float(solution.measured_error(x).max()),
        "evaluations": float(solution.iterations.double().mean()),
    }
    return {name: number for name, number in numbers.items() if not math.isnan(number)}


def compare(transform: Chain, x: Tensor, z: Tensor, arithmetic: Arithmetic) -> list[Row]:
    """Compare the Inverter, `Chain.solve` and the released code's iterations."""
    begin = time.perf_counter()
    inverter = Inverter(transform, z, tolerance=TOLERANCE, arithmetic=arithmetic)
    setup = 1e3 * (time.perf_counter() - begin)
    if inverter.reason:
        raise RuntimeError(f"the chain must be one that can be accelerated; it is {inverter.reason}")
    print("schedules, last block first:", counted(inverter.schedules))
    print("convolutions:", {" ".join(map(str, k)): w.__name__ for k, w in inverter.builder.functions.items()})
    print("one pass, ms:", {k: round(v, 2) for k, v in phases(inverter, z).items()}, flush=True)
    blockwise = inverter.with_code("float64")
    blockwise.proves_forward = False
    ways = [*([inverter] if inverter.proves_forward else []), blockwise, inverter.with_code("none")]
    rows = [ours(way, x, z) | {"setup ms": setup} for way in ways]
    return [*rows, ordinary(inverter, x, z), plain(inverter, x, z)]


def counted(schedules: list[Schedule]) -> dict[str, int]:
    """The number of blocks with each schedule."""
    return dict(Counter(f"{s.coarse} {s.single} {s.refinements}" for s in schedules))


def ours(inverter: Inverter, x: Tensor, z: Tensor) -> Row:
    """Measure the accelerated inverse."""
    solution = inverter.solve(z)
    proof = "forward" if inverter.proves_forward else "block by block"
    row: Row = {"method": f"Inverter, proven {proof}, code residual: {inverter.arithmetic.code}"}
    row |= {"ms": milliseconds(partial(inverter.solve, z), z.device)} | describe(solution, x)
    print(row_line(row), flush=True)
    return row


def ordinary(inverter: Inverter, x: Tensor, z: Tensor) -> Row:
    """Measure `Chain.solve` with the same tolerance."""
    solutions: list[ChainSolution] = []
    solve = partial(inverter.transform.solve, z.double(), tolerance=TOLERANCE)
    ms = milliseconds(lambda: solutions.append(cast(ChainSolution, solve())), z.device, 1)
    row = {"method": "Chain.solve in float64", "ms": ms} | describe(solutions[0], x)
    print(row_line(row), flush=True)
    return row


def plain(inverter: Inverter, x: Tensor, z: Tensor) -> Row:
    """Measure the released code's iterations."""
    low = cast(Chain, copy.deepcopy(inverter.transform).float())
    with inverter.arithmetic.precision(z.device):
        ms = milliseconds(partial(iterate, low, z.float()), z.device, 3)
        found = iterate(low, z.float()).double()
    row: Row = {"method": f"{PLAIN_ITERATIONS} plain iterations in float32, nothing proven", "ms": ms}
    row |= {"code residual": float(sample_norms(inverter.transform.reference(found) - z.double()).max())}
    row |= {"measured error": float(sample_norms(found - x.double()).max())}
    print(row_line(row), flush=True)
    return row


def row_line(row: Row) -> str:
    """A row as one line of text."""
    return "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{v:<36}" for k, v in row.items())


def measure(options: argparse.Namespace, weights: str, arithmetic: Arithmetic) -> list[Row]:
    """All rows of one chain."""
    begin, device = time.perf_counter(), torch.device(options.device)
    torch.manual_seed(0)
    if options.run is None:
        images = torch.rand(options.images, 3, 32, 32).to(device)
        transform: Transform = build(options.blocks, weights, images)
    else:
        transform, images = trained(options.run, options.images, options.device)
    with torch.no_grad():
        z = transform.reference(images)
    print(f"chain with {weights} weights ready after {time.perf_counter() - begin:.1f} s", flush=True)
    common = {"images": len(images), "weights": weights, "run": 0}
    return [row | common for row in compare(cast(Chain, transform), images, z, arithmetic)]


def main() -> None:
    """Measure, print, and write the results file if --out is given."""
    parser = argparse.ArgumentParser(description="Time the proven inverse of a deep chain.")
    parser.add_argument("--out", type=Path, help="results file to write, NAME.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", type=int, nargs="+", default=[18, 18, 18])
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--weights", choices=["random", "flat"], nargs="+", default=["random"])
    parser.add_argument("--run", type=Path, help="folder of a trained model")
    parser.add_argument("--working", help="working precision: float16, bfloat16 or float32")
    parser.add_argument("--exact", help="float64 convolution: auto, native, im2col, im2col_by_row or shift_and_add")
    options = parser.parse_args()
    if options.out:
        require_commit(options.out.parent)
    begin, usual = time.perf_counter(), Arithmetic.on(torch.device(options.device))
    arithmetic = replace(usual, working=options.working or usual.working, exact=options.exact or usual.exact)
    names = options.weights if options.run is None else [options.run.name]
    rows = [row for weights in names for row in measure(options, weights, arithmetic)]
    if options.out:
        seconds = time.perf_counter() - begin
        run = provenance(seeds=[0], seconds=seconds, precision=f"{arithmetic.working} and float64")
        print(write(Results(options.out.stem, rows, [run]), options.out.parent))


if __name__ == "__main__":
    main()
