"""Speed and memory of this library, measured beside others in one run: what `iresnet bench` prints.

case         the network, its data and the tasks
networks     the network as this library's flow, and without constraint
libraries    the same in normflows, and flows of zuko
floor        the matrix products alone
ratios       times of several methods in turn, and their ratios
growth       how times grow with each size
memory       the peak memory of a training step
measure      all of it, as a results file
"""

from .case import TASKS, Case, Method
from .growth import Slope, fit_slope
from .libraries import missing
from .measure import FULL, GPU, METHODS, QUICK, Sizes, bench, check_tasks, title_of
from .ratios import Ratio, ratio, time_in_turn

__all__ = [
    "FULL",
    "GPU",
    "METHODS",
    "QUICK",
    "TASKS",
    "Case",
    "Method",
    "Ratio",
    "Sizes",
    "Slope",
    "bench",
    "check_tasks",
    "fit_slope",
    "missing",
    "ratio",
    "time_in_turn",
    "title_of",
]
