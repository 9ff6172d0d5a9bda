"""The paper's tables and figures: its values, how ours are made, and ours.

result       a table or figure as an object, and how to add one
cells        the paper's networks on its datasets, as records
experiments  the experiment of a cell by budget and recipe
job          what a command requests, and the runs it needs
evaluation   the metrics of a trained classifier; the test images are read once
iteration    Algorithm 1 as the paper runs it, converging or not
properties   the properties of Table 1, tested by running; systems: the transforms that are run
record       OUT/NAME.json, filled by several commands

There is a file for every table and figure, but: classification has Tables 2 and 3, reconstruction Figures 3, 7 and 8,
series Figures 4 and 9. Claims of the paper's text: padding, sgd. Results beyond the paper: hybrid, semi_supervised,
probe, outliers.
"""

from collections.abc import Sequence

from ..spelling import hint
from . import (
    classification,
    figure1,
    figure2,
    figure5,
    figure6,
    hybrid,
    outliers,
    padding,
    probe,
    reconstruction,
    semi_supervised,
    series,
    sgd,
    table1,
    table4,
    table5,
)
from .job import Job, Stopped, Work
from .result import Reproduction, Result

__all__ = ["RESULTS", "Job", "Reproduction", "Result", "Stopped", "Work", "find"]

#: Every table and figure that can be reproduced, in the order of the paper; claims of its text; results beyond it.
RESULTS = {
    result.name: result
    for result in (
        *(figure1.RESULT, figure2.RESULT, table1.RESULT, reconstruction.FIGURE3),
        *(classification.TABLE2, classification.TABLE3, series.FIGURE4, table4.RESULT, figure5.RESULT, figure6.RESULT),
        *(reconstruction.FIGURE7, table5.RESULT, reconstruction.FIGURE8, series.FIGURE9),
        *(padding.RESULT, sgd.RESULT, hybrid.RESULT, semi_supervised.RESULT, probe.RESULT, outliers.RESULT),
    )
}


def find(names: Sequence[str]) -> list[Result]:
    """Return the results of these names, each once; raise `ValueError` for an unknown name."""
    for name in names:
        if name not in RESULTS:
            raise ValueError(f"there is no result {name!r}. {hint(name, RESULTS)}")
    return [RESULTS[name] for name in dict.fromkeys(names)]
