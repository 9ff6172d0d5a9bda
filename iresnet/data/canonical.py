"""MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100, read from their authors' files. Nothing is unpickled or extracted.

An idx file holds two zero bytes, 8 for unsigned bytes, the number of dimensions; each dimension as a big-endian 32-bit
integer; then the data. A CIFAR batch is a sequence of records: one label byte (CIFAR-100: coarse, then fine), then the
32 x 32 bytes of red, of green and of blue.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from . import packed
from .dataset import Dataset
from .download import REGISTRY, Remote, locate_file, search_folders, unpacked_files
from .schema import Schema

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class ImageDatasetInfo:
    """The schema of a dataset, and the size and the files of each split."""

    schema: Schema
    sizes: dict[str, int]
    files: Mapping[str, tuple[str, ...]]


def read_canonical(name: str, folder: str | Path, part: str) -> Dataset:
    """Read the training or test images of a dataset from the dataset directory `folder`."""
    info, files = DATASETS[name], DATASETS[name].files[part]
    contents = _contents(name, folder, files)
    try:
        if name.startswith("cifar"):
            x, y = _cifar(files, contents, label_bytes=2 if name == "cifar100" else 1)
        else:
            x, y = _mnist(files, contents)
    except ValueError as error:
        raise ValueError(f"{name}: {error} {_download_again(name)}") from None
    try:
        return Dataset(torch.from_numpy(x), torch.from_numpy(y.astype(np.int64)), info.schema)
    except ValueError as error:
        raise ValueError(f"{name}: {error} The files are {', '.join(files)}. {_download_again(name)}") from None


def _mnist(files: Sequence[str], contents: dict[str, packed.Content]) -> tuple[Bytes, Bytes]:
    images, labels = (parse_idx(contents[file], file) for file in files)
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ValueError(
            f"images of shape {images.shape} do not match labels of shape {labels.shape}, in {' and '.join(files)}."
        )
    return images[:, None], labels


def parse_idx(content: packed.Content, file: str) -> Bytes:
    """Parse an idx file of unsigned bytes."""
    head = np.frombuffer(content[:4], np.uint8)
    if len(head) < 4 or head[:3].tolist() != [0, 0, 8]:
        raise ValueError(f"{file} must start with the bytes 0 0 8; got {' '.join(map(str, head[:3]))}.")
    start = 4 + 4 * int(head[3])
    if head[3] > 3:
        raise ValueError(f"{file} must hold an array of up to 3 dimensions; got {head[3]}.")
    if len(content) < start:
        raise ValueError(f"{file} ends inside its header, after {len(content)} bytes.")
    shape = tuple(int(n) for n in np.frombuffer(content[4:start], ">u4"))
    if len(content) != start + math.prod(shape):
        raise ValueError(f"{file} must hold {math.prod(shape)} bytes, {shape}; got {len(content) - start}.")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def _cifar(files: Iterable[str], contents: dict[str, packed.Content], label_bytes: int) -> tuple[Bytes, Bytes]:
    record, images, labels = label_bytes + 3072, [], []
    for file in files:
        if not contents[file] or len(contents[file]) % record:
            raise ValueError(f"{file} must hold records of {record} bytes; got {len(contents[file])} bytes in all.")
        rows = np.frombuffer(contents[file], np.uint8).reshape(-1, record)
        images.append(rows[:, label_bytes:].reshape(-1, 3, 32, 32))
        labels.append(rows[:, label_bytes - 1])
    return np.concatenate(images), np.concatenate(labels)


def _contents(name: str, folder: str | Path, files: Sequence[str]) -> dict[str, packed.Content]:
    """Read the files, unpacked or from their archive; none may be larger than the published one."""
    contents: dict[str, packed.Content] = {}
    for remote in REGISTRY[name]:
        wanted = {file: size for file, size in remote.unpacked.items() if file in files}
        unpacked, archive = unpacked_files(name, folder, remote), locate_file(name, folder, remote.file)
        try:
            if all(file in unpacked for file in wanted):
                contents |= {file: packed.read_limited(unpacked[file], size) for file, size in wanted.items()}
            elif archive is not None:
                contents |= _unpack_archive(archive, wanted, sum(remote.unpacked.values()))
            else:
                _raise_not_found(name, folder, remote)
        except ValueError as error:
            raise ValueError(f"{name}: {error} {_download_again(name)}") from None
    return contents


def _unpack_archive(path: Path, wanted: dict[str, int], whole: int) -> dict[str, packed.Content]:
    if not path.name.endswith(".tar.gz"):
        return {file: packed.read_limited(path, size) for file, size in wanted.items()}
    contents = packed.read_tar_members(path, wanted, whole)
    missing = next((file for file in wanted if file not in contents), None)
    if missing is not None:
        raise ValueError(f"{path} holds no {missing}.")
    return contents


def _raise_not_found(name: str, folder: str | Path, remote: Remote) -> NoReturn:
    searched = ", ".join(str(place) for place in search_folders(name, folder))
    raise FileNotFoundError(
        f"{name}: {remote.file} was not found in {searched}. "
        f"Run `iresnet data download {name}`, or set the dataset directory: --data-dir FOLDER."
    )


def _download_again(name: str) -> str:
    return f"Remove the file and run `iresnet data download {name}`."


_FASHION = "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
_CIFAR10 = "airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck"
_CIFAR100 = (
    "apple, aquarium_fish, baby, bear, beaver, bed, bee, beetle, bicycle, bottle, bowl, boy, bridge, bus, butterfly, "
    "camel, can, castle, caterpillar, cattle, chair, chimpanzee, clock, cloud, cockroach, couch, crab, crocodile, cup, "
    "dinosaur, dolphin, elephant, flatfish, forest, fox, girl, hamster, house, kangaroo, keyboard, lamp, lawn_mower, "
    "leopard, lion, lizard, lobster, man, maple_tree, motorcycle, mountain, mouse, mushroom, oak_tree, orange, orchid, "
    "otter, palm_tree, pear, pickup_truck, pine_tree, plain, plate, poppy, porcupine, possum, rabbit, raccoon, ray, "
    "road, rocket, rose, sea, seal, shark, shrew, skunk, skyscraper, snail, snake, spider, squirrel, streetcar, "
    "sunflower, sweet_pepper, table, tank, telephone, television, tiger, tractor, train, trout, tulip, turtle, "
    "wardrobe, whale, willow_tree, wolf, woman, worm"
)


def _mnist_info(classes: str) -> ImageDatasetInfo:
    files = {
        part: (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte")
        for part, prefix in (("train", "train"), ("test", "t10k"))
    }
    schema = Schema((1, 28, 28), 256, classes=tuple(classes.split(", ")))
    return ImageDatasetInfo(schema, {"train": 60_000, "test": 10_000}, files)


def _cifar_info(classes: str, train: tuple[str, ...], test: str) -> ImageDatasetInfo:
    schema = Schema((3, 32, 32), 256, classes=tuple(classes.split(", ")))
    return ImageDatasetInfo(schema, {"train": 50_000, "test": 10_000}, {"train": train, "test": (test,)})


DATASETS = {
    "mnist": _mnist_info("0, 1, 2, 3, 4, 5, 6, 7, 8, 9"),
    "fashion-mnist": _mnist_info(_FASHION),
    "cifar10": _cifar_info(
        _CIFAR10,
        tuple(f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)),
        "cifar-10-batches-bin/test_batch.bin",
    ),
    "cifar100": _cifar_info(_CIFAR100, ("cifar-100-binary/train.bin",), "cifar-100-binary/test.bin"),
}
