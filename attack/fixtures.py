"""Small valid files of every kind that the library reads: runs, datasets, settings, results; made once per process."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import shutil
import struct
import tarfile
from dataclasses import replace
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iresnet import config, results
from iresnet.cli.evaluate import evaluate
from iresnet.presets import PRESETS, Experiment
from iresnet.run import resume, start

from .containers import to_npy

#: Runs of a density, a hybrid and a classifier.
RUNS = ("run-points", "run-table", "run-images")

#: The content of reproduction.json, as `reproduce` writes it.
REPRODUCTION: dict[str, Any] = {
    "split": "test", "rows": 10, "of": 10, "parameters": 99, "error": {"value": 1.0, "low": 0.5, "high": 2.0},
    "tightening": {
        "layers": 1, "predictions_changed": 0, "rows": 10, "before": {"value": 1.0}, "validation": {"value": 1.0},
        "validation_before": {"value": 1.0},
    },
    "iteration": {"images": 4, "converged": 4, "diverged": 0, "code_residual": 1e-9, "largest_error": None},
}  # fmt: skip


@cache
def root() -> Path:
    """The folder of all fixtures of this process, removed when it ends."""
    folder = Path(mkdtemp(prefix="iresnet-attack-"))
    Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=0)
    return folder


@cache
def fixture(name: str) -> Path:
    """The folder of a fixture, created on first use."""
    folder = root() / name
    with contextlib.redirect_stdout(io.StringIO()):
        FIXTURES[name](folder)
    return folder


# ----------------------------------------------------------------------------------------------------------------- runs


def experiment(kind: str, seed: int = 0) -> Experiment:
    """A training of a few steps: a density of points, a hybrid of a table or a classifier of images."""
    preset = PRESETS[{"points": "points-density", "table": "table-hybrid", "images": "digits-classifier"}[kind]]
    source = {
        "points": "moons",
        "table": str(fixture("csv") / "rows.csv"),
        "images": str(fixture("npz") / "images.npz"),
    }
    data = replace(preset.data, source=source[kind], label="kind" if kind == "table" else "", validation=0.2, shift=0)
    steps = replace(
        preset.training, steps=6, epochs=0, batch=16, warmup=2, validate_every=2, save_every=2, weight_decay=0.01
    )
    network = replace(preset.network, blocks=(1,), width=4, terms=2)
    return replace(preset, data=data, network=network, training=steps, seed=seed)


def _run(kind: str, seed: int = 0) -> Any:
    def make(folder: Path) -> None:
        start(experiment(kind, seed), folder)
        evaluate(folder, rows=10, device="cpu")
        (folder / "reproduction.json").write_text(json.dumps(REPRODUCTION))

    return make


def _stopped(folder: Path) -> None:
    """A run that was stopped after four of six steps."""
    answers = iter([False] * 3)
    start(experiment("points"), folder, stop=lambda: next(answers, True))


def _finish_stopped(folder: Path) -> None:
    """The same run, resumed to its end."""
    shutil.copytree(fixture("stopped"), folder)
    resume(folder)


# ----------------------------------------------------------------------------------------------------------------- data


def _rows(n: int = 60) -> tuple[NDArray[Any], list[str]]:
    r = np.random.default_rng(0)
    return r.normal(size=(n, 3)).round(4), [("rose", "tulip", "")[i % 5 // 2] for i in range(n)]


def _csv(folder: Path) -> None:
    folder.mkdir()
    x, y = _rows()
    lines = [",".join((*map(str, row), label)) for row, label in zip(x.tolist(), y, strict=True)]
    for name, separator in (("rows.csv", ","), ("rows.tsv", "\t")):
        text = "\n".join(["length,width,height,kind", *lines]) + "\n"
        (folder / name).write_text(text.replace(",", separator))
    np.savetxt(folder / "numbers.csv", x, delimiter=";")


def _npz(folder: Path) -> None:
    folder.mkdir()
    x, r = _rows()[0], np.random.default_rng(1)
    (folder / "rows.npy").write_bytes(to_npy(x))
    np.savez_compressed(folder / "rows.npz", x=x.astype("float32"), y=np.arange(60) % 3)
    np.savez_compressed(folder / "images.npz", x=r.integers(0, 256, (40, 1, 8, 8), dtype=np.uint8), y=np.arange(40) % 2)
    (folder / "codes.npy").write_bytes(to_npy(r.normal(size=(4, 2))))


def _images(folder: Path) -> None:
    from PIL import Image

    r = np.random.default_rng(2)
    for part, count in (("train", 6), ("test", 2)):
        for i in range(count):
            path = folder / part / ("cat", "dog")[i % 2] / f"{i}.{('png', 'jpg', 'bmp', 'gif')[i % 4]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(r.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)


def _mnist(folder: Path) -> None:
    """Files in the format of MNIST with a few images; compressed, and for Fashion-MNIST uncompressed."""
    for prefix, n in (("train", 20), ("t10k", 5)):
        images = np.random.default_rng(n).integers(0, 256, (n, 28, 28), dtype=np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", np.arange(n, dtype=np.uint8) % 10)):
            content = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
            _write(folder / "mnist" / f"{prefix}-{name}-ubyte.gz", gzip.compress(content))
            _write(folder / "fashion-mnist" / f"{prefix}-{name}-ubyte", content)


def _cifar(folder: Path) -> None:
    parts = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
    _tar(folder / "cifar10" / "cifar-10-binary.tar.gz", {f"cifar-10-batches-bin/{p}.bin": _records(1) for p in parts})
    _tar(
        folder / "cifar100" / "cifar-100-binary.tar.gz",
        {f"cifar-100-binary/{p}.bin": _records(2) for p in ("train", "test")},
    )


def _records(label_bytes: int, n: int = 4) -> bytes:
    rows = np.random.default_rng(label_bytes).integers(0, 256, (n, label_bytes + 3072), dtype=np.uint8)
    rows[:, :label_bytes] = np.arange(n)[:, None] % 10
    return rows.tobytes()


def _tar(path: Path, files: dict[str, bytes]) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    _write(path, file.getvalue())


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


# ------------------------------------------------------------------------------------------------- settings and results


def _settings(folder: Path) -> None:
    folder.mkdir()
    for name in ("digits-hybrid", "table-maf", "iresnet164", "cifar10-flow"):
        (folder / f"{name}.toml").write_text(config.dump(PRESETS[name]))


def _results(folder: Path) -> None:
    run = results.provenance(seeds=[0], seconds=1.0)
    cell = {"dataset": "mnist", "model": "c=0.9", "budget": "short", "recipe": "ours", "settings": [], "seed": 0}
    entry = {**run, **cell, "row": {"error %": 1.0, "low": 0.5, "high": 2.0}, "details": {"a": 1}}
    results.write(results.Results("table2", [{"model": "c=0.9", "error %": 1.0, "run": 0}], [entry]), folder)
    _write(folder / "figure.npz", (fixture("npz") / "rows.npz").read_bytes())


FIXTURES = {
    "csv": _csv,
    "npz": _npz,
    "images": _images,
    "mnist": _mnist,
    "cifar": _cifar,
    "settings": _settings,
    "results": _results,
    "run-points": _run("points"),
    "run-table": _run("table"),
    "run-images": _run("images"),
    "run-points-1": _run("points", 1),
    "run-table-1": _run("table", 1),
    "run-images-1": _run("images", 1),
    "stopped": _stopped,
    "stopped-finished": _finish_stopped,
}


def copy_of(name: str, to: Path) -> Path:
    """A copy of a fixture that may be damaged."""
    return Path(shutil.copytree(fixture(name), to))
