"""Makes room for a new run in a folder that holds an earlier one, without losing anything that was not meant to be."""

from __future__ import annotations

import shutil
from pathlib import Path
from shlex import quote

from .. import migration

#: All files of a run, under their present and former names.
FILES = (
    "config.toml", "schema.json", "data.json", "environment.json", "log.csv", "last.safetensors", "best.safetensors",
    "model.safetensors", "certificate.json", "evaluation.json", "reproduction.json", "report.html",
    *migration.FORMER_FILES.values(),
)  # fmt: skip


def make_room(folder: Path, overwrite: bool) -> None:
    """Remove an earlier run from a folder if `overwrite` is set or nothing would be lost; raise otherwise."""
    there = [name for name in (*FILES, "tensorboard") if (folder / name).exists()]
    weights = [name for name in there if name.endswith(".safetensors")]
    if weights and not overwrite:
        resume = f"iresnet train --resume --out {quote(str(folder))}"
        raise ValueError(f"{folder} already holds a run. Choose another folder, or resume the run: {resume}")
    if there and not _is_ours(folder):
        raise ValueError(f"{folder} holds files of something else ({', '.join(there)}). Choose another --out.")
    for name in reversed(there):  # config.toml, which identifies a run, is removed last
        if name == "tensorboard":
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink()


def _is_ours(folder: Path) -> bool:
    path = folder / "config.toml"
    return path.is_file() and path.read_text(encoding="utf-8", errors="replace").startswith("# iresnet ")
