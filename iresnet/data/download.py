"""The files of MNIST, Fashion-MNIST and CIFAR: download them, find them, and verify their checksums.

The checksums are those that the authors and torchvision publish. A download goes to `FOLDER/NAME`, under a temporary
name until its checksum is verified, so no partial file is left behind. Files are also found in the folder itself and in
torchvision's layout, packed or unpacked.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from ..spelling import hint

#: Called with (file, bytes done, bytes in total) during a download.
Report: TypeAlias = Callable[[str, int, int], None]

CHUNK = 2**20

#: The environment variable that names a dataset directory, which is searched after the given one.
ENVIRONMENT = "IRESNET_DATA"


@dataclass(frozen=True)
class Remote:
    """One file to download, and the files packed in it with their sizes in bytes."""

    url: str
    md5: str
    size: int
    unpacked: dict[str, int]

    @property
    def file(self) -> str:
        """The file name, the same on the server and on disk."""
        return self.url.rpartition("/")[2]


class FileCheck(NamedTuple):
    """A result of `verify`: a file of a dataset, its path (None: not found), and the verdict."""

    name: str
    file: str
    path: Path | None
    verdict: str


RIGHT, SIZE_ONLY, CORRUPT, ABSENT = "checksum right", "size right", "corrupt", "not there"


def remote_files(name: str) -> tuple[Remote, ...]:
    """Return the files of a dataset."""
    if name not in REGISTRY:
        raise ValueError(f"name must be a dataset that can be downloaded; got {name!r}. {hint(name, REGISTRY)}")
    return REGISTRY[name]


def search_folders(name: str, folder: str | Path) -> list[Path]:
    """The folders that are searched for the files of a dataset, in order; last, those in the environment variable."""
    places = [Path(place).expanduser() for place in (folder, os.environ.get(ENVIRONMENT)) if place]
    inside = [name, *LAYOUTS.get(name, ()), "."]
    return list(dict.fromkeys(place / part for place in places for part in inside))


def locate_file(name: str, folder: str | Path, file: str) -> Path | None:
    """Find a file, with or without the folder it was packed in; None if it is not found."""
    names = dict.fromkeys([file, Path(file).name])
    candidates = (directory / n for directory in search_folders(name, folder) for n in names)
    return next((path for path in candidates if path.is_file() and not _belongs_to_another(name, path)), None)


def unpacked_files(name: str, folder: str | Path, remote: Remote) -> dict[str, Path]:
    """Find the files of `remote` that are already unpacked."""
    found = {file: locate_file(name, folder, file) for file in remote.unpacked}
    return {file: path for file, path in found.items() if path is not None}


def is_present(name: str, folder: str | Path) -> bool:
    """Whether every file of a dataset is present, packed or unpacked."""
    return all(
        locate_file(name, folder, r.file) or len(unpacked_files(name, folder, r)) == len(r.unpacked)
        for r in remote_files(name)
    )


def download(name: str, folder: str | Path, report: Report | None = None) -> list[Path]:
    """Download the files of a dataset to `folder/name` and return their paths; valid files are not downloaded again."""
    remotes, target = remote_files(name), Path(folder).expanduser() / name
    new = [path for path in (target, target.parent) if not path.exists()]
    try:
        return [_fetch(name, remote, target, report) for remote in remotes]
    finally:
        for path in new:
            with contextlib.suppress(OSError):  # it is no longer empty, or was never created
                path.rmdir()


def verify(name: str, folder: str | Path) -> list[FileCheck]:
    """Check the files of a dataset. Unpacked files have no published checksum: only their size is checked."""
    checks = []
    for remote in remote_files(name):
        path = locate_file(name, folder, remote.file)
        unpacked = unpacked_files(name, folder, remote)
        if path is not None:
            checks.append(FileCheck(name, remote.file, path, RIGHT if md5(path) == remote.md5 else CORRUPT))
        for file, found in unpacked.items():
            verdict = SIZE_ONLY if found.stat().st_size == remote.unpacked[file] else CORRUPT
            checks.append(FileCheck(name, file, found, verdict))
        if path is None and len(unpacked) < len(remote.unpacked):
            missing = [file for file in remote.unpacked if file not in unpacked] if unpacked else [remote.file]
            checks += [FileCheck(name, file, None, ABSENT) for file in missing]
    return checks


def md5(path: Path) -> str:
    """Compute the MD5 checksum of a file, in hexadecimal."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


def _belongs_to_another(name: str, path: Path) -> bool:
    """Whether a file is of another dataset: those of MNIST and Fashion-MNIST share their names and differ in size."""
    size = path.stat().st_size
    others = (r for other, remotes in REGISTRY.items() if other != name for r in remotes)
    return any(r.file == path.name and r.size == size for r in others)


def _fetch(name: str, remote: Remote, target: Path, report: Report | None) -> Path:
    import pooch

    pooch.get_logger().setLevel("WARNING")
    bar = _Bar(remote, report)
    downloader = pooch.HTTPDownloader(progressbar=bar, chunk_size=CHUNK)
    try:
        path = pooch.retrieve(remote.url, f"md5:{remote.md5}", remote.file, target, downloader=downloader)
    except ValueError:
        raise RuntimeError(
            f"{name}: the file from {remote.url} has a wrong checksum and was not kept. Try again later."
        ) from None
    except OSError as error:  # also the base class of the errors of requests
        raise OSError(
            f"{name}: {remote.url} could not be saved to {target} ({_reason(error)}). "
            f"Try again, or copy the file there yourself."
        ) from None
    return Path(path)


def _reason(error: OSError) -> str:
    response = getattr(error, "response", None)
    if response is not None:
        return f"the server answered {response.status_code}"
    return error.strerror or type(error).__name__


class _Bar:
    """A progress bar for pooch that reports progress, and stops a download that is too long."""

    def __init__(self, remote: Remote, report: Report | None) -> None:
        self.remote, self.report, self.done, self.total = remote, report, 0, 0

    def update(self, n: int) -> None:
        self.done += n
        if self.done > self.remote.size + CHUNK:  # pooch counts in whole chunks
            raise OSError(0, f"the server sends more than its {self.remote.size:,} bytes")
        if self.report is not None:
            self.report(self.remote.file, min(self.done, self.total), self.total)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        """Nothing to close."""


def _idx(base: str, sums: tuple[str, str, str, str], sizes: tuple[int, int, int, int]) -> tuple[Remote, ...]:
    files = {
        "train-images-idx3-ubyte": 47_040_016,
        "train-labels-idx1-ubyte": 60_008,
        "t10k-images-idx3-ubyte": 7_840_016,
        "t10k-labels-idx1-ubyte": 10_008,
    }
    return tuple(
        Remote(f"{base}{file}.gz", md5, size, {file: whole})
        for (file, whole), md5, size in zip(files.items(), sums, sizes, strict=True)
    )


REGISTRY: dict[str, tuple[Remote, ...]] = {
    "mnist": _idx(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
        (9_912_422, 28_881, 1_648_877, 4_542),
    ),
    "fashion-mnist": _idx(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
        (26_421_880, 29_515, 4_422_102, 5_148),
    ),
    "cifar10": (
        Remote(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            170_052_171,
            {
                f"cifar-10-batches-bin/{part}.bin": 30_730_000
                for part in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
            },
        ),
    ),
    "cifar100": (
        Remote(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            168_513_733,
            {"cifar-100-binary/train.bin": 153_700_000, "cifar-100-binary/test.bin": 30_740_000},
        ),
    ),
}
# torchvision's folders.
LAYOUTS = {"mnist": ("MNIST/raw",), "fashion-mnist": ("FashionMNIST/raw",)}
