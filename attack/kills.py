"""Kills, interrupts and failing disks: an interrupted run resumes, and ends like an undisturbed one.

Whatever happens to a training, `train --resume` (or the same command again, if nothing was saved yet) must exit with 0
and leave the files of an undisturbed run: bitwise the same weights, the same certificate, and no other files.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from . import Violation, kind
from .faults import Fault
from .forkserver import HUNG, Completed, fork_server

#: A training of a third of a second with a checkpoint every few steps.
SETTINGS = (
    "width=4", "blocks=[1]", "steps=40", "batch=16", "warmup=2", "validate_every=13", "save_every=7",
)  # fmt: skip
TRAIN = (
    "train",
    "points-density",
    "--data-dir",
    "/nonexistent",
    *(word for setting in SETTINGS for word in ("--set", setting)),
)

#: Files that must agree with those of an undisturbed run, byte for byte.
SAME = ("config.toml", "schema.json", "data.json", "model.safetensors", "certificate.json")

#: Errors of a file system that cannot write.
ERRORS = ("ENOSPC", "EROFS", "EACCES", "EIO", "EDQUOT")


class Undisturbed(NamedTuple):
    """An undisturbed training: its files, the number of its writes, and its duration."""

    files: dict[str, bytes]
    names: list[str]
    writes: int
    seconds: float


@cache
def undisturbed(seed: int = 0) -> Undisturbed:
    """Train once without a fault."""
    with TemporaryDirectory() as place:
        begin = time.monotonic()
        run = Path(place) / "run"
        ended = fork_server().call(*_train_command(run, seed), folder=Path(place), fault=Fault(folder=str(run)))
        if ended.code:
            raise Violation(f"an undisturbed training exits with {ended.code}: {_last(ended)}")
        files = {name: (run / name).read_bytes() for name in SAME}
        writes = int(Path(f"{run}.writes").read_text())
        return Undisturbed(files, _names(run), writes, time.monotonic() - begin)


@kind("kills", cases=50, limit=180)
def kills(r: random.Random) -> str:
    """SIGKILL at random moments of a training and of its resumption, then `--resume`."""
    with TemporaryDirectory() as place:
        run, words = Path(place) / "run", _train_command(Path(place) / "run")
        for _ in range(r.randint(1, 3)):
            child = fork_server().start(*words, folder=Path(place))
            time.sleep(r.uniform(0, undisturbed().seconds))
            child.signal(signal.SIGKILL)
            _check_exit(child.wait(), (0, -signal.SIGKILL))
            words = _next_command(run)
        return check_recovery(run)


@kind("writes", cases=200, limit=180)
def writes(r: random.Random) -> str:
    """SIGKILL before, after and during the writes of a training, then `--resume`."""
    with TemporaryDirectory() as place:
        run, words = Path(place) / "run", _train_command(Path(place) / "run")
        for _ in range(r.randint(1, 2)):
            ended = fork_server().call(*words, folder=Path(place), fault=_kill_fault(r, run))
            _check_exit(ended, (0, -signal.SIGKILL, -signal.SIGXFSZ))
            words = _next_command(run)
        return check_recovery(run)


@kind("disks", cases=100, limit=180)
def disks(r: random.Random) -> str:
    """A full disk, or a folder that becomes read-only or moves while it is written to, then `--resume`."""
    with TemporaryDirectory() as place:
        run, at = Path(place) / "run", r.randint(1, undisturbed().writes)
        fault = r.choice((
            Fault("deny", at, str(run), r.choice(ERRORS)),
            Fault("deny", 0, str(run), largest=_size(r)),
            Fault("move", at, str(run)),
        ))  # fmt: skip
        ended = fork_server().call(*_train_command(run), folder=Path(place), fault=fault)
        _check_exit(ended, (0, 1, 2))
        moved = Path(f"{run}.moved")
        return check_recovery(moved if moved.is_dir() and (moved / "config.toml").exists() else run)


@kind("interrupts", cases=50, limit=180)
def interrupts(r: random.Random) -> str:
    """Ctrl-C and SIGTERM at random moments, once or twice, then `--resume`."""
    with TemporaryDirectory() as place:
        run, number = Path(place) / "run", r.choice((signal.SIGINT, signal.SIGTERM))
        child = fork_server().start(*_train_command(run), folder=Path(place))
        time.sleep(r.uniform(0.05, undisturbed().seconds))
        for _ in range(r.randint(1, 2)):
            child.signal(number)
            time.sleep(r.choice((0.001, 0.05, 1.2)))
        ended = child.wait()
        _check_exit(ended, (0, 130, -number))
        if ended.code == 130 and "Stopped" not in ended.out:
            raise Violation(f"{number.name} printed {_last(ended)!r} instead of 'Stopped'")
        return check_recovery(run)


@kind("early", cases=10, limit=180)
def early(r: random.Random) -> str:
    """Ctrl-C while the command is still importing: no traceback."""
    with TemporaryDirectory() as place:
        words = [sys.executable, "-m", "iresnet", *_train_command(Path(place) / "run")]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=place)
        time.sleep(r.uniform(0.3, 4))  # earlier, the interpreter itself is starting
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        _check_exit(Completed(process.returncode, out, err), (0, 130, -signal.SIGINT))
        return check_recovery(Path(place) / "run")


@kind("pairs", cases=50, limit=180)
def pairs(r: random.Random) -> str:
    """Two trainings into one folder at once: one is rejected with a message, the other is undisturbed."""
    with TemporaryDirectory() as place:
        run, seeds = Path(place) / "run", (0, 1)
        children = []
        for seed in seeds:
            children.append(fork_server().start(*_train_command(run, seed), folder=Path(place)))
            time.sleep(r.choice((0.0, 0.01, r.uniform(0, undisturbed().seconds))))
        endings = [child.wait() for child in children]
        for ended in endings:
            _check_exit(ended, (0, 1, 2))
        codes = [ended.code for ended in endings]
        if codes.count(0) != 1:
            raise Violation(f"two trainings into one folder exit with {codes}: {_last(endings[1])}")
        _compare(run, undisturbed(seeds[codes.index(0)]))
        return "one refused"


# ------------------------------------------------------------------------------------------------------- what must hold


def check_recovery(run: Path) -> str:
    """Resume a run, or restart it if nothing was saved; its files must then equal those of an undisturbed run."""
    ended, outcome = fork_server().call(*_resume_command(run), folder=run.parent), "resumed"
    if ended.code and not (run / "last.safetensors").exists():  # there was nothing to resume from
        _check_exit(ended, (1, 2))
        ended, outcome = fork_server().call(*_train_command(run), folder=run.parent), "started anew"
    _check_exit(ended, (0,))
    _compare(run, undisturbed())
    return outcome


def _compare(run: Path, wanted: Undisturbed) -> None:
    for name, content in wanted.files.items():
        path = run / name
        if not path.is_file():
            raise Violation(f"{name} is missing after the run")
        if path.read_bytes() != content:
            raise Violation(f"{name} differs from that of an undisturbed run")
    extra = sorted({*_names(run)} - {*wanted.names})
    if extra:
        raise Violation(f"left behind: {', '.join(extra)}")


def _check_exit(ended: Completed, codes: tuple[int, ...]) -> None:
    if ended.code == HUNG:
        raise Violation("it hangs")
    if "Traceback" in ended.err:
        raise Violation(f"a traceback: {_last(ended)}")
    if ended.code not in codes:
        raise Violation(f"exit code {ended.code}: {_last(ended)}")


def _last(ended: Completed) -> str:
    return ((ended.err.strip() or ended.out.strip()).splitlines() or [""])[-1][:300]


def _names(run: Path) -> list[str]:
    """The names in a run folder, not those in its subfolders: TensorBoard chooses its own."""
    return sorted(path.name for path in run.iterdir())


def _train_command(run: Path, seed: int = 0) -> tuple[str, ...]:
    return (*TRAIN, "--seed", str(seed), "--out", str(run))


def _resume_command(run: Path) -> tuple[str, ...]:
    return ("train", "--resume", "--out", str(run))


def _next_command(run: Path) -> tuple[str, ...]:
    """The command that a user would type after the training died."""
    return _resume_command(run) if (run / "last.safetensors").exists() else _train_command(run)


def _kill_fault(r: random.Random, run: Path) -> Fault:
    if r.random() < 0.25:
        return Fault("kill", 0, str(run), largest=_size(r))
    return Fault("kill", r.randint(1, undisturbed().writes), str(run))


def _size(r: random.Random) -> int:
    """A size that some file of a run may exceed."""
    return r.randint(1, r.choice([len(content) for content in undisturbed().files.values()]) + 100)
