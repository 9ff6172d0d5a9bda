"""Table 1: properties of invertible networks, the paper's marks and ours.

Ours are found by running every system with random weights (`properties`). The paper calls Glow's inverse not analytic,
because its 1x1 convolutions are inverted numerically; here that is two triangular solves, a fixed number of operations,
so it is marked as analytic. The paper's estimator of an i-ResNet's log-determinant is a truncated series, which is
biased; `logdet.RussianRoulette` is not, and both are tested. FFJORD is implemented by zuko; without zuko, its marks are
the published ones. A cell of the table reads "paper / ours"; MAF is not in the paper's table.
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
from .job import Job, Work
from .record import Entry, Row, new_entry
from .result import Reproduction, Result, columns, refuse_choices, run_items
from .systems import IMPORTED, MAKERS, Maker, count_turns, inputs, instance

YES, NO, NA, PUBLISHED = "✓", "✗", "–", "pub."
#: Dimensions of all tests, and those of a second test of the exact log-determinant.
SMALL, LARGE = 6, 100
#: Instances with different weights, and draws of an estimator.
INSTANCES, DRAWS = 3, {"smoke": 4_000, "short": 40_000, "paper": 40_000}
#: Terms of the paper's series for CIFAR-10.
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
COLUMNS = columns("model", ("free-\nform", "free-form"), *PROPERTIES[1:])


# ---------------------------------------------------------------------------------------------- marks


def find_marks(name: str, draws: int) -> tuple[dict[str, str], dict[str, Any]]:
    """Return our marks of a system by property, and what was measured for them."""
    found = [_find_marks(name, make, draws) for make in MAKERS[name]]
    agreed = {p: " or ".join(dict.fromkeys(m[p] for m, _ in found)) for p in PROPERTIES}
    return agreed, {f"instance {i + 1}": details for i, (_, details) in enumerate(found)}


def _find_marks(name: str, make: Maker, draws: int) -> tuple[dict[str, str], dict[str, Any]]:
    x = inputs(make, SMALL)
    instances = [instance(make, SMALL, seed) for seed in range(INSTANCES)]
    pattern, forward = properties.zero_pattern(instances, x), properties.forward_evaluations(instances[0], x)
    measured: dict[str, Any] = {"pattern": asdict(pattern), "forward": asdict(forward)}
    found = {"free-form": _mark(pattern.free), "analytic forward": _mark(forward.closed)}
    if name == "ResNet":
        measured["turns of a block on the line"] = _count_turns()  # it has no inverse, so none of the rest applies
        return found | dict.fromkeys(PROPERTIES[2:], NA), measured
    inverse = properties.inverse_evaluations(instances[0], x)
    volumes = properties.log_volume(instances[0], x)
    error = properties.logdet_error(instances[0], x)
    measured |= {"inverse": asdict(inverse), "largest |ln det|": float(volumes.abs().max()), "ln det off by": error}
    found["analytic inverse"] = _mark(inverse.closed)
    found["changes volume"] = _mark(float(volumes.abs().max()) > properties.ROUNDING)
    found["exact likelihood"], measured["ln det off by, large"] = _mark_likelihood(make, error)
    found["unbiased estimator"], measured["estimators"] = _mark_estimator(name, draws)
    return found, measured


def _count_turns() -> int:
    """Count the turns of an unconstrained block on the line; a turn shows that it has no inverse."""
    if count := count_turns():
        return count
    raise RuntimeError(
        "the marks of a ResNet need a block that turns around, which shows that it has no inverse; got one without. "
        "Change the seed in `systems.count_turns`."
    )


def _mark(holds: bool) -> str:
    return YES if holds else NO


def _mark_likelihood(make: Maker, small: float) -> tuple[str, float | None]:
    """Mark whether ln det is exact, in few dimensions and in more than a dense Jacobian is computed for."""
    if small > properties.ROUNDING:
        return NO, None
    large = properties.logdet_error(instance(make, LARGE, 0), inputs(make, LARGE, 4))
    return (YES if large < LARGE * properties.ROUNDING else f"d ≤ {EXACT_UP_TO}"), large


def _mark_estimator(name: str, draws: int) -> tuple[str, dict[str, Any]]:
    """Mark whether a system has an unbiased estimator."""
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
    """Measure the bias for one block whose Jacobian is nearly as large as allowed."""
    torch.manual_seed(0)
    layer = nn.Linear(SMALL, SMALL)
    with torch.no_grad():
        layer.weight.copy_(0.9 * torch.linalg.qr(torch.randn(SMALL, SMALL))[0])
    block = ResidualBlock(nn.Sequential(layer), lipschitz=0.9).double().eval()
    x = torch.zeros(1, SMALL, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)

    def estimate(rows: Tensor) -> Tensor:
        return block.forward_and_logdet(rows, estimator=estimator, generator=generator)[1]

    return properties.measure_bias(estimate, float(properties.log_volume(block, x)), x, draws)


def _bias_of_ffjord(draws: int) -> properties.Bias:
    """Compare one random direction per sample with the full trace, with the same solver."""
    make = partial(ffjord, hidden=(32, 32), absolute=1e-8, relative=1e-8)
    full, probed = (instance(partial(make, exact=exact), SMALL, 0) for exact in (True, False))
    x, generator = inputs(MAKERS["FFJORD"][0], SMALL, 1), torch.Generator().manual_seed(2)

    def estimate(samples: Tensor) -> Tensor:
        return probed.forward_and_logdet(samples, generator=generator)[1]

    with torch.no_grad():
        return properties.measure_bias(estimate, float(full.forward_and_logdet(x)[1]), x, draws)


# ---------------------------------------------------------------------------------------------- the table


def mark_columns(name: str, ours: dict[str, str] | None) -> Row:
    """Return "paper / ours" for every property; without ours, `PUBLISHED`."""
    papers = dict(zip(PROPERTIES, PAPER.get(name, ("·",) * len(PROPERTIES)), strict=True))
    return {p: f"{papers[p]} / {PUBLISHED if ours is None else ours[p]}" for p in PROPERTIES}


def list_differences(rows: Sequence[Row]) -> list[str]:
    """Describe where our mark differs from the paper's."""
    marks = [(r["model"], p, *r[p].split(" / ")) for r in rows for p in PROPERTIES]
    differ = [m for m in marks if m[3] not in (m[2], PUBLISHED) and m[2] != "·"]
    return [f"{model}, {p}: {paper} in the paper, {ours} here" for model, p, paper, ours in differ]


