"""Repeat the main job over seeds, beside rivals that do one part of it each; write results/demo.json.

python benchmarks/demo.py [--steps N]     a quarter of an hour and a core; needs zuko (pip install '.[bench]')
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from digit_rivals import PLAIN, TUNED, mixture_bits, spline_bits, svm_error

from iresnet import data
from iresnet.demo import digits
from iresnet.results import Results, provenance, write

SEEDS = (0, 1, 2)


def main() -> None:
    """Run every seed, then the rivals; print what is found, and write it unless the run was shortened."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, help="fewer training steps: printed and not written")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    start, outcomes, seconds = time.perf_counter(), [], []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            outcome = digits.run(Path(folder) / "run", digits.experiment(seed, steps))
            assert outcome is not None
            seconds.append(time.perf_counter() - began)
            outcomes.append(outcome)
        print(
            seed, outcome.error, outcome.density, outcome.inverse, outcome.changed, f"{seconds[-1]:.0f} s", flush=True
        )
    ours = time.perf_counter() - start
    rows = claims(outcomes, seconds) + anomalies(outcomes)
    settings = digits.experiment()
    first = provenance(seeds=SEEDS, seconds=ours, parameters=parameters()) | {"steps": settings.training.steps}
    start = time.perf_counter()
    rows += rivals(outcomes)
    second = provenance(seeds=SEEDS, seconds=time.perf_counter() - start)
    for row in rows:
        print(row)
    if steps is None:
        print(write(Results("demo", rows, [first, second])))


def claims(outcomes: list[digits.DigitsResult], seconds: list[float]) -> list[dict[str, Any]]:
    """What the issue asks of the one network, beside its target."""
    errors, bits = [o.error.value for o in outcomes], [o.density.value for o in outcomes]
    worst = max(outcomes, key=lambda o: o.error.wrong).error
    inverses = [o.inverse for o in outcomes]
    proven, images = sum(i.proven for i in inverses), sum(i.rows for i in inverses)
    blocks = [b for o in outcomes for b in o.certificate.blocks]
    wrong = ", ".join(str(o.error.wrong) for o in outcomes)
    entries = [
        ("classifies", "test error %", mean(errors), stdev(errors), "<= 2.0",
         f"{wrong} of 360; worst seed: 95 % interval {worst.low:.2f} to {worst.high:.2f} %"),
        ("gives likelihoods", "bits/dim, 17 levels", mean(bits), stdev(bits), "<= 2.32",
         f"standard error over test images {outcomes[0].density.standard_error:.3f}, of the estimator "
         f"{max(o.density.estimator_error for o in outcomes):.4f}"),
        ("is inverted", "measured error, worst image", max(i.measured_error for i in inverses), None, "< 1e-5",
         f"l2 in grey levels, {inverses[0].precision}"),
        ("is inverted", "largest block bound", max(i.largest_block_bound for i in inverses), None, None,
         f"{proven} of {images} images, every block's solve proven"),
        ("is inverted", "code residual", max(i.code_residual for i in inverses), None, None, "evaluated in float64"),
        ("is inverted", "composed bound", max(i.composed_bound for i in inverses), None, None, "end to end, proven"),
        ("is certified", "blocks proven contractive", sum(b.passed for b in blocks), None, f"{len(blocks)}",
         f"of {len(blocks)}; largest Lip(g) <= {max(b.lipschitz for b in blocks):.4f}"),
        ("is certified", "test images changed by tightening", max(o.changed for o in outcomes), None, "<= 1",
         f"worst seed; layers tightened: {', '.join(str(o.tightened) for o in outcomes)}"),
        ("is quick", "seconds, training to report", median(seconds), None, "< 300",
         f"median; training alone {median(o.seconds for o in outcomes):.0f} s, one thread"),
    ]  # fmt: skip
    keys = ("claim", "figure", "value", "spread", "target", "remark")
    return [{"table": "claims"} | dict(zip(keys, e, strict=True)) | {"seeds": len(SEEDS), "run": 0} for e in entries]


def anomalies(outcomes: list[digits.DigitsResult]) -> list[dict[str, Any]]:
    """How often a corrupted test image is less likely than a real one."""
    rows = []
    for i, entry in enumerate(outcomes[0].anomalies):
        found = [100 * o.anomalies[i]["detection"] for o in outcomes]
        row = {"table": "anomalies", "corruption": entry["name"]}
        row |= {"less likely than a real image, % of pairs": mean(found), "spread": stdev(found)}
        row |= {"median anomaly": mean(o.anomalies[i]["median_anomaly"] for o in outcomes)}
        rows.append(row | {"seeds": len(SEEDS), "run": 0})
    return rows


def rivals(outcomes: list[digits.DigitsResult]) -> list[dict[str, Any]]:
    """Ours and the rivals on the same test images, in one table."""
    splits = data.load(digits.experiment().data)
    budget = median(o.seconds for o in outcomes)
    error, svm = svm_error(splits)
    bits, mixture = mixture_bits(splits)
    tuned, plain = ([spline_bits(splits, budget, seed, s)[0] for seed in SEEDS] for s in (TUNED, PLAIN))
    errors, ours = [o.error.value for o in outcomes], [o.density.value for o in outcomes]
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
    """Parameters of the network."""
    from iresnet.models import build

    settings = digits.experiment()
    model = build(settings.network, data.load(settings.data).schema, settings.objective.kind)
    return sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    main()
