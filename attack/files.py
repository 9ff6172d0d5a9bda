"""Damaged and hostile files: every reader either works or raises an error with a one-line message that names the file.

The command line turns a `ValueError` or an `OSError` into that message and exit code 2. Anything else is a violation:
another exception, a message that does not name the file, more than ten seconds or 192 MiB, or changed weights that are
read as if they were the original ones.
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

from . import Violation, containers, damage, kind, replacements
from .damage import Damage
from .fixtures import copy_of, fixture, root
from .limits import MIB, limited
from .readers import DATA_READERS, RUN_READERS, Reader, read_quietly

#: The ways to damage a file, by the ending of its name.
DAMAGES: dict[str, tuple[Damage, ...]] = {
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

#: The fractions of cases with a decompression bomb and with a replaced file, and of damaged checkpoints with a
#: recomputed digest: nothing can detect such changes, but the weights must still fit the model.
BOMBS, REPLACED, REHASHED = 0.004, 0.05, 0.5
REHASH = "rehashed "

#: A message may name a member of an archive instead of the file.
MEMBERS = ("cifar-10-batches-bin/", "cifar-100-binary/")

#: The length from which a message is too long.
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
    """Damage one file of one reader, then read it."""
    reader = r.choices(readers, [reader.weight for reader in readers])[0]
    wanted = expected(reader)
    with TemporaryDirectory(prefix="iresnet-attack-") as place:
        folder = copy_of(reader.fixture, Path(place) / "files")
        path = r.choice([p for pattern in reader.files.split() for p in matching(folder, pattern)])
        what = _damaged(r, path, reader)
        return check_reader(reader, folder, path, what, None if what.startswith(REHASH) else wanted)


def check_reader(reader: Reader, folder: Path, path: Path, what: str, wanted: Any) -> str:
    """Read a folder with a damaged file: return "read" or "refused", or raise `Violation`."""
    where = f"{what} of {reader.fixture}/{path.relative_to(folder)} for {reader.read.__name__.strip('_')}"
    try:
        with limited(SECONDS, MEMORY), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = read_quietly(reader, folder)
    except Violation as violation:
        raise Violation(f"{where}: {violation}") from None
    except (ValueError, OSError) as error:
        return _refused(error, folder, path, where)
    except TrainingError:
        if what.startswith(REHASH):  # a training state with a valid digest may diverge
            return "read"
        raise Violation(f"{where}: the training diverged") from None
    except Exception as error:
        raise Violation(f"{where}: {type(error).__name__}: {str(error)[:150]}") from error
    if wanted is not None and found != wanted:
        raise Violation(f"{where}: read as if it were undamaged")
    return "read"


def _refused(error: Exception, folder: Path, path: Path, where: str) -> str:
    text = str(error)
    if not text.strip() or "\n" in text.strip():
        raise Violation(f"{where}: not one line: {text[:200]!r}") from error
    if len(text) >= LONG:
        raise Violation(f"{where}: a message of {len(text)} characters: {text[:200]!r}") from error
    if not any(name in text for name in (str(folder), str(root()), path.name, path.stem, *MEMBERS)):
        raise Violation(f"{where}: the message names no file: {type(error).__name__}: {text[:200]!r}") from error
    return "refused"


@cache
def expected(reader: Reader) -> Any:
    """What a reader returns for undamaged files."""
    with TemporaryDirectory(prefix="iresnet-attack-") as place:
        return read_quietly(reader, copy_of(reader.fixture, Path(place) / "files"))


def matching(folder: Path, pattern: str) -> list[Path]:
    """The files that match a pattern; "*" alone matches all files in all subfolders."""
    found = folder.rglob("*") if pattern == "*" else folder.glob(pattern)
    return sorted(path for path in found if path.is_file())


def _damaged(r: random.Random, path: Path, reader: Reader) -> str:
    """Damage a file in one way; return the name of the way."""
    if reader.exchange:
        path.write_bytes((fixture(f"{reader.fixture}-1") / path.name).read_bytes())
        return "exchange"
    ending, chance = next((e for e in DAMAGES if path.name.endswith(e)), ""), r.random()
    if chance < REPLACED:
        usable = [f for f in replacements.REPLACEMENTS if f is not replacements.pipe or not reader.writes]
        replace = r.choice(usable)
        path.unlink()
        replace(r, path)
        return replace.__name__
    if chance > 1 - BOMBS and ending in (".npz", ".gz"):
        path.write_bytes(containers.BOMBS[ending](r, path.read_bytes()))
        return "bomb"
    damage_file = r.choice(DAMAGES.get(ending, damage.BYTES))
    content = damage_file(r, path.read_bytes())
    rehashed = ending == ".safetensors" and r.random() < REHASHED
    path.write_bytes(containers.with_digest(content) if rehashed else content)
    return f"{REHASH * rehashed}{damage_file.__name__}"
