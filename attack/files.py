"""Damaged and hostile files: every reader either works or raises an error whose one sentence names the file.

The command line turns a `ValueError` or an `OSError` into that sentence and exit code 2. Anything else is a violation:
another exception, a sentence without the file, more than ten seconds or 192 MiB, or weights that were changed and are
read as if they were the run's.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from iresnet.train.guard import TrainingError

from . import Violation, containers, damage, kind, places
from .damage import Damage
from .fixtures import copy_of, made, root
from .limits import MIB, limited
from .readers import DATA_READERS, RUN_READERS, Reader, quietly

#: How files are damaged, by the ending of their name.
WAYS: dict[str, tuple[Damage, ...]] = {
    ".json": damage.JSON,
    ".toml": damage.TOML,
    ".csv": damage.TABLE,
    ".tsv": damage.TABLE,
    ".safetensors": containers.CHECKPOINT,
    ".npy": containers.NPY,
    ".npz": containers.NPZ,
    ".tar.gz": containers.TAR,
    ".gz": containers.GZ,
    ".png": containers.IMAGE,
}

#: The parts of cases with a bomb, with something else in the file's place, and of checkpoints with the right digest of
#: what is wrong: nothing tells such weights from others, but they must fit.
BOMBS, ELSEWHERE, HOSTILE = 0.004, 0.05, 0.5
SIGNED = "signed "

#: Members of an archive are files too.
MEMBERS = ("cifar-10-batches-bin/", "cifar-100-binary/")

#: Characters of a sentence that no terminal shows.
LONG = 20_000

SECONDS, MEMORY = 10.0, 192 * MIB


@kind("run-files", cases=5000)
def run_files(r: random.Random) -> str:
    """Damaged files of a run: settings, schema, checkpoints, log, certificate, evaluation."""
    return attack(r, RUN_READERS)


@kind("data-files", cases=5000)
def data_files(r: random.Random) -> str:
    """Damaged data, settings and results: CSV, NPY, NPZ, idx, CIFAR, images, TOML, JSON."""
    return attack(r, DATA_READERS)


def attack(r: random.Random, readers: Sequence[Reader]) -> str:
    """Damage one file of one reader, and read it."""
    reader = r.choices(readers, [reader.weight for reader in readers])[0]
    wanted = sound(reader)
    with TemporaryDirectory(prefix="iresnet-attack-") as place:
        folder = copy_of(reader.fixture, Path(place) / "files")
        path = r.choice([p for pattern in reader.files.split() for p in matching(folder, pattern)])
        what = _damaged(r, path, reader)
        return verdict(reader, folder, path, what, None if what.startswith(SIGNED) else wanted)


def verdict(reader: Reader, folder: Path, path: Path, what: str, wanted: Any) -> str:
    """Read a folder in which a file was damaged: "read" or "refused", or a violation."""
    where = f"{what} of {reader.fixture}/{path.relative_to(folder)} for {reader.read.__name__.strip('_')}"
    try:
        with limited(SECONDS, MEMORY), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = quietly(reader, folder)
    except Violation as violation:
        raise Violation(f"{where}: {violation}") from None
    except (ValueError, OSError) as error:
        return _refused(error, folder, path, where)
    except TrainingError:
        if what.startswith(SIGNED):  # a state of training that fits its digest and diverges is what the run was left in
            return "read"
        raise Violation(f"{where}: it diverged") from None
    except Exception as error:
        raise Violation(f"{where}: {type(error).__name__}: {str(error)[:150]}") from error
    if wanted is not None and found != wanted:
        raise Violation(f"{where}: read as if it were sound")
    return "read"


def _refused(error: Exception, folder: Path, path: Path, where: str) -> str:
    text = str(error)
    if not text.strip() or "\n" in text.strip():
        raise Violation(f"{where}: not one line: {text[:200]!r}") from error
    if len(text) >= LONG:
        raise Violation(f"{where}: a sentence of {len(text)} characters: {text[:200]!r}") from error
    if not any(name in text for name in (str(folder), str(root()), path.name, path.stem, *MEMBERS)):
        raise Violation(f"{where}: the sentence names no file: {type(error).__name__}: {text[:200]!r}") from error
    return "refused"


@cache
def sound(reader: Reader) -> Any:
    """What a reader returns of sound files."""
    with TemporaryDirectory(prefix="iresnet-attack-") as place:
        return quietly(reader, copy_of(reader.fixture, Path(place) / "files"))


def matching(folder: Path, pattern: str) -> list[Path]:
    """The files of a pattern; * alone means all, however deep."""
    found = folder.rglob("*") if pattern == "*" else folder.glob(pattern)
    return sorted(path for path in found if path.is_file())


def _damaged(r: random.Random, path: Path, reader: Reader) -> str:
    """Damage a file in one way, and name the way."""
    if reader.exchange:
        path.write_bytes((made(f"{reader.fixture}-1") / path.name).read_bytes())
        return "exchange"
    ending, chance = next((e for e in WAYS if path.name.endswith(e)), ""), r.random()
    if chance < ELSEWHERE:
        way = r.choice([place for place in places.PLACES if place is not places.pipe or not reader.writes])
        path.unlink()
        way(r, path)
        return way.__name__
    if chance > 1 - BOMBS and ending in (".npz", ".gz"):
        path.write_bytes(containers.BOMBS[ending](r, path.read_bytes()))
        return "bomb"
    damaging = r.choice(WAYS.get(ending, damage.BYTES))
    content = damaging(r, path.read_bytes())
    hostile = ending == ".safetensors" and r.random() < HOSTILE
    path.write_bytes(containers.signed(content) if hostile else content)
    return f"{SIGNED * hostile}{damaging.__name__}"
