"""Results files: published numbers, each with its provenance.

`results/NAME.json` holds `{"name": NAME, "rows": [...], "runs": [...]}`. A row holds the numbers, under any keys, and
`"run"`, the index of the run they came from. A run records how they were computed: see `provenance`. The tables in the
README and the documentation are generated from these files by `tools/tables.py`.

What this project publishes, in its folder `results`, comes from a commit that a reader can check out: `write` refuses
other runs there (`require_commit`). Pilots, which have `"purpose": "pilot"`, only chose settings and may come from a
changed working tree.

>>> rows = [{"model": "c=0.9", "error %": 6.7, "paper": 6.78, "run": 0}]
>>> print(markdown_table(rows))
| model | error % | paper |
| :-- | --: | --: |
| c=0.9 | 6.7 | 6.78 |
"""

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from . import atomic

__all__ = ["Results", "provenance", "nonfinite_to_none", "markdown_table", "read", "require_commit", "write"]

#: Folders whose files a measurement may run.
CODE = ("iresnet", "benchmarks", "attack", "tools")

ROOT = Path(__file__).resolve().parent.parent

#: What `tools.pilots` and `tools.trial` add to their runs.
PILOT = {"purpose": "pilot"}


@dataclass(frozen=True)
class Results:
    """The content of a results file. Every row has the index, in `runs`, of the run that it came from."""

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raise for an invalid name or a row without a run."""
        is_name = isinstance(self.name, str) and self.name.isprintable() and Path(self.name).name == self.name
        if not is_name or not self.name:
            raise ValueError(f"name must be a valid file name; got {self.name!r}. Example: 'table2'.")
        for key, entries in (("rows", self.rows), ("runs", self.runs)):
            if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
                raise ValueError(f"{self.name}: {key!r} must be a list of objects; got {_short(entries)}.")
        for i, row in enumerate(self.rows):
            run = row.get("run")
            if type(run) is not int or not 0 <= run < len(self.runs):
                raise ValueError(
                    f"{self.name}: row {i} must name its run by an index below {len(self.runs)}; got {run!r}. "
                    "Append provenance(...) to 'runs' and put its index into the row."
                )


def write(results: Results, folder: str | Path = "results") -> Path:
    """Write `folder/NAME.json` atomically and return its path. A new run is refused where `require_commit` says so."""
    path = Path(folder) / f"{results.name}.json"
    try:
        text = json.dumps(asdict(results), indent=2, ensure_ascii=False, allow_nan=False, default=_to_json) + "\n"
    except ValueError as error:
        raise ValueError(f"{results.name}: JSON has no NaN and no infinity ({error}). Write None instead.") from None
    before = read(path).runs if is_published(folder) and path.is_file() else []
    for run in json.loads(text)["runs"]:
        if run not in before:
            require_commit(folder, run)
    return atomic.write(path, text)


def require_commit(folder: str | Path, run: Mapping[str, Any] | None = None) -> None:
    """Raise `ValueError` if a run must not be published in `folder`; without a run, one of the current working tree.

    Only this project's own results need a commit. Call it before long computations, so that none is lost.
    """
    if not is_published(folder) or not needs_commit(run or {}):
        return
    for commit in [_commit()] if run is None else commits_of(run):
        if not (commit is None or commit.endswith("-dirty")):
            continue
        raise ValueError(
            f"a published result must come from a commit without changes; got {commit}. Commit the changes and run the "
            "command again, or write to another folder than results."
        )


def commits_of(run: Mapping[str, Any]) -> list[str | None]:
    """Return the commit of a run, and those of its earlier parts if it was resumed elsewhere."""
    return [part.get("commit") for part in (run, *run.get("earlier", []))]


def needs_commit(run: Mapping[str, Any]) -> bool:
    """Whether a run must name a commit without changes: not a pilot, and not a value that others published."""
    return run.get("purpose") != PILOT["purpose"] and run.get("budget") != "published"


def is_published(folder: str | Path) -> bool:
    """Whether this is the folder of this project's published results."""
    return Path(folder).resolve() == ROOT / "results"


