"""`python -m attack`: run attacks, print every violation with what reproduces it, and count them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path

from iresnet.results import provenance

from . import Kind, load
from .count import Count, merge
from .run import attack_all, blocks, one
from .shrinking import smallest


def main() -> int:
    """Run what the command line asks for; 1 where there was a violation."""
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
        print(one(chosen[0], options.seed, options.case))
        return 0
    if options.hypothesis is not None:
        return _smallest(chosen, options.hypothesis)
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


def _smallest(chosen: list[Kind], cases: int) -> int:
    found = {kind.name: smallest(kind, cases) for kind in chosen}
    for name, error in found.items():
        print(f"{name}: {'no violation' if error is None else f'{type(error).__name__}: {error}'}")
    return int(any(found.values()))


def _run(chosen: list[Kind], options: argparse.Namespace) -> list[Count]:
    total = {kind.name: Count(kind.name, options.seed) for kind in chosen}
    todo = [block for kind in chosen for block in blocks(kind, _cases(kind, options), options.seed)]
    for count in attack_all(todo, options.workers):
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
    parser.add_argument("--kind", nargs="+", default=[], help="kinds of cases; all where none is named")
    parser.add_argument("--cases", type=int, help="cases of each kind; as many as a full run has where not given")
    parser.add_argument("--part", type=float, default=1.0, help="this part of a full run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="one case of one kind, in this process, with its traceback")
    parser.add_argument("--hypothesis", type=int, metavar="CASES", help="let hypothesis find and shrink violations")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--out", type=Path, help="results file to merge the counts into, e.g. results/attack.json")
    parser.add_argument("--list", action="store_true", help="list the kinds")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
