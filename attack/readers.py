"""Every reader of the library as a function of the folder of its files, for `attack.files` to damage them.

A reader that returns something other than None promises that damage is noticed: where it still reads a damaged file,
it must return what it returned of the sound one.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from iresnet import run
from iresnet.cli.certify import certify
from iresnet.cli.evaluate import evaluate
from iresnet.cli.invert import _read_codes
from iresnet.cli.report import report
from iresnet.data import DataSettings, Schema, download, load, read
from iresnet.presets import find
from iresnet.reproduce import evaluation, record
from iresnet.run import Run
from iresnet.train import checkpoint

from .fixtures import RUNS

FLOWER = Schema((3,), columns=("length", "width", "height"), label="kind", classes=("rose", "tulip"))
PHOTO = Schema((3, 8, 8), 256, classes=("cat", "dog"))
JSONS = ("data.json", "environment.json", "certificate.json", "evaluation.json")


@dataclass(frozen=True)
class Reader:
    """What is read: the fixture, the files of it that are damaged, and how.

    `weight` is its share of the cases; with `exchange` a file is replaced by that of a run of other weights.
    """

    fixture: str
    files: str
    read: Callable[[Path], Any]
    weight: int = 1
    exchange: bool = False

    @property
    def writes(self) -> bool:
        """Whether it writes to the folder too: a pipe that nobody reads from makes everybody wait who writes to it."""
        return self.read in (_resumed, _resumed_by_other_settings, _finished, _reported, _evaluated, _certified)


# ----------------------------------------------------------------------------------------------------------------- runs


def function_of(model: nn.Module, shape: Sequence[int]) -> str:
    """A hash of a model's state and of what it makes of a few inputs."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    transform: Any = model.transform
    x = torch.linspace(0.1, 0.9, 4 * math.prod(shape)).reshape(4, *shape)
    with torch.no_grad():
        digest.update(transform(x)[0].numpy().tobytes())
    return digest.hexdigest()


def _model(folder: Path) -> str:
    return function_of(run.load(folder), Run.open(folder).schema.shape)


def _best(folder: Path) -> str:
    opened = Run.open(folder)
    return f"{sorted(opened.best_metrics().items())} {function_of(opened.model('best'), opened.schema.shape)}"


def _released(folder: Path) -> str:
    opened = Run.open(folder)
    reference = hashlib.sha256(opened.reference().numpy().tobytes()).hexdigest()
    return f"{opened.tightened_layers()} {reference}"


def _small_files(folder: Path) -> None:
    opened = Run.open(folder)
    opened.log()
    for name in JSONS:
        opened.read_json(name)
    opened.splits()


def _resumed(folder: Path) -> str:
    run.resume(folder)
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def _resumed_by_other_settings(folder: Path) -> None:
    run.resume(folder)


def _finished(folder: Path) -> bool:
    run.resume(folder)
    return _bound(folder)


def _reported(folder: Path) -> bool:
    report(folder, device="cpu")
    return _bound(folder)


def _bound(folder: Path) -> bool:
    """Whether the certificate and the evaluation, where they name a model, name the one beside them."""
    opened, model = Run.open(folder), checkpoint.sha256(folder / "model.safetensors")
    said = [opened.read_json(f"{name}.json").get("model_sha256") for name in ("certificate", "evaluation")]
    return all(digest in (None, "", 0, model) for digest in said)


def _evaluated(folder: Path) -> None:
    evaluate(folder, rows=10, draws=2, device="cpu")


def _certified(folder: Path) -> None:
    certify(folder, device="cpu")


def _reproduced(folder: Path) -> None:
    opened = Run.open(folder)
    if opened.read_json("reproduction.json"):  # where there is none, the test images are read anew
        evaluation.evaluate_cell(None, opened, None)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------------- data


def _settings(folder: Path) -> None:
    for path in sorted(folder.glob("*.toml")):
        find(str(path))