def read(path: str | Path) -> Results:
    """Read a results file. Raises `ValueError`, with the path and the reason, if it is not one."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it must be a file")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or set(content) != {"name", "rows", "runs"}:
            raise ValueError(f"expected an object with the keys name, rows, runs; got {_short(content)}")
        results = Results(**content)
        if results.name != path.stem:
            raise ValueError(f'the file must be named {results.name}.json, after its "name"')
    except (ValueError, RecursionError) as error:  # also what JSON and UTF-8 decoding raise
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{path} is not a results file: {why}") from error
    return results


def nonfinite_to_none(value: Any) -> Any:
    """Return the value with None for numbers that JSON cannot hold: infinities and NaN."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {k: nonfinite_to_none(v) for k, v in value.items()}
        case list() | tuple():
            return [nonfinite_to_none(v) for v in value]
        case _:
            return value


def provenance(
    *,
    seeds: Sequence[int],
    seconds: float,
    precision: str = "float32",
    command: str | None = None,
    epochs: int | None = None,
    parameters: int | None = None,
) -> dict[str, Any]:
    """Return how a number was computed: one entry of `runs`.

    The caller gives the seeds, the seconds and the precision; the command line, commit, hardware, versions and date are
    determined here. The commit is that of the first call in this process. It ends in `-dirty` if tracked files differ
    from it, except in `results`, which commands write themselves, or if the code has new files. It is None outside a
    checkout.
    """
    return {
        "command": _command() if command is None else command,
        "commit": _commit(),
        "seeds": list(seeds),
        "epochs": epochs,
        "seconds": round(seconds, 3),
        "hardware": _hardware(),
        "versions": _versions(),
        "precision": precision,
        "parameters": parameters,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def markdown_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """Return a Markdown table of `rows`; without `columns`, all keys except `run`, in order of first appearance.

    Columns of numbers are right-aligned, numbers have four significant digits, and a missing value is a dash.
    """
    known = list(dict.fromkeys(key for row in rows for key in row))
    columns = [key for key in known if key != "run"] if columns is None else list(columns)
    unknown = [column for column in columns if column not in known]
    if unknown or not columns:
        raise ValueError(f"Columns must be among {known}; got {unknown or columns}. Check their spelling.")
    marks = ["--:" if all(_is_number(row.get(column)) for row in rows) else ":--" for column in columns]
    lines = [[cell(column) for column in columns], marks]
    lines += [[cell(row.get(column)) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any) -> str:
    """Return the text of one table cell.

    >>> [cell(value) for value in (None, True, 12, 1234567.8, 0.12345, 1e-9, [0.5, 1], "a|b")]
    ['-', 'yes', '12', '1234568', '0.1235', '1e-09', '0.5, 1', 'a\\\\|b']
    """
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
        case list() | tuple():
            return ", ".join(cell(item) for item in value)
        case _:
            return " ".join(str(value).split()).replace("|", "\\|")


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _to_json(value: Any) -> Any:
    """Convert numpy and torch values and paths, which JSON does not know."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"Results hold numbers, strings, lists and objects; got {type(value).__name__}. Convert it first.")


def _command() -> str:
    """Return the command line as typed in the project's folder."""
    program = Path(sys.argv[0])
    if program.name in ("iresnet", "__main__.py"):
        return shlex.join(["iresnet", *sys.argv[1:]])
    program = program.absolute()
    shown = program.relative_to(ROOT).as_posix() if program.is_relative_to(ROOT) else program.name
    return shlex.join(["python", shown, *sys.argv[1:]])


def _commit() -> str | None:
    """Return the checkout's commit; None for an installed copy, even inside another repository."""
    return _commit_of(ROOT) if (ROOT / ".git").exists() else None


@cache  # a process runs the code that it loaded, whatever is committed or edited while it runs
def _commit_of(root: Path) -> str | None:
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", ":!results"]).returncode
        new = subprocess.run(
            [*git, "ls-files", "--others", "--exclude-standard", "--", *CODE], capture_output=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}-dirty" if changed or new else head


def _hardware() -> dict[str, Any]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": _cpu_model(), "cores": cores, "threads": torch.get_num_threads(), "gpu": gpu}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _versions() -> dict[str, str]:
    import torch

    from .version import __version__

    return {"python": platform.python_version(), "torch": str(torch.__version__), "iresnet": __version__}
