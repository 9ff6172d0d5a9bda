"""Figure 3: CIFAR-10 images rebuilt from their codes after 100 iterations, by nets with and without constraint."""

from __future__ import annotations

from .cells import BATCHNORM, VANILLA, constrained
from .job import Work
from .reconstruction import make
from .result import Outcome, Plan, Result

PAPER = {"c=0.9": "exact", VANILLA: "fails", BATCHNORM: "fails"}
PLAN = Plan(
    "figure3", models={"cifar10": (*constrained(0.9), VANILLA, BATCHNORM)}, smoke=(*constrained(0.9), VANILLA),
    others=("cifar100",),
)  # fmt: skip


def run(work: Work) -> Outcome:
    """Rebuild test images by every net."""
    return make(work, PLAN, PAPER, "cifar10")


RESULT = Result(
    name="figure3",
    about="CIFAR-10 images and their reconstructions after 100 iterations: i-ResNet c=0.9, vanilla, BatchNorm",
    says="exact for c=0.9; the iteration fails for the nets without constraint, with and without BatchNorm",
    costs={
        "smoke": "2 cells of table2: seconds",
        "short": "3 cells of table2, and seconds on a GPU",
        "paper": "3 cells of table2, and seconds on a GPU",
    },
    run=run,
    check=PLAN.check,
)
