"""Every reader of the library as a function of a folder, whose files `attack.files` damages.

A reader that returns a value must detect damage: if it still reads a damaged file, it must return the same value as for
the undamaged file.
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
    """A fixture, the files of it to damage, and a function that reads them.

    `weight` is its share of the cases; with `exchange`, a file is replaced by that of a run with other weights.
    """

    fixture: str
    files: str
    read: Callable[[Path], Any]
    weight: int = 1
    exchange: bool = False

    @property
    def writes(self) -> bool:
        """Whether it also writes to the folder: writing to a pipe that nothing reads would block forever."""
        return self.read in (_resume, _resume_with_damaged_settings, _finish, _report, _evaluate, _certify)


# ----------------------------------------------------------------------------------------------------------------- runs


def fingerprint(model: nn.Module, shape: Sequence[int]) -> str:
    """A hash of a model's state and of its outputs for a few inputs."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    transform: Any = model.transform
    x = torch.linspace(0.1, 0.9, 4 * math.prod(shape)).reshape(4, *shape)
    with (
        torch.no_grad(),
        contextlib.suppress(ValueError),
    ):  # weights with a valid digest may give numbers that are not finite
        digest.update(transform(x)[0].numpy().tobytes())
    return digest.hexdigest()


def _model(folder: Path) -> str:
    return fingerprint(run.load(folder), Run.open(folder).schema.shape)


def _best(folder: Path) -> str:
    opened = Run.open(folder)
    return f"{sorted(opened.best_metrics().items())} {fingerprint(opened.model('best'), opened.schema.shape)}"


def _final_weights(folder: Path) -> str:
    opened = Run.open(folder)
    reference = hashlib.sha256(opened.reference().numpy().tobytes()).hexdigest()
    return f"{opened.tightened_layers()} {reference}"


def _small_files(folder: Path) -> None:
    opened = Run.open(folder)
    opened.log()
    for name in JSONS:
        opened.read_json(name)
    opened.splits()


def _resume(folder: Path) -> str:
    run.resume(folder)
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def _resume_with_damaged_settings(folder: Path) -> None:
    run.resume(folder)


def _finish(folder: Path) -> bool:
    run.resume(folder)
    return _digests_match(folder)


def _report(folder: Path) -> None:
    report(folder, device="cpu")  # an evaluation of other weights is left out


def _digests_match(folder: Path) -> bool:
    """Whether the certificate and the evaluation, if they name a model, name the one in the same folder."""
    opened, model = Run.open(folder), checkpoint.sha256(folder / "model.safetensors")
    said = [opened.read_json(f"{name}.json").get("model_sha256") for name in ("certificate", "evaluation")]
    return all(digest in (None, "", 0, model) for digest in said)


def _evaluate(folder: Path) -> None:
    evaluate(folder, rows=10, draws=2, device="cpu")


def _certify(folder: Path) -> None:
    certify(folder, device="cpu")


def _reproduce(folder: Path) -> None:
    opened = Run.open(folder)
    if opened.read_json("reproduction.json"):  # without it, the test images would be read
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
            read(name, builtin_schema(name), folder=str(folder), part=part)
        download.verify(name, folder)
        download.is_present(name, folder)

    return built_in


def builtin_schema(name: str) -> Schema:
    """The schema of a built-in dataset."""
    from iresnet.data.builtin import schema_of

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
    *(Reader(name, "model.safetensors", _final_weights, 2) for name in ("run-points", "run-table")),
    *(Reader(name, "config.toml schema.json log.csv " + " ".join(JSONS), _small_files, 5) for name in RUNS),
    Reader("stopped", "last.safetensors last.safetensors last.safetensors best.safetensors log.csv", _resume, 14),
    Reader("stopped", "config.toml schema.json", _resume_with_damaged_settings, 4),
    Reader("run-points", "last.safetensors best.safetensors certificate.json", _finish, 3),
    *(Reader(name, "evaluation.json certificate.json environment.json log.csv", _report, 3) for name in RUNS),
    *(Reader(name, "evaluation.json certificate.json model.safetensors", _report, 1, True) for name in RUNS),
    *(Reader(name, "evaluation.json model.safetensors data.json", _evaluate) for name in RUNS),
    *(Reader(name, "model.safetensors", _certify) for name in RUNS),
    Reader("run-images", "reproduction.json", _reproduce, 4),
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


def read_quietly(reader: Reader, folder: Path) -> Any:
    """Read with output suppressed."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return reader.read(folder)
