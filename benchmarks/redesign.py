"""Compare the library before and after its redesign: values, speed and size.

    python3 benchmarks/redesign.py --old OLD --device cuda --out results/redesign.json      on a GPU, six minutes
    python3 benchmarks/redesign.py --old OLD --device cpu --out results/redesign.json       times on a CPU
    python3 benchmarks/redesign.py --old OLD --device cpu --tiny                            a dry run

OLD is a checkout of the old version: git worktree add OLD 2089140. Each version runs in its own
process (`redesign_worker.py`), and the two alternate: old, new, new, old, and so on. Times are medians of the rounds,
and "new / old" is the median of their ratios.

    GPU    training steps of iresnet164 and cifar10-flow on random images; the inverse of 128 images; the losses of the
           first fifty steps ("old, twice": the old version again, in another process)
    CPU    a step of points-density, 1,000 samples, the demo; tests/reference ("old, twice": one thread and
           two); lines, files and modules

New rows replace those of the same table, name and device in the results file; other rows stay.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

Row = dict[str, Any]

#: The largest allowed ratio of times, and the largest allowed difference in float64.
SLOWER, FLOAT64 = 1.03, 1e-12

#: The preset of each kind of step on a GPU; the number of steps whose losses are compared; the images to invert.
STEPS = {"classifier step": "iresnet164", "flow step": "cifar10-flow"}
FIRST, IMAGES = 50, 128


#: The columns of each table, besides name and device.
COLUMNS = {
    "times": ("unit", "old", "new", "new / old", "at most", "spread %", "rounds"),
    "values": ("old", "new", "difference", "old, twice", "at most"),
    "counts": ("old", "new"),
}


DEFINITION = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

#: Prints the settings of every preset.
PRESETS = (
    "import dataclasses, json; from iresnet.presets import PRESETS; "
    "print(json.dumps({name: dataclasses.asdict(preset) for name, preset in PRESETS.items()}))"
)


class Version:
    """A worker process that runs one version of the library."""

    def __init__(self, tree: Path, options: argparse.Namespace) -> None:
        worker = [sys.executable, str(Path(__file__).with_name("redesign_worker.py"))]
        worker += [options.device, str(options.threads), "tiny" if options.tiny else "whole"]
        self.process = subprocess.Popen(
            worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(tree)
        )

    def ask(self, do: str | None = None, **command: Any) -> Row:
        """Send a command, if any, and wait for the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if do is not None:
            print(json.dumps({"do": do} | command), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the worker exited with {self.process.wait()} during {do}; its output says why.")
        return dict(json.loads(answer))

    def close(self) -> None:
        """Close the worker's input and wait until it exits."""
        self.process.communicate()


def environment(tree: Path) -> dict[str, str]:
    """Environment variables with which Python imports the library from a checkout."""
    return os.environ | {"PYTHONPATH": str(tree.resolve()), "MPLBACKEND": "Agg", "PYTHONUNBUFFERED": "1"}


class Comparison:
    """Run both versions and collect the rows that compare them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rows = options, list[Row]()
        self.old, self.new = (Version(tree, options) for tree in (options.old, options.new))
        self.losses: dict[str, list[float]] = {}
        self.folder = Path(tempfile.mkdtemp())

    def both(self, do: str | None = None, **command: Any) -> tuple[Row, Row]:
        """Send a command to both versions; return both answers."""
        return self.old.ask(do, **command), self.new.ask(do, **command)

    def timed(self, what: str, rounds: int, do: str, scale: float = 1.0, unit: str = "ms", **command: Any) -> None:
        """Add a row of times: medians over rounds in which the versions take turns at going first."""
        times: dict[Version, list[float]] = {self.old: [], self.new: []}
        for i in range(rounds):
            for version in (self.old, self.new) if i % 2 == 0 else (self.new, self.old):
                times[version].append(scale * version.ask(do, **command)["ms"])
        old, new = times.values()
        ratio = median(b / a for a, b in zip(old, new, strict=True))
        row = {"unit": unit, "old": median(old), "new": median(new), "new / old": ratio, "at most": SLOWER}
        spread = max(100 * (max(t) - min(t)) / median(t) for t in (old, new))
        self.add("times", what, **row | {"spread %": spread, "rounds": rounds})

    def add(self, table: str, what: str, **row: Any) -> None:
        """Store a row and print it."""
        on = "GPU" if self.options.device == "cuda" else "CPU"
        self.rows.append({"table": table, "what": what, "on": on} | dict.fromkeys(COLUMNS[table]) | row)
        shown = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in self.rows[-1].items()}
        print(shown, flush=True)

    # ------------------------------------------------------------------------------------------------- on a GPU

    def step(self, what: str, preset: str) -> None:
        """Compare the losses of the first steps and the times of later ones."""
        tiny = self.options.tiny
        self.both("training", preset=preset)
        old, new = self.both("steps", count=4 if tiny else FIRST)
        self.losses[preset] = old["losses"]
        row = {name: answer["losses"][-1] for name, answer in (("old", old), ("new", new))}
        row["difference"] = difference(old["losses"], new["losses"])
        self.add("values", losses_of(preset), **row)
        self.timed(what, self.options.rounds, "steps", count=2 if tiny else FIRST)
        self.both("finish")  # the averaged model; the answer comes when it is built

    def inverse(self) -> None:
        """Compare x and its bounds for the same weights, and the times."""
        weights = str(self.folder / "weights")
        self.old.ask("weights", path=weights, images=4 if self.options.tiny else IMAGES)
        for version, name in ((self.old, "old"), (self.new, "new")):
            version.ask("inverse", weights=weights, path=str(self.folder / name))
        self.inverses("old", "new", "difference")
        self.timed("inverse of 128 images", self.options.rounds, "solve", repeats=1 if self.options.tiny else 5)

    def inverses(self, first: str, second: str, column: str) -> None:
        """Add the differences of two inverses and of their bounds."""
        old, new = (torch.load(self.folder / name) for name in (first, second))
        apart = float((old["x"] - new["x"]).flatten(1).norm(dim=1).max())
        self.extend("values", "inverse: x, l2, worst image", **{column: apart})
        for name in ("largest_block_bound", "composed_bound", "code_residual", "converged"):
            row = {"old": float(old[name].max()), "new": float(new[name].max())} if second == "new" else {}
            row[column] = difference(old[name].tolist(), new[name].tolist())
            self.extend("values", f"inverse: {name.replace('_', ' ')}", **row)

    def extend(self, table: str, what: str, **more: Any) -> None:
        """Add columns to an existing row, or add a new row."""
        for row in self.rows:
            if (row["table"], row["what"]) == (table, what):
                row |= more
                return
        self.add(table, what, **more)

    def again(self) -> None:
        """Run the old version in another process: how much two runs of the same code differ."""
        version = Version(self.options.old, self.options)
        for preset in STEPS.values():
            version.ask("training", preset=preset)
            losses = version.ask("steps", count=4 if self.options.tiny else FIRST)["losses"]
            version.ask("finish")
            self.extend("values", losses_of(preset), **{"old, twice": difference(self.losses[preset], losses)})
        version.ask("inverse", weights=str(self.folder / "weights"), path=str(self.folder / "again"))
        self.inverses("old", "again", "old, twice")
        version.close()

    # ------------------------------------------------------------------------------------------------- on a CPU

    def plane(self) -> None:
        """Compare a training step and samples of points-density."""
        rounds, tiny = self.options.rounds, self.options.tiny
        self.both("training", preset="points-density")
        self.both("steps", count=4)
        self.timed("step of points-density", 3 * rounds, "steps", count=4 if tiny else 20)
        self.both("finish")
        weights = str(self.folder / "flow")
        self.old.ask("keep", path=weights)
        self.new.ask("take", path=weights)
        old, new = self.both("sample", count=1000)
        self.add("values", "1,000 samples of points-density", difference=difference(old["values"], new["values"]))
        self.timed("1,000 samples of points-density", 3 * rounds, "sample", count=1000)

    def demo(self) -> None:
        """Compare the times of `iresnet demo`, from training to report."""
        self.timed("iresnet demo", 1 if self.options.tiny else 3, "demo", 1e-3, "s")

    def reference(self) -> None:
        """Compare the new version with the recorded values of the old one."""
        found, folder = self.new.ask("reference"), self.options.new / "tests" / "reference"
        steps, training = (json.loads((folder / f"{name}.json").read_text()) for name in ("steps", "training"))
        for name, values in found["steps"].items():
            old, new = ([step["loss"]] for step in (steps[name], values))
            row = {"old": old[0], "new": new[0], "at most": FLOAT64}
            row["difference"] = max(difference(old, new), difference(flat(steps[name]), flat(values)))
            self.add("values", f"{name}: loss and gradients of a step, float64", **row)
        for name, losses in found["losses"].items():
            one, two = training[name].values()
            row = {"old": one[-1], "new": losses[-1], "difference": difference(one, losses)}
            self.add("values", losses_of(name), **row | {"old, twice": difference(one, two)})

    def counts(self) -> None:
        """Add the sizes of both versions, the modules that an import loads, and the attack counts."""
        both = [counted(tree) for tree in (self.options.old, self.options.new)]
        for what in both[0]:
            self.add("counts", what, old=both[0][what], new=both[1][what])
        old, new = (json.loads(said(tree, PRESETS)) for tree in (self.options.old, self.options.new))
        equal = sum(new.get(name) == settings for name, settings in old.items())
        self.add("counts", "presets with the same settings as before", old=len(old), new=equal)

    def close(self) -> None:
        """Close both workers."""
        self.old.close()
        self.new.close()


def losses_of(preset: str) -> str:
    """The name of the row with a preset's losses."""
    return f"{preset}: losses of {FIRST} steps, the last and the largest difference"


def flat(step: Row) -> list[float]:
    """All recorded numbers of a step's gradients."""
    return [value for values in step["gradients"].values() for value in values]


def difference(old: list[float], new: list[float]) -> float:
    """The largest difference of two lists of numbers, relative to the largest number of the first."""
    if len(old) != len(new):
        raise ValueError(f"both versions must return equally many numbers; got {len(old)} and {len(new)}.")
    apart = max(abs(a - b) for a, b in zip(old, new, strict=True))
    return apart / max(map(abs, old)) if apart else 0.0


def counted(tree: Path) -> dict[str, float]:
    """Sizes of one version."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((tree / "iresnet").rglob("*.py"))]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    defined = [node.name for text in texts for node in ast.parse(text).body if isinstance(node, DEFINITION)]
    public = [name for name in defined if not name.startswith("_")]
    loaded = said(tree, "import sys, iresnet; print(sum(m.split('.')[0] == 'iresnet' for m in sys.modules))")
    exported = said(tree, "import iresnet; print(len(iresnet.__all__))")
    attacks = json.loads((tree / "results" / "attack.json").read_text())["rows"]
    return {
        "files of iresnet/": len(texts),
        "lines of iresnet/": sum(len(text.splitlines()) for text in texts),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "functions and methods": len(functions),
        "modules that import iresnet loads": int(loaded),
        "names that iresnet exports": int(exported),
        "public functions and classes": len(public),
        "public names that more than one module defines": sum(public.count(name) > 1 for name in set(public)),
        "attacks": sum(row["cases"] for row in attacks),
        "violations among them": sum(row["violations"] for row in attacks),
    }


def said(tree: Path, code: str) -> str:
    """What a line of Python prints with one version of the library."""
    words = [sys.executable, "-c", code]
    return subprocess.run(
        words, env=environment(tree), cwd=tree, capture_output=True, text=True, check=True
    ).stdout.strip()


# ----------------------------------------------------------------------------------------------------- results


def compare(options: argparse.Namespace) -> list[Row]:
    """Measure everything for one device; parts for which no time is left are skipped with a message."""
    start, comparison = time.perf_counter(), Comparison(options)
    if options.device == "cuda" or options.tiny:
        parts: list[Any] = [partial(comparison.step, what, preset) for what, preset in STEPS.items()]
        parts += [comparison.inverse, comparison.again]
    if options.device != "cuda":
        parts = [*(parts if options.tiny else []), comparison.counts, comparison.plane, comparison.demo]
        parts += [comparison.reference]
    for part in parts:
        if options.only and getattr(part, "func", part).__name__ != options.only:
            continue
        if (spent := time.perf_counter() - start) > options.seconds:
            print(f"skipped, no time left after {spent:.0f} s: {part}")
            continue
        part()
        if options.out:
            publish(comparison.rows, time.perf_counter() - start, options)
    comparison.close()
    return comparison.rows


def publish(rows: list[Row], seconds: float, options: argparse.Namespace) -> None:
    """Merge rows into the results file: replace matching rows and drop runs that no row refers to."""
    from iresnet.results import Results, provenance, read, write

    path = Path(options.out)
    before = read(path) if path.is_file() else Results(path.stem)
    words = ["python", "benchmarks/redesign.py", "--old", "OLD", "--device", options.device]
    words += ["--tiny"] if options.tiny else []
    run = provenance(seeds=[0], seconds=seconds, precision="float32, bfloat16, float64", command=shlex.join(words))
    run |= {"commit": options.commit or run["commit"], "old commit": options.old_commit or commit(options.old)}
    new = {(row["table"], row["what"], row["on"]) for row in rows}
    kept = [row for row in before.rows if (row["table"], row["what"], row["on"]) not in new]
    used = sorted({row["run"] for row in kept})
    merged = [row | {"run": used.index(row["run"])} for row in kept] + [row | {"run": len(used)} for row in rows]
    write(Results(path.stem, merged, [*(before.runs[i] for i in used), run]), path.parent)


def commit(tree: Path) -> str | None:
    """The commit of a checkout; None outside git."""
    found = subprocess.run(["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or None


def main() -> None:
    """Compare, print, and write the results file if --out is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="checkout of the old version")
    parser.add_argument("--new", type=Path, default=Path(__file__).parent.parent, help="checkout of the new version")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="results file to create or update")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="torch threads; default one on a CPU, as in the demo")
    parser.add_argument("--seconds", type=float, default=480.0, help="start no part after this time")
    parser.add_argument("--commit", help="commit of the new version, if its folder is not a git checkout")
    parser.add_argument("--old-commit", help="commit of the old version, likewise")
    parser.add_argument("--only", help="one part: step, inverse, again, counts, plane, demo or reference")
    parser.add_argument("--tiny", action="store_true", help="small networks and few steps: a dry run of every part")
    options = parser.parse_args()
    options.old, options.new = options.old.resolve(), options.new.resolve()
    if options.threads is None:
        options.threads = 0 if options.device == "cuda" else 1
    sys.path.insert(0, str(options.new))
    if options.out:
        from iresnet.results import require_commit

        require_commit(options.out.parent, {"commit": options.commit} if options.commit else None)
    compare(options)


if __name__ == "__main__":
    main()
