"""Counts of attacks: cases and outcomes per kind, and violations with the command that reproduces each.

`results/attack.json` has one row per kind, and one for all; running a kind again replaces its row and keeps the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from iresnet.results import Results, read, write

#: The largest number of violations that a row lists; all are counted and printed.
LISTED = 20

#: The kind of the row that sums the others.
ALL = "all"


@dataclass
class Count:
    """The cases of one kind so far."""

    kind: str
    seed: int
    cases: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def add(self, other: Count) -> None:
        """Add the cases of another part of the same run."""
        self.cases += other.cases
        self.seconds += other.seconds
        self.outcomes += other.outcomes
        self.violations += other.violations

    def add_violation(self, number: int, what: str) -> None:
        """Record a violation by the case with this number."""
        line = " ".join(what.split())
        self.violations.append(f"--kind {self.kind} --seed {self.seed} --case {number}: {line[:400]}")

    def row(self, run: int) -> dict[str, Any]:
        """The row for the results file."""
        row: dict[str, Any] = {"kind": self.kind, "cases": self.cases, "violations": len(self.violations)}
        row |= {"outcomes": dict(sorted(self.outcomes.items())), "seconds": round(self.seconds, 1)}
        return row | {"reproductions": self.violations[:LISTED], "seed": self.seed, "run": run}

    def __str__(self) -> str:
        outcomes = ", ".join(f"{count} {name}" for name, count in self.outcomes.most_common())
        each = 1e3 * self.seconds / max(self.cases, 1)
        return (
            f"{self.kind:<14} {self.cases:>7} cases, {len(self.violations)} violations, {each:.1f} ms each: {outcomes}"
        )


def merge(counts: Iterable[Count], run: dict[str, Any], path: Path) -> Path:
    """Replace the rows of these kinds in a results file, and add the run that produced them; keep all other rows."""
    known = read(path) if path.exists() else Results(path.stem)
    counts = list(counts)
    rows = [row for row in known.rows if row["kind"] not in {ALL, *(count.kind for count in counts)}]
    runs, kept = list[dict[str, Any]](), dict[int, int]()
    for row in rows:
        if row["run"] not in kept:
            kept[row["run"]] = len(runs)
            runs.append(known.runs[row["run"]])
    rows = [row | {"run": kept[row["run"]]} for row in rows] + [count.row(len(runs)) for count in counts]
    total = {what: round(sum(row[what] for row in rows), 1) for what in ("cases", "violations", "seconds")}
    rows.append({"kind": ALL, **total, "run": len(runs)})
    return write(Results(path.stem, sorted(rows, key=lambda row: str(row["kind"])), [*runs, run]), path.parent)
