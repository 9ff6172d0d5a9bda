"""Random command lines: each must exit with 0, 1 or 2, with a one-line message unless 0, and write only where told to.

Commands, arguments and options come from the definition of the command line, so new ones are attacked automatically.
Values are valid (`VALID`, by the name of the parameter) or not (`HOSTILE`).
"""

from __future__ import annotations

import json
import random
import re
import signal
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer

from iresnet.cli import app

from . import Violation, kind
from .faults import OUTSIDE, Fault
from .fixtures import RUNS, copy_of, fixture
from .forkserver import HUNG, Completed, fork_server
from .limits import MIB

HOSTILE = (
    "", " ", "-", "--", "-1", "0", "1", "2", "0.5", "nan", "inf", "-inf", "1e400", "1e-320", "1e308", str(2**63),
    str(-(2**63) - 1), str(2**64), "9" * 30, "9" * 5000, "1_000", "٣", "true", "None", "é", "\u202e", "💥", "a\nb",
    "\x1b[31mred", "\udcff", "x" * 300, "x" * 5000, "..", "../..", ".", "/proc/self/mem", "full",
    "[red]", ":boom:", "%s%n", "{0}", "$(id)", "'", '"', "a=b", "=", "a,b", "-n", "--out", "*", "\\", "~", "~root",
    "cuda", "cuda:99", "cpu:1", "meta", "file.csv", "missing/file.csv", "config.toml", "con", "1 2",
)  # fmt: skip

#: Values of parameters that multiply the work: small or invalid.
COUNTS = ("0", "-1", "1", "2", "3", "5", "abc", "1.5", "", "1e3", "٣", "0x10", " 2")

#: Valid values by the name of a parameter.
VALID: dict[str, tuple[str, ...]] = {
    "run": ("run", "run", "run", "run", "mnist-classifier", "missing"),
    "what": (
        *["points-density"] * 6,
        *["toy-glow", "toy-iresnet"] * 2,
        "digits-classifier",
        "table-hybrid",
        "mine.toml",
    ),
    "preset": ("points-density", "toy-iresnet"),
    "data": ("moons", "digits", "rows.csv", "rows.npy", "images", "mnist", "images.npz"),
    "file": ("moons", "digits", "rows.csv", "rows.npy", "images", "numbers.csv", "images.npz"),
    "label": ("kind", "length", ""),
    "data_dir": (".", "data"),
    "folder": (".", "data"),
    "device": ("cpu", "auto"),
    "split": ("test", "validation", "train"),
    "out": ("out", "deep/er/out", "run", "rows.csv", "images", "out.csv", "out.html", "full", "run/config.toml"),
    "runs": ("models", "run"),
    "codes": ("codes.npy", "rows.npy", "rows.csv", "run"),
    "precision": ("float32", "float64"),
    "solver": ("anderson", "banach"),
    "weights": ("model", "best"),
    "kind": ("rose", "0"),
    "radius": ("0.1", "36", "1e9", "1e-9"),
    "limit": ("0.1", "1"),
    "ood": ("corrupted", "moons", "rows.csv"),
    "temperature": ("1", "0.5"),
    "tolerance": ("1e-3", "1e-9"),
    "only": ("toy", "digits"),
    "density": ("moons", "spirals"),
    "budget": ("smoke", "short", "paper"),
    "dataset": ("digits", "mnist"),
    "cells": ("c=0.9", "vanilla"),
    "recipe": ("ours", "paper"),
    "name": ("digits-hybrid", "iresnet164-c0.7", "points-density"),
    "names": ("mnist", "cifar10"),
    "seed": ("0", "1", "12345"),
    "threads": ("1", "2"),
}
#: Options that often conflict with others.
UNLIKELY = ("preset", "resume_", "data_dir", "folder")
NUMBERS = ("count", "draws", "pairs", "steps", "rows", "threads")

#: Settings that keep a training short; `--set` may replace all but the first two.
SMALL = {
    "training.steps": "2", "training.epochs": "0", "network.width": "4", "network.blocks": "[1]",
    "training.batch": "8",
}  # fmt: skip
BOUNDED = ("training.steps", "training.epochs")

