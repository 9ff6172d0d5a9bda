"""Figures 4 and 9: the error of the log-determinant's estimator against the number of terms, for a trained flow.

Figure 4 has the bias with a band of one standard deviation, that of one image and one probe a block. Probes are of
signs; those of the paper's Algorithm 2 are Gaussian, and their deviation is in the file as well. Figure 9 shows how the
same figures converge, on a logarithmic scale, beside what Theorem 3 proves: how many terms are enough, and how many are
certain to be.

The paper compares with brute force on 1000 test examples and does not say of which set; here it is MNIST, whose 784
dimensions allow dense Jacobians. Where the paper averages draws, bias and variance are computed from the Jacobians, so
that neither has noise of its own. They are kept in the run folder, as both figures show them.
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
from .record import Entry, kept
from .result import Measured, costs, each, of_cells, of_flows

#: Test images by budget, the paper's last, and the numbers of terms that are tried. A Jacobian of MNIST takes a second
#: of a core, and biases differ little from image to image: their spread is given.
IMAGES, TERMS = {"smoke": 200, "short": 100, "paper": 1000}, 20

#: Sec. 3.3: so many terms give a bias below .001 bits per dimension; App. E, and what is taken for it here.
PAPER = {"figure4": "5 to 10", "figure9": "negligible after 10, zero after 20"}
NEGLIGIBLE, ZERO = 1e-4, 1e-7


def measured(work: Work, run: Run) -> Truncation:
    """What series are off by on test images: kept in the run folder, or made now."""
    images = work.images(run, IMAGES[work.job.budget])

    def made() -> dict[str, Any]:
        work.say(f"{run.folder.name}: dense Jacobians of {len(images):,} test images")
        return asdict(truncation(work.model(run), images, terms=TERMS))

    found = kept(run, "truncation", made, lambda t: bool(t) and (t["rows"], len(t["terms"])) == (len(images), TERMS))
    content: dict[str, Any] = {k: tuple(v) if isinstance(v, list | tuple) else v for k, v in found.items()}
    return Truncation(**content)


def terms_proven(run: Run, limit: float) -> int | None:
    """How many terms Theorem 3 asks for in the worst block, for a bias below so many bits per dimension in all."""
    blocks = run.read_json("certificate.json").get("blocks", [])
    if not blocks or any(b["lipschitz"] is None or not b["lipschitz"] < 1 for b in blocks):
        return None
    share = limit * run.schema.dimension * math.log(2) / len(blocks)
    return max(terms_needed(b["lipschitz"], math.prod(b["input_shape"]), share) for b in blocks)


def line(e: Entry) -> SeriesLine:
    """What a picture shows of one flow."""
    d = e["details"]
    return SeriesLine(f"{e['dataset']} {e['model']}", d["terms"], d["bias"], d["deviation"], d["bound"])


def bias(work: Work, run: Run, cell: Cell) -> Measured:
    """Bias and deviation of series on test images."""
    t = measured(work, run)
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


def convergence(work: Work, run: Run, cell: Cell) -> Measured:
    """From which number of terms on the bias is negligible, and from which on it is nothing."""
    t = measured(work, run)
    row = {
        "images": t.rows,
        "terms to 1e-4": t.first_below(NEGLIGIBLE),
        "terms to 1e-7": t.first_below(ZERO),
        "proven terms to 1e-4": terms_proven(run, NEGLIGIBLE),
        **{f"largest bias with {n} terms": t.largest_bias[n - 1] for n in (10, 20)},
        "paper": cell.paper,
    }
    proven = row["proven terms to 1e-4"]
    return row, asdict(t), f"bias below 1e-4 bits/dim from {row['terms to 1e-4']} terms on; proven from {proven} on"


def _picture(name: str, draw: Callable[..., Path]) -> Any:
    def drawn(entries: Sequence[Entry], path: Path) -> Path:
        return draw([line(e) for e in entries], path, images=entries[0]["row"]["images"])

    return each(name, "mnist", drawn)


FIGURE4 = of_cells(
    of_flows("figure4", "mnist", paper={"mnist": PAPER["figure4"]}),
    bias,
    {
        "data": "dataset",
        "model": "model",
        "bias,\n5 terms": "bias with 5 terms",
        "10\nterms": "bias with 10 terms",
        "20\nterms": "bias with 20 terms",
        "devia-\ntion": "deviation",
        "terms\nto 1e-3": "terms to 1e-3",
        "paper": "paper",
    },
    about="bias and standard deviation of the log-determinant's estimator against the number of terms",
    says="5 to 10 terms give a bias below .001 bits/dim; the variance is that of the trace estimator",
    costs=costs(
        "a flow on 8x8 digits: seconds",
        "mnist flow of table4, and 100 dense Jacobians a block: seconds of a core each",
        "mnist flow of table4, and minutes on a GPU for 1,000 dense Jacobians a block",
    ),
    notes=("bits per dimension, one probe a block; the mean over images has the deviation / sqrt(images)",),
    pictures=_picture("figure4", plot_bias),
)
FIGURE9 = of_cells(
    of_flows("figure9", "mnist", paper={"mnist": PAPER["figure9"]}),
    convergence,
    {
        "data": "dataset",
        "model": "model",
        "terms\nto 1e-4": "terms to 1e-4",
        "to\n1e-7": "terms to 1e-7",
        "proven\nto 1e-4": "proven terms to 1e-4",
        "largest,\n10 terms": "largest bias with 10 terms",
        "20\nterms": "largest bias with 20 terms",
        "paper": "paper",
    },
    about="convergence of the log-determinant's estimator with the number of terms, beside Theorem 3",
    says="the bias is negligible after 10 terms and numerically 0 after 20, over 1000 test examples",
    costs=costs("the flow of figure4: seconds", "what figure4 measured: nothing more"),
    notes=(
        "terms until the mean bias over the images stays below that, in bits per dimension; largest: over the images",
    ),
    pictures=_picture("figure9", plot_convergence),
)