def metric_columns(details: dict[str, Any]) -> Row:
    """Return what was measured of a system's first instance: zeros, evaluations of a network, and errors."""
    first = details.get("instance 1", {})
    pattern, inverse = first.get("pattern"), first.get("inverse", {})
    return {
        "zeros in a layer's Jacobian": f"{pattern['always_zero']} of {pattern['entries']}" if pattern else None,
        "evaluations of a layer": _range(first.get("forward")),
        "evaluations of its inverse": _range(inverse),
        "inverse off by": inverse.get("error"),
        "ln det off by": first.get("ln det off by"),
    }


def _range(counted: dict[str, Any] | None) -> str | None:
    if not counted:
        return None
    low, high = counted["fewest"], counted["most"]
    return str(low) if low == high else f"{low} to {high}"


def _is_available(name: str) -> bool:
    return name not in IMPORTED or find_spec("zuko") is not None


def measure_system(name: str, job: Job) -> tuple[Entry, str]:
    """Find the properties of one system."""
    begun = time.perf_counter()
    available = _is_available(name)
    ours, details = find_marks(name, DRAWS[job.budget]) if available else (None, {})
    made = provenance(seeds=list(range(INSTANCES)), seconds=time.perf_counter() - begun, precision="float64")
    marks = mark_columns(name, ours)
    row = {"established": "by running" if available else "as published", **marks, **metric_columns(details)}
    return new_entry(job, NONE, name, row, details, made), ", ".join(f"{p} {mark}" for p, mark in marks.items())


def sort_rows(runs: Sequence[Entry]) -> list[Row]:
    """Return a row for every system, in the paper's order."""
    order = list(MAKERS)
    rows = [
        {"model": e["model"], "budget": e["budget"], "recipe": e["recipe"], **e["row"], "run": i}
        for i, e in enumerate(runs)
    ]
    return sorted(rows, key=lambda r: order.index(r["model"]))


def check(job: Job) -> None:
    """Raise `ValueError` for choices that this table does not have."""
    refuse_choices(job, "table1 runs systems of its own with random weights")


def run(work: Work) -> Reproduction:
    """Run every system, and compare our marks with the paper's."""
    names = [name for name in MAKERS if name in PAPER or _is_available(name)]
    results = run_items(work, "table1", [(name, partial(measure_system, name, work.job)) for name in names], sort_rows)
    mine = [r for r in results.rows if r["budget"] == work.job.budget]
    notes = ["every cell: the paper's mark / ours; –: not applicable, ·: not in the paper", *list_differences(mine)]
    if not all(map(_is_available, PAPER)):
        notes.append(f"{PUBLISHED}: as published, since zuko is not installed: pip install 'iresnet[flows]'")
    return Reproduction(results, COLUMNS, (work.job.out / "table1.json",), tuple(notes))


RESULT = Result(
    name="table1",
    about="properties of ResNet, NICE / i-RevNet, Real NVP, Glow, FFJORD and i-ResNet, found by running them",
    says="only i-ResNet and FFJORD are free-form; i-ResNet has no analytic inverse and a biased estimator",
    costs={budget: f"{DRAWS[budget]:,} draws of an estimator: seconds" for budget in DRAWS},
    run=run,
    check=check,
)
