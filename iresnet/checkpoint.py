"""Checkpoints: groups of tensors and a JSON, in one safetensors file that is replaced as a whole. Nothing is unpickled.

The JSON travels in the file's header, so that weights and what is said about them cannot part: the format's number, the
library's version and the caller's state (step, figures, ...). A tensor `bias` of the group `weights` is stored as
`weights/bias`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from . import atomic

#: Raised when a file of this version could not be read by the one before.
FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by group and name, and a state that JSON can hold."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any] = field(default_factory=dict)


def save(checkpoint: Checkpoint, path: str | Path, *, version: str) -> Path:
    """Write a checkpoint, whole or not at all."""
    flat = {
        f"{group}/{name}": tensor.detach().cpu().contiguous().clone()
        for group, tensors in checkpoint.tensors.items()
        for name, tensor in tensors.items()
    }
    header = {"format": FORMAT, "iresnet": version, "state": dict(checkpoint.state)}
    return atomic.write(path, to_bytes(flat, metadata={"iresnet": json.dumps(header)}))


def load(path: str | Path, *, device: str | torch.device = "cpu") -> Checkpoint:
    """Read a checkpoint. A missing, torn or foreign file gets a sentence."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}. Train first, or name another run folder.")
    groups: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            header = json.loads((file.metadata() or {}).get("iresnet", "{}"))
            for key in file.keys():  # noqa: SIM118 (not a dictionary)
                group, _, name = key.partition("/")
                groups.setdefault(group, {})[name] = file.get_tensor(key)
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged or no checkpoint: {error}. Restore it, or train again.") from None
    header = header if isinstance(header, dict) else {}
    check_format(header, path)
    return Checkpoint(groups, header.get("state", {}))


def check_format(header: Mapping[str, Any], path: Path) -> None:
    """Refuse what another version wrote in another format."""
    found = header.get("format")
    if found != FORMAT:
        writer = f"iresnet {header['iresnet']}" if "iresnet" in header else "another program"
        raise ValueError(
            f"{path} was written by {writer} in format {found}; this version reads format {FORMAT}. "
            "Use the version that wrote it, or train again."
        )
