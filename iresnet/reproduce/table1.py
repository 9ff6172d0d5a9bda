"""Table 1: properties of invertible networks, the paper's marks and ours side by side.

Ours are found by running every system with random weights (`properties`). The paper calls Glow's inverse not analytic,
because its 1x1 convolutions are inverted numerically; here that is two triangular solves, a fixed number of operations,
and the mark says so. The paper's estimator of an i-ResNet's log-determinant is a truncated series, which is biased; the
roulette of `logdet.RussianRoulette` is not, and both are tested. FFJORD is zuko's, and its marks are taken as published
where zuko is not installed. In the rows a cell reads "paper / ours"; MAF is not in the paper's table.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ..logdet import EXACT_UP_TO, Estimator, PowerSeries, RussianRoulette
from ..residual import ResidualBlock
from ..results import provenance
from ..transforms.imported import ffjord
from . import properties
from .cells import NONE
from .job import Job, Stopped, Work
from .record import Entry, Row, merge, named
from .result import Reproduction, Result, refuse
from .systems import IMPORTED, MAKERS, Maker, inputs, instance, turns

YES, NO, NA, PUBLISHED = "✓", "✗", "–", "pub."
#: Dimensions in which everything is tried, and those in which an exact log-determinant is looked for again.
SMALL, LARGE = 6, 100
#: Instances with weights of their own, and draws of an estimator.
INSTANCES, DRAWS = 3, {"smoke": 4_000, "short": 40_000, "paper": 40_000}
#: Terms of the paper's series, for CIFAR-10.
TERMS = 5

PROPERTIES = (
    "free-form",
    "analytic forward",
    "analytic inverse",
    "changes volume",
    "exact likelihood",
    "unbiased estimator",
)
#: The marks of the paper, in this order.
PAPER = {
    "ResNet": (YES, YES, NA, NA, NA, NA),
    "NICE / i-RevNet": (NO, YES, YES, NO, YES, NA),
    "Real NVP": (NO, YES, YES, YES, YES, NA),
    "Glow": (NO, YES, NO, YES, YES, NA),
    "FFJORD": (YES, NO, NO, YES, NO, YES),
    "i-ResNet": (YES, YES, NO, YES, NO, NO),
}
COLUMNS = {
    "system": "model",
    "free-\nform": "free-form",
    "analytic\nforward": "analytic forward",
    "analytic\ninverse": "analytic inverse",
    "changes\nvolume": "changes volume",
    "exact\nlikelihood": "exact likelihood",
    "unbiased\nestimator": "unbiased estimator",
}


# ---------------------------------------------------------------------------------------------- their marks


def marks(name: str, draws: int) -> tuple[dict[str, str], dict[str, Any]]:
    """Our marks of a system by property, and what was measured for them."""
    found = [_marks(name, make, draws) for make in MAKERS[name]]
    agreed = {p: " or ".join(dict.fromkeys(m[p] for m, _ in found)) for p in PROPERTIES}
    return agreed, {f"instance {i + 1}": details for i, (_, details) in enumerate(found)}


def _marks(name: str, make: Maker, draws: int) -> tuple[dict[str, str], dict[str, Any]]:
    x = inputs(make, SMALL)
    instances = [instance(make, SMALL, seed) for seed in range(INSTANCES)]
    pattern, forward = properties.pattern(instances, x), properties.forward_evaluations(instances[0], x)
    measured: dict[str, Any] = {"pattern": asdict(pattern), "forward": asdict(forward)}
    found = {"free-form": _mark(pattern.free), "analytic forward": _mark(forward.closed)}
    if name == "ResNet":
        measured["turns of a block on the line"] = _folds()  # it has no inverse, so none of the rest applies
        return found | dict.fromkeys(PROPERTIES[2:], NA), measured
    inverse = properties.inverse_evaluations(instances[0], x)
    volumes = properties.log_volume(instances[0], x)
    error = properties.logdet_error(instances[0], x)
    measured |= {"inverse": asdict(inverse), "largest |ln det|": float(volumes.abs().max()), "ln det off by": error}
    found["analytic inverse"] = _mark(inverse.closed)
    found["changes volume"] = _mark(float(volumes.abs().max()) > properties.ROUNDING)
    found["exact likelihood"], measured["ln det off by, large"] = _exactness(make, error)
    found["unbiased estimator"], measured["estimators"] = _estimator(name, draws)
    return found, measured


def _folds() -> int:
    """How often a block of a ResNet turns around on the line: without a turn it is not shown to have no inverse."""
    if count := turns():
        return count
    raise RuntimeError(
        "a ResNet's marks need a block that turns around, which shows that it has no inverse; got one without a turn. "
        "Give `systems.turns` another seed."
    )


def _mark(holds: bool) -> str:
    return YES if holds else NO


def _exactness(make: Maker, small: float) -> tuple[str, float | None]:
    """Whether ln det is exact, in few dimensions and in more than a dense Jacobian is made for."""
    if small > properties.ROUNDING:
        return NO, None
    large = properties.logdet_error(instance(make, LARGE, 0), inputs(make, LARGE, 4))
    return (YES if large < LARGE * properties.ROUNDING else f"d ≤ {EXACT_UP_TO}"), large


def _estimator(name: str, draws: int) -> tuple[str, dict[str, Any]]:
    """Whether the estimators that a system has are unbiased; one that is is enough."""
    if name == "FFJORD":
        found = {"Hutchinson": _bias_of_ffjord(max(500, draws // 20))}
    elif name == "i-ResNet":
        found = {
            f"series of {TERMS} terms": _bias_of(PowerSeries(terms=TERMS), draws),
            "roulette": _bias_of(RussianRoulette(terms=2), draws),
        }
    else:
        return NA, {}
    words = {k: asdict(b) | {"standard errors off": b.distance, "unbiased": b.unbiased} for k, b in found.items()}
    return _mark(any(b.unbiased for b in found.values())), words


def _bias_of(estimator: Estimator, draws: int) -> properties.Bias:
    """Of one block whose Jacobian is about as large as it may be."""
    torch.manual_seed(0)
    layer = nn.Linear(SMALL, SMALL)
    with torch.no_grad():
        layer.weight.copy_(0.9 * torch.linalg.qr(torch.randn(SMALL, SMALL))[0])
    block = ResidualBlock(nn.Sequential(layer), lipschitz=0.9).double().eval()
    x, generator = torch.zeros(1, SMALL, dtype=torch.float64), torch.Generator().manual_seed(2)

    def estimate(rows: Tensor) -> Tensor:
        return block.forward_and_logdet(rows, estimator=estimator, generator=generator)[1]

    return properties.bias(estimate, float(properties.log_volume(block, x)), x, draws)


def _bias_of_ffjord(draws: int) -> properties.Bias:
    """One random direction for each row, against the whole trace, solved alike."""
    made = []
    for exact in (True, False):
        made.append(instance(partial(ffjord, hidden=(32, 32), exact=exact, absolute=1e-8, relative=1e-8), SMALL, 0))
    x, generator = inputs(MAKERS["FFJORD"][0], SMALL, 1), torch.Generator().manual_seed(2)
    with torch.no_grad():
        exactly = float(made[0].forward_and_logdet(x)[1])
        return properties.bias(lambda rows: made[1].forward_and_logdet(rows, generator=generator)[1], exactly, x, draws)


# ---------------------------------------------------------------------------------------------- the table


def row(name: str, ours: dict[str, str] | None) -> Row:
    """A system's line: "paper / ours" for every property; without ours, `PUBLISHED`."""
    papers = dict(zip(PROPERTIES, PAPER.get(name, ("·",) * len(PROPERTIES)), strict=True))
    return {p: f"{papers[p]} / {PUBLISHED if ours is None else ours[p]}" for p in PROPERTIES}


