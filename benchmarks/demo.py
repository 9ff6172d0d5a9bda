"""Run the demo over several seeds, compare it with baselines, and write results/demo.json.

python benchmarks/demo.py [--steps N] [--jobs N]     forty minutes on one core; needs zuko (pip install '.[bench]')

The spline flows are trained for the CPU time of the network that they are compared with: the hybrid, or the density
with learned noise, one thread each. So other work on the machine favours neither.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from digit_baselines import NOISY, PLAIN, TUNED, mixture_bits, spline_bits, svm_error

from iresnet import data, evaluate, run
from iresnet.demo import digits
from iresnet.presets import PRESETS, Experiment, with_overrides
from iresnet.results import Results, provenance, require_commit, write
from iresnet.tree import parameter_count

SEEDS = (0, 1, 2)

#: The hybrid with the log-determinants of whole Jacobians in training, and the density with learned noise.
EXACT = ("network.estimator=exact",)
DENSITY, LEARNED = "digits-density", ("network.dequantiser=32", "network.alpha=1e-5")


def main() -> None:
    """Run every seed, then the baselines; print the rows, and write them unless --steps shortened the training."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, help="fewer training steps; the results are printed, not written")
    parser.add_argument("--jobs", type=int, default=1, help="number of trainings that run in parallel, a core each")
    options = parser.parse_args()
    steps = options.steps
    if steps is None:
        require_commit("results")
    start = time.perf_counter()
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        shown, density, exact = (
            [pool.submit(task, seed, steps) for seed in seeds]
            for task, seeds in ((run_demo, SEEDS), (train_density, SEEDS), (train_exact, SEEDS[:1]))
        )
        results, seconds = zip(*(f.result() for f in shown), strict=True)
        rows = claims(results, seconds) + anomalies(results)
        settings = digits.experiment()
        first = provenance(seeds=SEEDS, seconds=time.perf_counter() - start, parameters=parameters(settings))
        first["steps"] = settings.training.steps
        start = time.perf_counter()
        more = [f.result() for f in exact], [f.result() for f in density]
        rows += baselines(results, *more, pool)
    second = provenance(seeds=SEEDS, seconds=time.perf_counter() - start)
    for row in rows:
        print(row)
    if steps is None:
        print(write(Results("demo", rows, [first, second])))


def run_demo(seed: int, steps: int | None) -> tuple[digits.DigitsResult, float]:
    """The demo with one seed, and its CPU seconds from training to report; so are those of its training."""
    wall, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        result = digits.run(Path(folder) / "run", digits.experiment(seed, steps))
    assert result is not None
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return replace(result, seconds=result.seconds * cpu / wall), cpu


def train_exact(seed: int, steps: int | None) -> tuple[float, float, float]:
    """Error, bits and CPU seconds of training of the hybrid with exact log-determinants."""
    return _train(with_overrides(digits.experiment(seed, steps), EXACT))


def train_density(seed: int, steps: int | None) -> tuple[float, float, float]:
    """The same of the density with learned noise; it has no classes, and its error is NaN."""
    changes = (*LEARNED, f"seed={seed}", *([] if steps is None else [f"training.steps={steps}"]))
    return _train(with_overrides(PRESETS[DENSITY], changes))


def _train(settings: Experiment) -> tuple[float, float, float]:
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        trained = run.start(settings, Path(folder) / "run")
        seconds = time.process_time() - began
        content = evaluate.evaluate(trained.run.model(), trained.run.splits().test)
    return content.get("error", {}).get("value", float("nan")), content["density"]["value"], seconds


def claims(results: Sequence[digits.DigitsResult], seconds: Sequence[float]) -> list[dict[str, Any]]:
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
        ("is quick", "CPU seconds, training to report", median(seconds), None, "< 300",
         f"median; training alone {median(r.seconds for r in results):.0f} s, one thread"),
    ]  # fmt: skip
    keys = ("claim", "figure", "value", "spread", "target", "remark")
    return [{"table": "claims"} | dict(zip(keys, e, strict=True)) | {"seeds": len(SEEDS), "run": 0} for e in entries]


def anomalies(results: Sequence[digits.DigitsResult]) -> list[dict[str, Any]]:
    """How often a corrupted test image gets a lower likelihood than a real one."""
    rows = []
    for i, entry in enumerate(results[0].anomalies):
        found = [100 * r.anomalies[i]["detection"] for r in results]
        row = {"table": "anomalies", "corruption": entry["name"]}
        row |= {"less likely than a real image, % of pairs": mean(found), "spread": stdev(found)}
        row |= {"median anomaly": mean(r.anomalies[i]["median_anomaly"] for r in results)}
        rows.append(row | {"seeds": len(SEEDS), "run": 0})
    return rows


def baselines(
    results: Sequence[digits.DigitsResult],
    exact: Sequence[tuple[float, float, float]],
    density: Sequence[tuple[float, float, float]],
    pool: ProcessPoolExecutor,
) -> list[dict[str, Any]]:
    """The i-ResNets and the baselines on the same test images, in one table."""
    splits = data.load(digits.experiment().data)
    times = [
        median(values) for values in ([r.seconds for r in results], *([d[2] for d in t] for t in (exact, density)))
    ]
    given = [f"{t:.0f} CPU s of training" for t in times]
    jobs = [
        [pool.submit(spline_bits, splits, times[i], seed, s) for seed in SEEDS]
        for s, i in ((TUNED, 0), (PLAIN, 0), (NOISY, 2))
    ]
    shifted, plain = (pool.submit(svm_error, splits, shifts=shifts) for shifts in (True, False))
    bits, mixture = mixture_bits(splits)
    tuned, default, noisy = ([f.result() for f in futures] for futures in jobs)
    errors = [r.error.value for r in results]
    entries = [
        ("i-ResNet hybrid, one network", errors, [r.density.value for r in results], given[0], 0),
        ("i-ResNet hybrid, exact log-determinants", [e[0] for e in exact], [e[1] for e in exact], given[1], 1),
        ("zuko spline flow, tuned, same shifts", None, tuned, given[0], 1),
        ("zuko spline flow, near its defaults", None, default, given[0], 1),
        ("i-ResNet density, learned noise", None, [d[1] for d in density], given[2], 1),
        ("zuko spline flow, tuned, learned noise", None, noisy, given[2], 1),
        ("mixture of full Gaussians", None, [bits], mixture, 1),
        ("RBF support vector machine, same shifts", [shifted.result()[0]], None, shifted.result()[1], 1),
        ("RBF support vector machine", [plain.result()[0]], None, plain.result()[1], 1),
    ]  # fmt: skip
    return [_row(*entry) for entry in entries]


def _row(
    model: str, errors: Sequence[float] | None, bits: Sequence[float] | None, remark: str, run: int
) -> dict[str, Any]:
    def over_seeds(summarise: Callable[[Sequence[float]], float], values: Sequence[float] | None) -> float | None:
        enough = values is not None and len(values) > (summarise is stdev)
        return summarise(values) if enough and values is not None else None

    row = {"table": "rivals", "model": model, "test error %": over_seeds(mean, errors)}
    row |= {"bits/dim": over_seeds(mean, bits), "spread": over_seeds(stdev, bits)}
    return row | {"seeds": len(errors or bits or ()), "remark": remark, "run": run}


def parameters(settings: Experiment) -> int:
    """The number of parameters of a network."""
    from iresnet.models import build

    model = build(settings.network, data.load(settings.data).schema, settings.objective.kind)
    return parameter_count(model)


if __name__ == "__main__":
    main()
