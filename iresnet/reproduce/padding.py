"""`padding`: the classification error with and without injective padding, which the paper gives in its text (App. C.2).

The paper adds 13 channels of zeros to CIFAR-10 images, and finds about 2 points less accuracy without them. Here the
network c=0.9 of Table 2 is compared with the same network without padding. A branch is as wide as its scale, so that
the network without padding is narrower in all layers: the rows give the parameters of both.
"""

from __future__ import annotations

from collections.abc import Sequence

from .cells import DIGITS, NO_PADDING, cells_on
from .classification import PAPER2, measure_classifier
from .experiments import EPOCHS
from .record import Entry, Row, rows_per_cell
from .result import Plan, budget_costs, columns, trained_result

PADDED = "c=0.9"
#: How much worse the network without padding is, in percentage points, as the paper says it.
PAPER = "about 2"

COLUMNS = columns(
    *("model", "error %", ("paper\n%", "paper"), "worse by", ("paper,\nworse by", "paper, worse by")),
    *("epochs", "parameters", "blocks proven"),
)


def rows_with_difference(runs: Sequence[Entry]) -> list[Row]:
    """Return a row for every network, with mean and spread over its seeds, and its error minus that with padding."""
    rows = rows_per_cell(runs)
    padded = {_trained_as(row): row["error %"] for row in rows if row["model"] == PADDED}
    for row in rows:
        other = None if row["model"] == PADDED else padded.get(_trained_as(row))
        row["worse by"] = None if other is None else row["error %"] - other
        row["paper, worse by"] = PAPER if other is not None and row["dataset"] == "cifar10" else None
    return rows


def _trained_as(row: Row) -> tuple[object, ...]:
    return tuple(row.get(key) for key in ("dataset", "budget", "recipe", "settings"))


RESULT = trained_result(
    Plan(
        "padding",
        cells=cells_on("cifar10", {PADDED: PAPER2["cifar10"][PADDED], NO_PADDING: None}),
        smoke=cells_on(DIGITS, (PADDED, NO_PADDING)),
    ),
    measure_classifier,
    COLUMNS,
    about="classification error of c=0.9 with and without 13 channels of zeros",
    says="about 2 points more error on CIFAR-10 without padding (App. C.2, in the text)",
    costs=budget_costs(
        "2 networks on 8x8 digits: seconds on one core",
        f"2 networks of {EPOCHS['short']['cifar10']} epochs, one of them of table2: minutes each on a GPU",
        f"2 networks of {EPOCHS['paper']['cifar10']} epochs, one of them of table2: a quarter of an hour each on a GPU",
    ),
    notes=("worse by: percentage points more error than with padding; without it, all layers are narrower too",),
    rows=rows_with_difference,
    all_seeds=True,
)
