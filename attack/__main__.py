"""`python -m attack`: run attacks, print every violation with the command that reproduces it, and count outcomes."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path

from iresnet.results import provenance, require_commit

from . import Kind, load
from .count import Count, merge
from .run import run_blocks, run_case, split_cases
from .shrinking import find_smallest


def main() -> int:
    """Run the command; return 1 if there was a violation."""
    options, kinds = _options(), load()
    unknown = [name for name in options.kind if name not in kinds]
    if unknown:
        print(f"--kind must be among {', '.join(sorted(kinds))}; got {', '.join(unknown)}.", file=sys.stderr)
        return 2
    chosen = [kinds[name] for name in options.kind or sorted(kinds) if options.kind or kinds[name].cases]
    if options.list:
        print("\n".join(f"{kind.name:<14} {kind.cases:>7} cases  {kind.about}" for kind in chosen))
        return 0
    if options.case is not None:
        print(run_case(chosen[0], options.seed, options.case))
        return 0
    if options.hypothesis is not None:
        return _find_smallest(chosen, options.hypothesis)
    try:
        if options.out:
            require_commit(options.out.parent)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    begin = time.perf_counter()
    counts = _run(chosen, options)
    if options.out:
        command = shlex.join(["python", "-m", "attack", *sys.argv[1:]])
        run = provenance(
            seeds=[options.seed],
            seconds=time.perf_counter() - begin,
            precision="float16 to float64",
            command=command,
        )
        print(merge(counts, run, options.out))
    return int(any(count.violations for count in counts))


def _find_smallest(chosen: list[Kind], cases: int) -> int:
    found = {kind.name: find_smallest(kind, cases) for kind in chosen}
    for name, error in found.items():
        print(f"{name}: {'no violation' if error is None else f'{type(error).__name__}: {error}'}")
    return int(any(found.values()))


def _run(chosen: list[Kind], options: argparse.Namespace) -> list[Count]:
    total = {kind.name: Count(kind.name, options.seed) for kind in chosen}
    todo = [block for kind in chosen for block in split_cases(kind, _cases(kind, options), options.seed)]
    for count in run_blocks(todo, options.workers):
        total[count.kind].add(count)
        for violation in count.violations:
            print(f"python -m attack {violation}", flush=True)
    print("\n".join(map(str, total.values())))
    print(f"{sum(count.cases for count in total.values())} cases")
    return list(total.values())


def _cases(kind: Kind, options: argparse.Namespace) -> int:
    return max(1, round(kind.cases * options.part)) if options.cases is None else options.cases


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m attack", description="Attack the library's claims.")
    parser.add_argument("--kind", nargs="+", default=[], help="kinds of cases; default: all")
    parser.add_argument("--cases", type=int, help="cases of each kind; default: those of a full run")
    parser.add_argument("--part", type=float, default=1.0, help="fraction of a full run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run one case of one kind in this process, with its traceback")
    parser.add_argument(
        "--hypothesis", type=int, metavar="CASES", help="let hypothesis search for violations and shrink them"
    )
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="number of worker processes")
    parser.add_argument("--out", type=Path, help="results file to update, e.g. results/attack.json")
    parser.add_argument("--list", action="store_true", help="list the kinds")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
