"""Which presets suit which data: for a command that is given a dataset where a preset is expected.

Points and tables without labels leave one choice, a density. Labels leave three, a classifier, a density or both in one
network, and only the user knows which. Where a label column is named, or for the small digits, the preset that does
both is the natural one.
"""

from __future__ import annotations

from pathlib import Path

from ..data import arrays, images, names, toy
from .experiment import Experiment

#: The presets for a kind of data with labels, and what each is for.
PURPOSES = ("for classes", "for likelihoods and samples", "for both")
LABELLED = {
    "mnist": ("mnist-classifier", "mnist-flow-noise", "mnist-hybrid"),
    "fashion-mnist": ("mnist-classifier", "mnist-flow-noise", "mnist-hybrid"),
    "cifar10": ("iresnet164", "cifar10-flow-principal", "cifar10-hybrid"),
    "cifar100": ("iresnet164", "cifar10-flow-principal", "cifar10-hybrid"),
}
IMAGES = ("images-classifier", "images-density", "images-hybrid")
TABLES = ("table-classifier", "table-density", "table-hybrid")


def presets_for(source: str, label: str | None = None) -> tuple[str, ...]:
    """Return the presets that suit a dataset or file: the natural one, or one for each of `PURPOSES`.

    >>> presets_for("moons"), presets_for("digits"), presets_for("mnist")
    (('points-density',), ('digits-hybrid',), ('mnist-classifier', 'mnist-flow-noise', 'mnist-hybrid'))
    """
    if source in LABELLED:
        return LABELLED[source]
    if source in toy.names():
        return ("points-density",)
    if source == "digits":
        return ("digits-hybrid",)
    has_images, has_labels = _content(Path(source).expanduser())
    classifier, density, hybrid = IMAGES if has_images else TABLES
    if label:
        return (hybrid,)
    return (classifier, density, hybrid) if has_labels else (density,)


def holds_images(source: str) -> bool | None:
    """Whether a dataset or an existing path holds images; None if there is nothing of this name.

    >>> holds_images("mnist"), holds_images("moons"), holds_images("no such file")
    (True, False, None)
    """
    if source in names():
        return source not in toy.names()
    path = Path(source).expanduser()
    return _content(path)[0] if path.exists() else None


def is_for_images(experiment: Experiment) -> bool:
    """Whether a preset is for images, by the data that it names."""
    source = experiment.data.source
    return source == "images" or (source in names() and source not in toy.names())


def _content(path: Path) -> tuple[bool, bool]:
    """Whether a path holds images, and whether they or the rows of an array have labels; (False, False) if unknown."""
    if path.is_dir() or images.is_image(path):
        _, labels = images.find_images(images.split_folders(path).get("train", path))
        return True, any(labels)
    if path.is_file() and path.suffix.lower() in (".npy", ".npz"):
        content = arrays.read_arrays(path)
        return content.x.ndim == 4, content.y is not None
    return False, False
