"""Trained models that come with the library, `iresnet/weights/NAME`: run folders without what only training needs.

Wherever a run folder is expected, such a name will do, unless a folder of that name is there. The folders are never
written to: what a command makes of such a model goes to runs/NAME-shipped.
"""

from __future__ import annotations

from pathlib import Path

from ..spelling import hint

WEIGHTS = Path(__file__).resolve().parent.parent / "weights"


def shipped() -> list[str]:
    """The names of the models that come with the library: `iresnet.load(name)` loads one."""
    return sorted(p.parent.name for p in WEIGHTS.glob("*/model.safetensors"))


def resolve(folder: Path) -> Path:
    """The folder itself, or that of the shipped model of this name where there is no such folder."""
    return WEIGHTS / folder if not folder.exists() and str(folder) in shipped() else folder


def meant(folder: Path) -> str:
    """Which shipped model a name that does not exist is close to: the beginning of a message, or nothing."""
    words = hint(str(folder), shipped()) if len(folder.parts) == 1 else ""
    return f". {words[:-1]}, which comes with the library?" if words.startswith("Did you mean") else ""


def is_shipped(folder: Path) -> bool:
    """Whether a folder is that of a model that comes with the library."""
    return folder.parent == WEIGHTS


def output_of(folder: Path) -> Path:
    """Where commands put what they make of the model in a folder."""
    return Path("runs") / f"{folder.name}-shipped" if is_shipped(folder) else folder
