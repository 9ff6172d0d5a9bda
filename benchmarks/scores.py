"""Measure how many images per second `iresnet score` scores on a CPU, and write results/scores.json.

    python3 benchmarks/scores.py                                                       three minutes on two cores
    python3 benchmarks/scores.py --images 3 --reference-draws 2 --out runs/scores      a dry run

The images are drawn from the shipped flow `mnist-flow-noise`, so nothing is downloaded. They are scored as the command
does, by `evaluate.log_likelihood`: at the default tolerance, and at twice and at half of its smallest value, as given
by --tolerance. Their ranks are compared with those of a reference, the mean of many more draws of noise and probes that
the scores do not use.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from iresnet.data import Dataset
from iresnet.evaluate import Tolerance, as_flow, log_likelihood, log_prob_draws, score_tolerance
from iresnet.evaluate.draws import Likelihoods
from iresnet.flow import LogProb
from iresnet.results import Results, provenance, require_commit, write
from iresnet.run import Run

Row = dict[str, Any]

#: The model, and the tolerances as multiples of the default.
MODEL, MULTIPLES = "mnist-flow-noise", (1.0, 2.0, 0.5)

#: The seeds of the samples and of the first draw of the reference; the draws of scores have the seeds 0 to 15.
SAMPLES_SEED, REFERENCE_SEED = 0, 1000


def draw_images(run: Run, model: nn.Module, count: int) -> Dataset:
    """Draw images of whole grey levels from the model."""
    generator = torch.Generator().manual_seed(SAMPLES_SEED)
    x = as_flow(model).sample((count,), generator=generator).detach()
    levels = run.schema.levels or 256
    return Dataset(x.floor().clamp(0, levels - 1).to(torch.uint8), None, run.schema)


@contextmanager
def counted_draws() -> Iterator[list[int]]:
    """Collect the numbers of draws that likelihoods in this context take, over all images."""
    call, counts = Likelihoods.__call__, list[int]()

    def counting(self: Likelihoods, data: Dataset) -> Tensor:
        counts.append(len(self.seeds) * len(data))
        return call(self, data)

    with patch.object(Likelihoods, "__call__", counting):
        yield counts


def timed_scores(model: nn.Module, data: Dataset, tolerance: Tolerance, threads: int) -> tuple[LogProb, float, float]:
    """Score images; return the scores, the seconds, and the draws per image."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with counted_draws() as counts:
            begun = time.perf_counter()
            scores = log_likelihood(model, data, tolerance=tolerance)
            seconds = time.perf_counter() - begun
    finally:
        torch.set_num_threads(before)
    return scores, seconds, sum(counts) / len(data)


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's rank correlation of values without ties.

    >>> rank_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 3.0, 2.0]))
    0.5
    """
    ranks = torch.stack([values.argsort().argsort().double() for values in (a, b)])
    return round(float(torch.corrcoef(ranks)[0, 1]), 6)


def describe_scores(scores: LogProb, reference: Tensor) -> Row:
    """Return the errors of the scores, in nats, and how well they rank the images."""
    errors, means = scores.standard_error, reference.mean(0)
    return {
        "standard error": float(errors.mean()),
        "largest standard error": float(errors.max()),
        "rank correlation": rank_correlation(scores.value, means),
        "spread of images": float(means.std()),
        "reference standard error": float((reference.std(0) / len(reference) ** 0.5).mean()),
    }


def measure(options: argparse.Namespace) -> list[Row]:
    """Score the same images at every tolerance, with every number of threads."""
    run = Run.open(MODEL)
    model = run.model(device="cpu")
    data, default = draw_images(run, model, options.images), score_tolerance(model, run.schema, run.reference())
    if default is None:
        raise RuntimeError(f"scores of {MODEL} must have a default tolerance; its likelihoods are exact.")
    print(f"{len(data)} images are drawn", flush=True)
    roulette = 4 * default.error  # as for the scores
    reference = log_prob_draws(
        model, data, options.reference_draws, seed=REFERENCE_SEED, shared=True, tolerance=roulette
    )
    print(f"the reference has {len(reference)} draws", flush=True)
    timed_scores(model, data.take(range(2)), default, 1)  # what is prepared once
    rows = []
    for multiple in MULTIPLES:
        tolerance = default if multiple == 1 else Tolerance(multiple * default.error)
        for threads in options.threads:
            scores, seconds, draws = timed_scores(model, data, tolerance, threads)
            row: Row = {"model": MODEL, "tolerance": "default" if multiple == 1 else f"{multiple:g} x default"}
            row |= {"nats": tolerance.error, "threads": threads, "images": len(data), "images/s": len(data) / seconds}
            row |= {"draws per image": draws, **describe_scores(scores, reference)}
            row |= {"reference draws": len(reference), "run": 0}
            print(row, flush=True)
            rows.append(row)
    return rows


def main() -> None:
    """Measure, and write OUT/scores.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--reference-draws", type=int, default=40)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    begun = time.perf_counter()
    require_commit(options.out)
    rows = measure(options)
    made = provenance(seeds=[SAMPLES_SEED], seconds=time.perf_counter() - begun)
    print(write(Results("scores", rows, [made]), options.out))


if __name__ == "__main__":
    main()
