"""Figure 4: bias and standard deviation of the log-determinant's estimator against the number of terms.

The picture has the bias with a band of one standard deviation, that of one image and one probe a block. Probes are of
signs; those of the paper's Algorithm 2 are Gaussian, and their deviation is in the file as well.
"""

from __future__ import annotations

from dataclasses import asdict

from ..figures import bias_picture
from ..run import Run
from .cells import Cell
from .job import Work
from .result import Measured, Outcome, Result
from .series import Flows, drawn, measured

#: Sec. 3.3: so many terms give a bias below .001 bits per dimension.
PAPER = "5 to 10"
PLAN = Flows("figure4", models={"mnist": ("flow",)}, smoke=("flow",))
COLUMNS = {
    "data": "dataset",
    "model": "model",
    "bias,\n5 terms": "bias with 5 terms",
    "10\nterms": "bias with 10 terms",
    "20\nterms": "bias with 20 terms",
    "devia-\ntion": "deviation",
    "terms\nto 1e-3": "terms to 1e-3",
    "paper": "paper",
}


def measure(work: Work, run: Run, cell: Cell) -> Measured:
    """Bias and deviation of series on test images."""
    t = measured(work, run)
    row = {
        "blocks": t.blocks,
        "images": t.rows,
        **{f"bias with {n} terms": t.bias[n - 1] for n in (5, 10, 20)},
        "deviation": t.deviation[-1],
        "Gaussian deviation": t.gaussian_deviation[-1],
        "terms to 1e-3": t.first_below(1e-3),
        "paper": PAPER if cell.dataset == "mnist" else None,
    }
    sentence = f"bias {t.bias[9]:.1e} bits/dim with 10 terms, deviation {t.deviation[9]:.1e} for one image"
    return row, asdict(t), sentence


def run(work: Work) -> Outcome:
    """Measure the flows, and draw bias and deviation."""
    return drawn(
        work,
        PLAN,
        measure,
        bias_picture,
        COLUMNS,
        "bits per dimension, one probe a block; the mean over images has the deviation / sqrt(images)",
    )


RESULT = Result(
    name="figure4",
    about="bias and standard deviation of the log-determinant's estimator against the number of terms",
    says="5 to 10 terms give a bias below .001 bits/dim; the variance is that of the trace estimator",
    costs={
        "smoke": "a flow on 8x8 digits: seconds",
        "short": "mnist flow of table4, and 100 dense Jacobians a block: seconds of a core each",
        "paper": "mnist flow of table4, and minutes on a GPU for 1,000 dense Jacobians a block",
    },
    run=run,
    check=PLAN.check,
)
