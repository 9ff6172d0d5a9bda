"""The paper's tables and figures, one file each: its values, how ours are made, and ours beside them.

result      a table or figure as an object, and how to add one
job         what an invocation asks for, and the runs it is made of
cells       the paper's networks on its data, as experiments; flows: those that are densities; planes: in the plane
properties  what Table 1 says of a system, found by running it; systems: those that are run
judging     what a trained classifier is judged by; the test images are read once
series      what a power series is off by, for Figures 4 and 9
iteration   Algorithm 1 as the paper runs it, whether it converges or not
record      OUT/NAME.json, filled in several invocations
"""

from collections.abc import Sequence

from ..spelling import hint
from . import (
    figure1,
    figure2,
    figure3,
    figure4,
    figure5,
    figure6,
    figure7,
    figure8,
    figure9,
    hybrid,
    outliers,
    table1,
    table2,
    table3,
    table4,
    table5,
)
from .job import Job, Stopped, Work
from .result import Outcome, Result

__all__ = ["RESULTS", "Job", "Outcome", "Result", "Stopped", "Work", "find"]

#: Every table and figure that can be reproduced, in the order of the paper; then what is in its spirit.
RESULTS = {
    module.RESULT.name: module.RESULT
    for module in (
        figure1,
        figure2,
        table1,
        figure3,
        table2,
        table3,
        figure4,
        table4,
        figure5,
        figure6,
        figure7,
        table5,
        figure8,
        figure9,
        hybrid,
        outliers,
    )
}


def find(names: Sequence[str]) -> list[Result]:
    """The results of these names, each once; an unknown name is refused."""
    for name in names:
        if name not in RESULTS:
            raise ValueError(f"there is no result {name!r}. {hint(name, RESULTS)}")
    return [RESULTS[name] for name in dict.fromkeys(names)]
