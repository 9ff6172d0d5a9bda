"""Run the toy demo over several seeds and write results/toy.json: `make bench`, or this file (six minutes)."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import mean, median, stdev

import torch

from iresnet import mlp_flow
from iresnet.demo import toy as demo
from iresnet.results import Results, provenance, require_commit, write
from iresnet.tree import parameter_count

SEEDS = (0, 1, 2)

#: Nats that a plain prototype reached in 60 s of training.
TARGETS = {"checkerboard": 3.80}


def main() -> None:
    """Train every density with every seed, and write one row per density."""
    parser = argparse.ArgumentParser(description="Run the toy demo over several seeds; write results/toy.json.")
    parser.add_argument("--steps", type=int, help="fewer training steps; the results are printed, not written")
    steps = parser.parse_args().steps
    if steps is None:
        require_commit("results")
    settings = demo.ToySettings()
    if steps is not None:
        settings = replace(settings, training=replace(settings.training, steps=steps))
    torch.set_num_threads(1)
    start, rows = time.perf_counter(), []
    for name in ("moons", "checkerboard"):
        results = []
        for seed in SEEDS:
            results.append(demo.run_density(name, settings, seed)[0])
            print(results[-1], flush=True)
        rows.append(
            {
                "density": name,
                "held-out nats": mean(r.nats for r in results),
                "spread": stdev(r.nats for r in results),
                "seeds": len(SEEDS),
                "floor": results[0].floor,
                "to beat": TARGETS.get(name),
                "Lip(g) <=": max(r.largest_lipschitz for r in results),
                "certified": all(r.certified for r in results),
                "inverse proven to, per block": max(r.largest_block_bound for r in results),
                "code residual": max(r.code_residual for r in results),
                "inverse error measured": max(r.measured_error for r in results),
                "training s, median": median(r.seconds for r in results),
                "run": 0,
            }
        )
    flow = mlp_flow(2, settings.blocks, (settings.width,) * settings.depth)
    run = provenance(
        seeds=SEEDS,
        seconds=time.perf_counter() - start,
        precision="float32",
        parameters=parameter_count(flow),
    )
    if steps is None:
        print(write(Results("toy", rows, [run | {"steps": settings.training.steps}])))


if __name__ == "__main__":
    main()