#: Settings to attack, and values for them; large values must be rejected, since nothing else would stop them.
SETTINGS = (
    "seed", "name", "about", "data.source", "data.validation", "data.test", "data.labelled", "data.size", "data.shift",
    "data.seed", "network.family", "network.blocks", "network.width", "network.depth", "network.kernels",
    "network.tail", "network.lipschitz", "network.activation", "network.frequency", "network.components",
    "network.head", "network.dropout", "network.terms", "network.padding", "network.dequantiser", "network.alpha",
    "objective.kind", "objective.weight", "objective.radius", "training.batch", "training.learning_rate",
    "training.optimiser", "training.betas", "training.clip", "training.average", "training.warmup",
    "acceleration.graph", "nothing", "steps", "network", "training.milestones", "data.augment", "",
)  # fmt: skip
SIZES = (
    "0", "-1", "1", "2", "3", "7", "1000000", "1000000000", "1" + "0" * 30, "0.5", "1e-9", "1e-300", "1e30", "1e308",
    "-0.0", "nan", "inf", "[1]", "[2]", "[3, 3]", "[1000000]", "[0.1, 0.2]", "[1e-300, 0.5]", "[]",
)  # fmt: skip
VALUES = (
    *HOSTILE, "[]", "[1]", "[0]", "[-1]", "[1000000000]", "[1, 1, 1, 1]", "[0.5, 0.5]", "1000000000", "1000000",
    "{}", "[" * 3000, "1e-9", "density", "classification", "hybrid", "iresnet", "resnet", "glow", "elu", "sgd",
    "adamax", "moons", "digits",
)  # fmt: skip

#: Probabilities that a value is invalid.
WILDNESS = (0.0, 0.1, 0.1, 0.3, 0.9)

#: Relative frequency of commands: training has the most settings, some commands take many seconds, and `bench` minutes.
SHARES = {"train": 60, "demo": 1, "export": 1, "reproduce": 1, "bench": 0}

SECONDS, MEMORY = 40, 3072 * MIB


@kind("commands", cases=1000, limit=600)
def commands(r: random.Random) -> str:
    """Command lines generated from the definition of every command, valid and invalid."""
    names = list(cli_commands())
    name = r.choices(names, [SHARES.get(name, 12) for name in names])[0]
    with TemporaryDirectory(prefix="iresnet-attack-") as place:
        folder = _workspace(r, Path(place))
        words = CommandLine(r, r.choice(WILDNESS)).words(name)
        fault = Fault("confine", folder=place, memory=MEMORY, seconds=SECONDS)
        ended = fork_server().call(*words, folder=folder, fault=fault, seconds=6 * SECONDS)
        return check_exit(words, ended)


@cache
def cli_commands() -> dict[str, Any]:
    """Every command of the command line, by its name."""
    group: Any = typer.main.get_command(app)
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        found |= {f"{name} {n}": c for n, c in inner.items()} if inner else {name: command}
    return found


def check_exit(words: list[str], ended: Completed) -> str:
    """Return the exit code as the outcome, or raise `Violation`."""
    line = " ".join(repr(w) if len(w) < 80 else f"{w[:20]!r}...x{len(w)}" for w in words)
    error, notes = ended.err.strip(), ""
    usage = error.startswith(("Usage:", "╭─ Error"))
    if "--json" in words and not usage and "Traceback" not in error:
        # All but the result goes to stderr; an error is its last line.
        *before, error = error.splitlines() if ended.code and error else [*error.splitlines(), ""]
        notes = "\n".join(before)
        if ended.code == 0 and "--help" not in words and not _is_json(ended.out):
            raise Violation(f"{line}: --json printed {ended.out[:300]!r}")
    if ended.code in (HUNG, -signal.SIGKILL, -signal.SIGXCPU):
        raise Violation(f"{line}: it hangs, more than {SECONDS} s")
    if ended.code == OUTSIDE:
        raise Violation(f"{line}: {error.splitlines()[-1]}, outside its folder")
    if "Traceback" in ended.err + ended.out:
        raise Violation(f"{line}: a traceback: {error.splitlines()[-1][:200]}")
    if ended.code not in (0, 1, 2):
        raise Violation(f"{line}: exit code {ended.code}: {error[-200:]}")
    if ended.code and not usage and not (error.startswith("iresnet: ") and len(error) > len("iresnet: ")):
        raise Violation(f"{line}: exit code {ended.code} without a message: {error[-200:]!r}")
    if not usage and re.search(r"[\x00-\x1f\x7f\u202e\ufffd]", error):
        raise Violation(f"{line}: more than one line, or control characters: {error[:300]!r}")
    if re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e\ufffd]", notes):
        raise Violation(f"{line}: control characters: {notes[:300]!r}")
    if ended.code == 0 and error:
        raise Violation(f"{line}: exit code 0 with {error[:300]!r}")
    return f"exit code {ended.code}"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------------- generation


