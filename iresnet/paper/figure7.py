"""Figure 7: MNIST images rebuilt from their codes after 100 iterations; the paper finds both nets close to exact."""

from __future__ import annotations

from .cells import VANILLA, constrained
from .job import Work
from .reconstruction import make
from .result import Outcome, Plan, Result

PAPER = {"c=0.9": "exact", VANILLA: "close to exact"}
PLAN = Plan("figure7", models={"mnist": (*constrained(0.9), VANILLA)}, smoke=(*constrained(0.9), VANILLA))


def run(work: Work) -> Outcome:
    """Rebuild test images by both nets."""
    return make(work, PLAN, PAPER, "mnist")


RESULT = Result(
    name="figure7",
    about="MNIST images and their reconstructions after 100 iterations: i-ResNet c=0.9 and vanilla",
    says="close to exact for both, even without the constraint",
    costs={
        "smoke": "2 cells of table2: seconds",
        "short": "2 cells of table2, and seconds on a GPU",
        "paper": "2 cells of table2, and seconds on a GPU",
    },
    run=run,
    check=PLAN.check,
)