def differing(rows: Sequence[Row]) -> list[str]:
    """Where ours is another mark than the paper's, in words."""
    found = []
    for r in rows:
        for p in PROPERTIES:
            paper, ours = r[p].split(" / ")
            if ours not in (paper, PUBLISHED) and paper != "·":
                found.append(f"{r['model']}, {p}: {paper} in the paper, {ours} here")
    return found


def metrics(details: dict[str, Any]) -> Row:
    """What was measured of a system's first instance, for the table: zeros, evaluations of a network, and errors."""
    first = details.get("instance 1", {})
    pattern, inverse = first.get("pattern"), first.get("inverse", {})
    return {
        "zeros in a layer's Jacobian": f"{pattern['always_zero']} of {pattern['entries']}" if pattern else None,
        "evaluations of a layer": _span(first.get("forward")),
        "evaluations of its inverse": _span(inverse),
        "inverse off by": inverse.get("error"),
        "ln det off by": first.get("ln det off by"),
    }


def _span(counted: dict[str, Any] | None) -> str | None:
    if not counted:
        return None
    low, high = counted["fewest"], counted["most"]
    return str(low) if low == high else f"{low} to {high}"


def _is_here(name: str) -> bool:
    return name not in IMPORTED or find_spec("zuko") is not None


def _entry(name: str, job: Job) -> Entry:
    begun = time.perf_counter()
    there = _is_here(name)
    ours, details = marks(name, DRAWS[job.budget]) if there else (None, {})
    made = provenance(seeds=list(range(INSTANCES)), seconds=time.perf_counter() - begun, precision="float64")
    content = {"established": "by running" if there else "as published", **row(name, ours), **metrics(details)}
    return named(job, NONE, name, content, details, made)


def in_order(runs: Sequence[Entry]) -> list[Row]:
    """A row for every system, in the paper's order."""
    order = list(MAKERS)
    rows = [
        {"model": e["model"], "budget": e["budget"], "recipe": e["recipe"], **e["row"], "run": i}
        for i, e in enumerate(runs)
    ]
    return sorted(rows, key=lambda r: order.index(r["model"]))


def check(job: Job) -> None:
    """Refuse settings that mean nothing here."""
    refuse(job, "table1 is made of all its systems, with random weights; leave --set, --cells, --dataset out.")


def run(work: Work) -> Reproduction:
    """Run every system, and put our marks beside the paper's."""
    made = []
    for name in (n for n in MAKERS if n in PAPER or _is_here(n)):
        if work.stop():
            raise Stopped(f"table1 {name} was not begun")
        made.append(_entry(name, work.job))
        work.say(f"table1  {name}: " + ", ".join(f"{p} {made[-1]['row'][p]}" for p in PROPERTIES))
    results = merge("table1", made, work.job.out, in_order)
    mine = [r for r in results.rows if r["budget"] == work.job.budget]
    notes = ["every cell: the paper's mark / ours; –: not applicable, ·: not in the paper", *differing(mine)]
    if not all(map(_is_here, PAPER)):
        notes.append(f"{PUBLISHED}: as published; what is zuko's is run where that is: pip install 'iresnet[rivals]'")
    return Reproduction(results, COLUMNS, (work.job.out / "table1.json",), tuple(notes))


RESULT = Result(
    name="table1",
    about="properties of ResNet, NICE / i-RevNet, Real NVP, Glow, FFJORD and i-ResNet, found by running them",
    says="only i-ResNet and FFJORD are free-form; i-ResNet has no analytic inverse and a biased estimator",
    costs={budget: f"{DRAWS[budget]:,} draws of an estimator: seconds" for budget in DRAWS},
    run=run,
    check=check,
)