def _loaded(name: str, label: str = "") -> Callable[[Path], None]:
    def loaded(folder: Path) -> None:
        load(DataSettings(str(folder / name), label=label, validation=0.3))

    return loaded


def _read(name: str, schema: Schema) -> Callable[[Path], None]:
    def reading(folder: Path) -> None:
        read(str(folder / name), schema)

    return reading


def _built_in(name: str) -> Callable[[Path], None]:
    def built_in(folder: Path) -> None:
        for part in ("train", "test"):
            read(name, download_schema(name), folder=str(folder), part=part)
        download.verify(name, folder)
        download.is_present(name, folder)

    return built_in


def download_schema(name: str) -> Schema:
    """What a row of a downloaded set is."""
    from iresnet.data.source import schema_of

    return schema_of(name)


def _results(folder: Path) -> None:
    record.merge_entries("table2", [], folder, record.rows_per_run)


def _arrays(folder: Path) -> None:
    record.load_arrays(folder / "figure.npz", "x", "y")


def _codes(folder: Path) -> None:
    _read_codes(folder / "codes.npy")


RUN_READERS = (
    *(Reader(name, "config.toml schema.json model.safetensors", _model, 12) for name in RUNS),
    *(Reader(name, "best.safetensors", _best, 2) for name in RUNS),
    *(Reader(name, "model.safetensors", _released, 2) for name in ("run-points", "run-table")),
    *(Reader(name, "config.toml schema.json log.csv " + " ".join(JSONS), _small_files, 5) for name in RUNS),
    Reader("stopped", "last.safetensors last.safetensors last.safetensors best.safetensors log.csv", _resumed, 14),
    Reader("stopped", "config.toml schema.json", _resumed_by_other_settings, 4),
    Reader("run-points", "last.safetensors best.safetensors certificate.json", _finished, 3),
    *(Reader(name, "evaluation.json certificate.json environment.json log.csv", _reported, 3) for name in RUNS),
    *(Reader(name, "evaluation.json certificate.json model.safetensors", _reported, 1, True) for name in RUNS),
    *(Reader(name, "evaluation.json model.safetensors data.json", _evaluated) for name in RUNS),
    *(Reader(name, "model.safetensors", _certified) for name in RUNS),
    Reader("run-images", "reproduction.json", _reproduced, 4),
)  # fmt: skip
DATA_READERS = (
    Reader("settings", "*.toml", _settings, 10),
    Reader("csv", "rows.csv", _loaded("rows.csv", "kind"), 6),
    Reader("csv", "numbers.csv", _loaded("numbers.csv"), 3),
    Reader("csv", "rows.tsv", _loaded("rows.tsv", "kind"), 3),
    Reader("csv", "rows.csv", _read("rows.csv", FLOWER), 6),
    Reader("npz", "rows.npy", _loaded("rows.npy"), 5),
    Reader("npz", "rows.npz", _loaded("rows.npz"), 5),
    Reader("npz", "images.npz", _loaded("images.npz"), 5),
    Reader("npz", "images.npz", _read("images.npz", Schema((1, 8, 8), 256, classes=("0", "1"))), 5),
    Reader("npz", "codes.npy", _codes, 3),
    Reader("images", "*", _loaded(""), 6),
    Reader("images", "*", _read("", PHOTO), 3),
    Reader("mnist", "mnist/*", _built_in("mnist"), 6),
    Reader("mnist", "fashion-mnist/*", _built_in("fashion-mnist"), 3),
    Reader("cifar", "cifar10/*", _built_in("cifar10"), 4),
    Reader("cifar", "cifar100/*", _built_in("cifar100"), 2),
    Reader("results", "table2.json", _results, 4),
    Reader("results", "figure.npz", _arrays, 3),
)  # fmt: skip


def quietly(reader: Reader, folder: Path) -> Any:
    """Read, without what a command prints."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return reader.read(folder)
