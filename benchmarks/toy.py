"""Repeat the demonstration over seeds and write results/toy.json: `make bench`, or this file (six minutes a core)."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import mean, median, stdev

import torch

from iresnet import mlp_flow
from iresnet.demo import toy as demo
from iresnet.results import Results, provenance, write

SEEDS = (0, 1, 2)

#: What a plain prototype reached in 60 s of training: the figure to beat.
TARGETS = {"checkerboard": 3.80}


def main() -> None:
    """Train every density with every seed; one row a density."""
    parser = argparse.ArgumentParser(description="Repeat the demonstration over seeds; write results/toy.json.")
    parser.add_argument("--steps", type=int, help="fewer training steps: printed and not written")
    steps = parser.parse_args().steps
    settings = demo.ToySettings()
    if steps is not None:
        settings = replace(settings, training=replace(settings.training, steps=steps))
    torch.set_num_threads(1)
    start, rows = time.perf_counter(), []
    for name in ("moons", "checkerboard"):
        outcomes = []
        for seed in SEEDS:
            outcomes.append(demo.run_density(name, settings, seed)[0])
            print(outcomes[-1], flush=True)
        rows.append(
            {
                "density": name,
                "held-out nats": mean(o.nats for o in outcomes),
                "spread": stdev(o.nats for o in outcomes),
                "seeds": len(SEEDS),
                "floor": outcomes[0].floor,
                "to beat": TARGETS.get(name),
                "Lip(g) <=": max(o.largest_lipschitz for o in outcomes),
                "certified": all(o.certified for o in outcomes),
                "inverse proven to, per block": max(o.largest_block_bound for o in outcomes),
                "code residual": max(o.code_residual for o in outcomes),
                "inverse error measured": max(o.measured_error for o in outcomes),
                "training s, median": median(o.seconds for o in outcomes),
                "run": 0,
            }
        )
    flow = mlp_flow(2, settings.blocks, (settings.width,) * settings.depth)
    run = provenance(
        seeds=SEEDS,
        seconds=time.perf_counter() - start,
        precision="float32",
        parameters=sum(p.numel() for p in flow.parameters()),
    )
    if steps is None:
        print(write(Results("toy", rows, [run | {"steps": settings.training.steps}])))


if __name__ == "__main__":
    main()
