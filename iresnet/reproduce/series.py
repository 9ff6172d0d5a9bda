"""Figures 4 and 9: the error of the log-determinant's estimator against the number of terms, for a trained flow.

Figure 4 shows the bias with a band of one standard deviation, for one image and one probe per block. Probes are random
signs; those of the paper's Algorithm 2 are Gaussian, and their deviation is in the file as well. Figure 9 shows the
same metrics on a logarithmic scale, with the bound of Theorem 3: how many terms are enough, and how many are proven to
be enough.

The paper compares with brute force on 1000 test examples of a dataset that it does not name; here it is MNIST, whose
784 dimensions allow dense Jacobians. The paper averages draws; here bias and variance are computed from the Jacobians,
without sampling noise. They are stored in the run folder, since both figures show them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..evaluate import Truncation, truncation
from ..logdet import terms_needed
from ..plots import SeriesLine, plot_bias, plot_convergence
from ..run import Run
from .cells import Cell
from .job import Work
from .record import Entry, cached
from .result import Measurement, budget_costs, columns, flow_plan, plot_each_dataset, trained_result

#: Test images by budget, and the largest number of terms. A Jacobian of MNIST takes a second on one core, and biases
#: differ little between images: their spread is given.
IMAGES, TERMS = {"smoke": 200, "short": 100, "paper": 1000}, 20

#: Sec. 3.3: terms for a bias below .001 bits per dimension; App. E, with the limits for its words used here.
PAPER = {"figure4": "5 to 10", "figure9": "negligible after 10, zero after 20"}
NEGLIGIBLE, ZERO = 1e-4, 1e-7


def truncation_of(work: Work, run: Run) -> Truncation:
    """Return the truncation error of the series on test images: stored in the run folder, or computed now."""
    images = work.images(run, IMAGES[work.job.budget])

    def compute() -> dict[str, Any]:
        work.say(f"{run.folder.name}: dense Jacobians of {len(images):,} test images")
        return asdict(truncation(work.model(run), images, terms=TERMS))

    size = len(images), TERMS
    known = cached(run, "truncation", compute, lambda t: bool(t) and (t["rows"], len(t["terms"])) == size)
    content: dict[str, Any] = {k: tuple(v) if isinstance(v, list | tuple) else v for k, v in known.items()}
    return Truncation(**content)


def terms_proven(run: Run, limit: float) -> int | None:
    """Return the terms that Theorem 3 requires in the worst block, for a total bias below `limit` bits/dim."""
    blocks = run.read_json("certificate.json").get("blocks", [])
    if not blocks or any(b["lipschitz"] is None or not b["lipschitz"] < 1 for b in blocks):
        return None
    share = limit * run.schema.dimension * math.log(2) / len(blocks)
    return max(terms_needed(b["lipschitz"], math.prod(b["input_shape"]), share) for b in blocks)


def _line(e: Entry) -> SeriesLine:
    d = e["details"]
    return SeriesLine(f"{e['dataset']} {e['model']}", d["terms"], d["bias"], d["deviation"], d["bound"])


def measure_bias(work: Work, run: Run, cell: Cell) -> Measurement:
    """Measure bias and standard deviation of the series on test images."""
    t = truncation_of(work, run)
    row = {
        "blocks": t.blocks,
        "images": t.rows,
        **{f"bias with {n} terms": t.bias[n - 1] for n in (5, 10, 20)},
        "deviation": t.deviation[-1],
        "Gaussian deviation": t.gaussian_deviation[-1],
        "terms to 1e-3": t.first_below(1e-3),
        "paper": cell.paper,
    }
    sentence = f"bias {t.bias[9]:.1e} bits/dim with 10 terms, deviation {t.deviation[9]:.1e} for one image"
    return row, asdict(t), sentence


def measure_convergence(work: Work, run: Run, cell: Cell) -> Measurement:
    """Measure from which number of terms on the bias is negligible, and numerically zero."""
    t = truncation_of(work, run)
    row = {
        "images": t.rows,
        "terms to 1e-4": t.first_below(NEGLIGIBLE),
        "terms to 1e-7": t.first_below(ZERO),
        "proven terms to 1e-4": terms_proven(run, NEGLIGIBLE),
        **{f"largest bias with {n} terms": t.largest_bias[n - 1] for n in (10, 20)},
        "paper": cell.paper,
    }
    proven = row["proven terms to 1e-4"]
    return row, asdict(t), f"bias below 1e-4 bits/dim from {row['terms to 1e-4']} terms on; proven from {proven}"


def _plot_each(name: str, plot: Callable[..., Path]) -> Any:
    def plot_entries(entries: Sequence[Entry], path: Path) -> Path:
        return plot([_line(e) for e in entries], path, images=entries[0]["row"]["images"])

    return plot_each_dataset(name, "mnist", plot_entries)


FIGURE4 = trained_result(
    flow_plan("figure4", "mnist", paper={"mnist": PAPER["figure4"]}),
    measure_bias,
    columns(
        *("dataset", "model", ("bias,\n5 terms", "bias with 5 terms"), ("10\nterms", "bias with 10 terms")),
        *(
            ("20\nterms", "bias with 20 terms"),
            ("devia-\ntion", "deviation"),
            ("terms\nto 1e-3", "terms to 1e-3"),
            "paper",
        ),
    ),
    about="bias and standard deviation of the log-determinant's estimator against the number of terms",
    says="5 to 10 terms give a bias below .001 bits/dim; the variance is that of the trace estimator",
    costs=budget_costs(
        "a flow on 8x8 digits: seconds",
        "mnist flow of table4, and 100 dense Jacobians per block: seconds each on one core",
        "mnist flow of table4, and minutes on a GPU for 1,000 dense Jacobians per block",
    ),
    notes=("bits per dimension, one probe per block; the mean over images has the deviation / sqrt(images)",),
    plots=_plot_each("figure4", plot_bias),
)
FIGURE9 = trained_result(
    flow_plan("figure9", "mnist", paper={"mnist": PAPER["figure9"]}),
    measure_convergence,
    columns(
        *("dataset", "model", ("terms\nto 1e-4", "terms to 1e-4"), ("to\n1e-7", "terms to 1e-7")),
        *(("proven\nto 1e-4", "proven terms to 1e-4"), ("largest,\n10 terms", "largest bias with 10 terms")),
        *(("20\nterms", "largest bias with 20 terms"), "paper"),
    ),
    about="convergence of the log-determinant's estimator with the number of terms, with the bound of Theorem 3",
    says="the bias is negligible after 10 terms and numerically 0 after 20, over 1000 test examples",
    costs=budget_costs("the flow of figure4: seconds", "nothing beyond figure4"),
    notes=("terms until the mean bias over the images stays below the limit, in bits/dim; largest: over the images",),
    plots=_plot_each("figure9", plot_convergence),
)