def _workspace(r: random.Random, place: Path) -> Path:
    """A working directory with a run, datasets and settings."""
    folder = place / "work"
    folder.mkdir()
    copy_of(r.choice(RUNS), folder / "run")
    copy_of("images", folder / "images")
    for name in ("csv/rows.csv", "csv/numbers.csv", "npz/rows.npy", "npz/images.npz", "npz/codes.npy"):
        source = fixture(name.partition("/")[0]) / name.partition("/")[2]
        (folder / source.name).write_bytes(source.read_bytes())
    (folder / "full").symlink_to("/dev/full")
    (folder / "mine.toml").write_bytes((fixture("settings") / "digits-hybrid.toml").read_bytes())
    return folder


@dataclass(frozen=True)
class CommandLine:
    """Generates a command line; `wild` is the probability that a word is invalid."""

    r: random.Random
    wild: float

    def words(self, name: str) -> list[str]:
        """The words of a command line for this command."""
        command = cli_commands()[name]
        if name == "train" and self._chance(0.15):
            return ["train", "--resume", "--out", self.value("run"), *self._junk()]
        return [*name.split(), *self._arguments(command), *self._options(command), *self._junk()]

    def value(self, parameter: str) -> str:
        """A value of a parameter."""
        if not self._invalid() and parameter in VALID:
            return self.r.choice(VALID[parameter])
        return self.r.choice(COUNTS if parameter in NUMBERS else HOSTILE)

    def _arguments(self, command: Any) -> list[str]:
        words = []
        for parameter in command.params:
            wanted = 1.0 if parameter.required else 0.9
            if parameter.param_type_name == "argument" and self._chance(wanted) and not self._chance(self.wild / 9):
                words += [
                    self.value(parameter.name) for _ in range(1 if parameter.nargs == 1 else self.r.randint(1, 2))
                ]
        return words

    def _options(self, command: Any) -> list[str]:
        words: list[str] = []
        for parameter in command.params:
            likely = self.wild if parameter.name in UNLIKELY else 0.25
            if parameter.param_type_name != "option" or not self._chance(likely) or parameter.name in ("set_", "steps"):
                continue
            for _ in range(1 + self._chance(0.1)):
                words += [self.r.choice(parameter.opts)] + ([] if parameter.is_flag else [self.value(parameter.name)])
        names = {parameter.name for parameter in command.params}
        words += self._settings() if "set_" in names and "--resume" not in words else []
        return words + (
            ["--steps", self.r.choice(COUNTS if self._invalid() else ("2", "3"))] if "steps" in names else []
        )

    def _settings(self) -> list[str]:
        """Assignments that keep a training short, and perhaps a few hostile ones."""
        chosen = dict(SMALL)
        for _ in range(self.r.choice((0, 1, 1, 2)) if self.wild else 0):
            chosen[self.r.choice(SETTINGS)] = self.r.choice(VALUES if self._invalid() else SIZES)
        chosen |= {key: SMALL[key] for key in BOUNDED}
        words = [f"{key}={value}" for key, value in chosen.items() if key != "steps"]
        return [word for assignment in words for word in ("--set", assignment)]

    def _junk(self) -> list[str]:
        """Perhaps an unknown option, or an option without its value."""
        others = (["--help"], ["--nonsense"], ["--version"], ["--device"], [self.r.choice(HOSTILE)], ["-n", "-n"])
        return self.r.choice(others) if self._chance(self.wild / 4) else []

    def _invalid(self) -> bool:
        return self._chance(self.wild)

    def _chance(self, part: float) -> bool:
        return self.r.random() < part
