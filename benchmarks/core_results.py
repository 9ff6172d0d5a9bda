"""A row of results/core.json."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def row(claim: str, family: str, metric: str, value: float, target: str = "-", **more: Any) -> Row:
    """One row of the results file. A row with a target is a headline, unless it is marked as a detail."""
    headline = target not in ("-", "reported") and not more.pop("detail", False)
    entry = {"claim": claim, "family": family, "metric": metric, "value": value, "target": target}
    return {**entry, **more, "headline": headline, "run": 0}
