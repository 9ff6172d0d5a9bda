"""Time sampling from the paper's flows, every block's solve proven.

    python3 benchmarks/sampling.py --device cuda --out results/sampling.json
    python3 benchmarks/sampling.py --device cuda --run FOLDER                                  a trained flow
    python3 benchmarks/sampling.py --device cpu --blocks 1 --width 8 --samples 4               a dry run

For each preset: `Flow.sample`, whose first call prepares what later calls reuse; `Transform.solve`, which iterates each
block until it converges; and a fixed number of plain iterations per block in float32, with nothing proven. The weights
of a preset are random and scaled up until every layer reaches its coefficient; ActNorms are initialised on random
images. Distances are from the samples to the solution of `Transform.solve`, in units of a pixel's 256 levels.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from inverse import counted, draw_, iterate, milliseconds, row_line, show_
from torch import Tensor

from iresnet import Flow, Transform, tighten_
from iresnet.data.builtin import schema_of
from iresnet.fixed_point import ChainSolution
from iresnet.inverse import Inverter
from iresnet.lipschitz import defer_norms, refresh_, release_
from iresnet.models import build
from iresnet.precision import full_precision
from iresnet.presets import find
from iresnet.proof import sample_norms
from iresnet.results import Results, provenance, require_commit, write

Line = dict[str, Any]


# ------------------------------------------------------------------------------------------------- flows


def untrained(name: str, options: argparse.Namespace) -> Flow:
    """The flow of a preset with random weights, every layer at its coefficient and every bound proven."""
    experiment = find(name)
    network, schema = experiment.network, schema_of(experiment.data.source)
    if options.blocks:
        network = replace(network, blocks=(options.blocks,) * len(network.blocks))
    if options.width:
        network = replace(network, width=options.width, tail_width=options.width)
    with defer_norms():  # norms are measured once, on the device
        flow = cast(Flow, build(network, schema, "density")).to(options.device).eval()
    draw_(flow.transform, "random")
    images = 256 * torch.rand(64, *schema.shape, device=options.device)
    with torch.no_grad():
        show_(flow.transform, images)
        refresh_(flow.transform, settle=True)
        tighten_(flow.transform, schema.shape)
        show_(flow.transform, images)
    return flow


def trained(folder: Path, device: str) -> Flow:
    """The flow of a run."""
    from iresnet.evaluate import as_flow
    from iresnet.run import Run

    return as_flow(Run.open(folder).model(device=device))


# ------------------------------------------------------------------------------------------------- samplers


def proven(solution: ChainSolution) -> Line:
    """The proven metrics of the worst sample."""
    return {
        "proven": float(solution.converged.double().mean()),
        "largest block bound": float(solution.largest_block_bound.max()),
        "code residual": float(solution.code_residual.max()),
        "evaluations": float(solution.iterations.double().mean()),
    }


def ours(flow: Flow, z: Tensor, options: argparse.Namespace) -> tuple[Line, Tensor]:
    """Measure `Flow.sample`: the first call, and later calls."""
    draw = partial(flow.sample, (options.samples,), tolerance=options.tolerance)
    begin = time.perf_counter()
    draw()
    _wait(z)
    first, ms = time.perf_counter() - begin, milliseconds(draw, z.device, options.repeats)
    inverter = flow.decoder.inverter or Inverter(flow.transform, z, tolerance=options.tolerance)
    if inverter.reason:
        raise RuntimeError(f"the flow must be one that can be accelerated; it is {inverter.reason}")
    print("schedules, last block first:", counted(inverter.schedules), flush=True)
    whole = inverter.with_code("float64")
    solution = whole.solve(z)
    line: Line = {"method": "Flow.sample", "ms": ms, "first call s": first, "preparing s": flow.decoder.seconds}
    line |= {"ms with code residual": milliseconds(partial(whole.solve, z), z.device, options.repeats)}
    return line | proven(solution), solution.x


def ordinary(flow: Flow, z: Tensor, options: argparse.Namespace) -> tuple[Line, Tensor]:
    """Measure `Transform.solve` in float64, with the bounds cached by a first call."""
    transform = cast(Transform, release_(copy.deepcopy(flow.transform)).double())
    solve, solutions = partial(transform.solve, z.double(), tolerance=options.tolerance), list[ChainSolution]()
    ms = milliseconds(lambda: solutions.append(cast(ChainSolution, solve())), z.device, 1)
    return {"method": "Transform.solve in float64", "ms": ms} | proven(solutions[-1]), solutions[-1].x


def plain(flow: Flow, z: Tensor, iterations: int) -> tuple[Line, Tensor]:
    """Measure plain iterations in float32."""
    with full_precision(z), torch.no_grad():
        ms = milliseconds(partial(iterate, flow.transform, z.float(), iterations), z.device, 2)
        x = iterate(flow.transform, z.float(), iterations).double()
        residual = float(sample_norms(flow.transform.reference(x) - z.double()).max())
    name = f"{iterations} plain iterations in float32, nothing proven"
    return {"method": name, "ms": ms, "proven": 0.0, "code residual": residual}, x


def _wait(z: Tensor) -> None:
    if z.is_cuda:
        torch.cuda.synchronize(z.device)


# ------------------------------------------------------------------------------------------------- reports


def measure(name: str, flow: Flow, options: argparse.Namespace) -> list[Line]:
    """All rows of one flow."""
    z = flow.base.rsample(options.samples, torch.Generator(options.device).manual_seed(0)).detach()
    exact, found = ordinary(flow, z, options)
    pairs = [ours(flow, z, options), (exact, found), *(plain(flow, z, n) for n in options.iterations)]
    common = {"model": name, "samples": options.samples, "tolerance": options.tolerance, "run": 0}
    rows = [line | {"distance": float(sample_norms(x - found).max())} | common for line, x in pairs]
    for row in rows:
        print(row_line({k: v for k, v in row.items() if k != "run"}), flush=True)
    return rows


def main() -> None:
    """Measure, print, and write the results file if --out is given."""
    parser = argparse.ArgumentParser(description="Time the samples of flows, every block's solve proven.")
    parser.add_argument("--out", type=Path, help="results file to write, NAME.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--presets", nargs="+", default=["cifar10-flow", "mnist-flow"])
    parser.add_argument("--run", type=Path, nargs="+", help="folders of trained flows, instead of presets")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="l2 error of every block's solve")
    parser.add_argument("--iterations", type=int, nargs="+", default=[20, 50, 100], help="plain iterations")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--blocks", type=int, help="blocks per scale, instead of the preset's")
    parser.add_argument("--width", type=int, help="channels inside g, instead of the preset's")
    options = parser.parse_args()
    if options.out:
        require_commit(options.out.parent)
    begin, rows = time.perf_counter(), list[Line]()
    for name in options.run or options.presets:
        torch.manual_seed(0)
        flow = trained(name, options.device) if options.run else untrained(name, options)
        print(f"{name} ready after {time.perf_counter() - begin:.1f} s", flush=True)
        rows += measure(str(name), flow, options)
    if options.out:
        seconds = time.perf_counter() - begin
        run = provenance(seeds=[0], seconds=seconds, precision="float16, float32 and float64")
        print(write(Results(options.out.stem, rows, [run]), options.out.parent))


if __name__ == "__main__":
    main()
