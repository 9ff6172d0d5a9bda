"""Run the demo over several seeds, compare it with baselines, and write results/demo.json.

python benchmarks/demo.py [--steps N]     fifteen minutes on one core; needs zuko (pip install '.[bench]')
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from digit_baselines import PLAIN, TUNED, mixture_bits, spline_bits, svm_error

from iresnet import data
from iresnet.demo import digits
from iresnet.results import Results, provenance, require_commit, write

SEEDS = (0, 1, 2)


def main() -> None:
    """Run every seed, then the baselines; print the rows, and write them unless --steps shortened the training."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, help="fewer training steps; the results are printed, not written")
    steps = parser.parse_args().steps
    if steps is None:
        require_commit("results")
    torch.set_num_threads(1)
    start, results, seconds = time.perf_counter(), [], []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            result = digits.run(Path(folder) / "run", digits.experiment(seed, steps))
            assert result is not None
            seconds.append(time.perf_counter() - began)
            results.append(result)
        print(seed, result.error, result.density, result.inverse, result.changed, f"{seconds[-1]:.0f} s", flush=True)
    ours = time.perf_counter() - start
    rows = claims(results, seconds) + anomalies(results)
    settings = digits.experiment()
    first = provenance(seeds=SEEDS, seconds=ours, parameters=parameters()) | {"steps": settings.training.steps}
    start = time.perf_counter()
    rows += baselines(results)
    second = provenance(seeds=SEEDS, seconds=time.perf_counter() - start)
    for row in rows:
        print(row)
    if steps is None:
        print(write(Results("demo", rows, [first, second])))


def claims(results: list[digits.DigitsResult], seconds: list[float]) -> list[dict[str, Any]]:
    """What the demo claims of its one network, with the target of each metric."""
    errors, bits = [r.error.value for r in results], [r.density.value for r in results]
    worst = max(results, key=lambda r: r.error.wrong).error
    inverses = [r.inverse for r in results]
    proven, images = sum(i.proven for i in inverses), sum(i.rows for i in inverses)
    blocks = [b for r in results for b in r.certificate.blocks]
    wrong = ", ".join(str(r.error.wrong) for r in results)
    entries = [
        ("classifies", "test error %", mean(errors), stdev(errors), "<= 2.0",
         f"{wrong} of 360; worst seed: 95 % interval {worst.low:.2f} to {worst.high:.2f} %"),
        ("gives likelihoods", "bits/dim, 17 levels", mean(bits), stdev(bits), "<= 2.32",
         f"standard error over test images {results[0].density.standard_error:.3f}, of the estimator "
         f"{max(r.density.estimator_error for r in results):.4f}"),
        ("is inverted", "measured error, worst image", max(i.measured_error for i in inverses), None, "< 1e-5",
         f"l2 in grey levels, {inverses[0].precision}"),
        ("is inverted", "largest block bound", max(i.largest_block_bound for i in inverses), None, None,
         f"{proven} of {images} images, every block's solve proven"),
        ("is inverted", "code residual", max(i.code_residual for i in inverses), None, None, "evaluated in float64"),
        ("is inverted", "composed bound", max(i.composed_bound for i in inverses), None, None, "end to end, proven"),
        ("is certified", "blocks proven contractive", sum(b.passed for b in blocks), None, f"{len(blocks)}",
         f"of {len(blocks)}; largest Lip(g) <= {max(b.lipschitz for b in blocks):.4f}"),
        ("is certified", "test images changed by tightening", max(r.changed for r in results), None, "<= 1",
         f"worst seed; layers tightened: {', '.join(str(r.tightened) for r in results)}"),
        ("is quick", "seconds, training to report", median(seconds), None, "< 300",
         f"median; training alone {median(r.seconds for r in results):.0f} s, one thread"),
    ]  # fmt: skip
    keys = ("claim", "figure", "value", "spread", "target", "remark")
    return [{"table": "claims"} | dict(zip(keys, e, strict=True)) | {"seeds": len(SEEDS), "run": 0} for e in entries]


def anomalies(results: list[digits.DigitsResult]) -> list[dict[str, Any]]:
    """How often a corrupted test image gets a lower likelihood than a real one."""
    rows = []
    for i, entry in enumerate(results[0].anomalies):
        found = [100 * r.anomalies[i]["detection"] for r in results]
        row = {"table": "anomalies", "corruption": entry["name"]}
        row |= {"less likely than a real image, % of pairs": mean(found), "spread": stdev(found)}
        row |= {"median anomaly": mean(r.anomalies[i]["median_anomaly"] for r in results)}
        rows.append(row | {"seeds": len(SEEDS), "run": 0})
    return rows


def baselines(results: list[digits.DigitsResult]) -> list[dict[str, Any]]:
    """The i-ResNet and the baselines on the same test images, in one table."""
    splits = data.load(digits.experiment().data)
    budget = median(r.seconds for r in results)
    error, svm = svm_error(splits)
    bits, mixture = mixture_bits(splits)
    tuned, plain = ([spline_bits(splits, budget, seed, s)[0] for seed in SEEDS] for s in (TUNED, PLAIN))
    errors, ours = [r.error.value for r in results], [r.density.value for r in results]
    given = f"{budget:.0f} s of training"
    entries = [
        ("i-ResNet hybrid, one network", mean(errors), mean(ours), stdev(ours), len(SEEDS), given, 0),
        ("zuko spline flow, tuned, same shifts", None, mean(tuned), stdev(tuned), len(SEEDS), given, 1),
        ("zuko spline flow, near its defaults", None, mean(plain), stdev(plain), len(SEEDS), given, 1),
        ("mixture of full Gaussians", None, bits, None, 1, mixture, 1),
        ("RBF support vector machine", error, None, None, 1, svm, 1),
    ]
    keys = ("model", "test error %", "bits/dim", "spread", "seeds", "remark", "run")
    return [{"table": "rivals"} | dict(zip(keys, e, strict=True)) for e in entries]


def parameters() -> int:
    """The number of parameters of the network."""
    from iresnet.models import build

    settings = digits.experiment()
    model = build(settings.network, data.load(settings.data).schema, settings.objective.kind)
    return sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    main()
