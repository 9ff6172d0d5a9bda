"""Checkpoints: groups of tensors and JSON metadata in one safetensors file, replaced atomically. Nothing is unpickled.

The JSON is stored in the file's header, so that weights and metadata cannot be separated: the format number, the
library's version, the caller's state (step, metrics, ...) and the SHA-256 of state and tensors, which `load` verifies.
A tensor `bias` of the group `weights` is stored as `weights/bias`. `check_tensors` and `check_weights` compare what was
loaded with what is expected, before it is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from .. import atomic, migration
from ..lipschitz import SpectralCap
from ..transform import BufferRule, Transform


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by group and name, a JSON-serialisable state, and the file they were read from."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None

    def __str__(self) -> str:
        return "the checkpoint" if self.path is None else str(self.path)

    def read_number(self, key: str, default: float | None = None) -> float:
        """Return a number of the state, finite unless it is the default; raise if it is missing or invalid."""
        value = self.state.get(key, default)
        if key in self.state and not _is_number(value):
            raise self.damaged_error(f"{key} must be a number; got {value!r:.40}")
        if value is None:
            raise self.damaged_error(f"{key} is missing")
        return float(value)

    def read_count(self, key: str) -> int:
        """Return a non-negative integer of the state; raise if it is missing or invalid."""
        value = self.read_number(key)
        if not 0 <= value < 2**53 or value != int(value):
            raise self.damaged_error(f"{key} must be a non-negative integer; got {value:g}")
        return int(value)

    def damaged_error(self, why: str) -> ValueError:
        """Build the error for a file that is not as it was written."""
        return ValueError(f"{self} is damaged: {why}. Restore it, or train again.")

    def mismatch_error(self, what: str, why: str, remedy: str) -> ValueError:
        """Build the error for a file that belongs to another model or run."""
        return ValueError(f"{self} does not fit {what}: {why}. {remedy}")


def save(checkpoint: Checkpoint, path: str | Path, *, version: str) -> Path:
    """Write a checkpoint atomically."""
    flat = {
        f"{group}/{name}": tensor.detach().cpu().contiguous().clone()
        for group, tensors in checkpoint.tensors.items()
        for name, tensor in tensors.items()
    }
    state = json.loads(json.dumps(dict(checkpoint.state)))  # as it will be read
    header = {"format": migration.FORMAT, "iresnet": version, "state": state, "sha256": digest(flat, state)}
    return atomic.write(path, to_bytes(flat, metadata={"iresnet": json.dumps(header)}))


def load(path: str | Path, *, device: str | torch.device = "cpu") -> Checkpoint:
    """Read a checkpoint. A missing, truncated, changed or foreign file raises; files of old versions have no digest."""
    path = _present(path)
    header, flat = _read(path)
    written = migration.read_format(header, path)
    state, groups = header.get("state", {}), dict[str, dict[str, Tensor]]()
    found = Checkpoint(groups, state, path)
    if not isinstance(state, dict):
        raise found.damaged_error(f"its state must be an object; got {state!r:.40}")
    if header.get("sha256", content := digest(flat, state)) != content:
        raise found.damaged_error("its content does not match the SHA-256 in its header")
    for key, tensor in migration.migrate(flat, migration.TENSORS, written).items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = tensor.to(device)
    return Checkpoint(groups, migration.migrate(state, migration.STATE, written), path)


def sha256(path: str | Path) -> str:
    """Return the digest in a file's header, which `load` verifies; that of the content if an old version wrote none."""
    if known := _read(_present(path), tensors=False)[0].get("sha256"):
        return str(known)
    header, flat = _read(_present(path))
    return digest(flat, header.get("state", {}))


def _present(path: str | Path) -> Path:
    if not Path(path).is_file():
        raise FileNotFoundError(f"checkpoint {path} does not exist. Train first, or name another run folder.")
    return Path(path)


def _read(path: Path, *, tensors: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return our part of the header (empty for another program's file) and the tensors by their full names."""
    try:
        with safe_open(str(path), framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("iresnet", "{}"))
            flat = {key: file.get_tensor(key) for key in file.keys()} if tensors else {}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError, RecursionError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"{path} is damaged or not a checkpoint: {why}. Restore it, or train again.") from None
    except OSError as error:  # a failing disk: the original message does not name the file
        raise OSError(f"{path} cannot be read: {error.strerror or error}. Restore it, or train again.") from None
    return header if isinstance(header, dict) else {}, flat


def digest(tensors: Mapping[str, Tensor], state: Any = None) -> str:
    """Return the SHA-256 of a state and of tensors with their names, dtypes and shapes."""
    content = hashlib.sha256(json.dumps(state, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        content.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()


# -------------------------------------------------------------------------------------- does a checkpoint fit?


def check_tensors(
    found: Checkpoint, group: str, expected: Mapping[str, Tensor], *, what: str, remedy: str
) -> Mapping[str, Tensor]:
    """Return the tensors of a group after checking name, shape, dtype and finiteness against the expected ones.

    This is the only check: fused optimisers and copies trust their inputs. A narrower float dtype is accepted for a
    wider one. Where the expected tensor is not finite itself (a mask, say), the one in the file need not be either.
    """
    tensors = found.tensors.get(group, {})
    for name in expected:
        if name not in tensors:
            raise found.mismatch_error(what, f"{group}/{name} is missing", remedy)
    for name, tensor in tensors.items():
        if name not in expected:
            raise found.mismatch_error(what, f"{group}/{name} is unexpected", remedy)
        like = expected[name]
        if tensor.shape != like.shape:
            why = f"{group}/{name} must have shape {tuple(like.shape)}; got {tuple(tensor.shape)}"
            raise found.mismatch_error(what, why, remedy)
        if tensor.dtype != like.dtype and not _widens(tensor.dtype, like.dtype):
            raise found.mismatch_error(what, f"{group}/{name} must be {_name(like)}; got {_name(tensor)}", remedy)
        if not _finite(tensor) and _finite(like):
            raise found.damaged_error(f"{group}/{name} has values that are not finite")
    return tensors


def check_weights(found: Checkpoint, model: nn.Module, *, what: str, remedy: str) -> Mapping[str, Tensor]:
    """Return the weights of a checkpoint after checking that they fit a model: `check_tensors`, and rules for buffers.

    The power-iteration direction of a constrained layer may have the size of any input that the layer has seen.
    """
    expected, weights = dict(model.state_dict()), found.tensors.get("weights", {})
    modules = [(f"{name}.".lstrip("."), module) for name, module in model.named_modules()]
    for prefix, module in modules:
        direction = weights.get(f"{prefix}direction")
        if isinstance(module, SpectralCap) and direction is not None and _is_direction(direction, module):
            expected[f"{prefix}direction"] = direction.new_zeros(direction.shape, dtype=module.direction.dtype)
    check_tensors(found, "weights", expected, what=what, remedy=remedy)
    for prefix, module in modules:
        for buffer, rule, holds in _buffer_rules(module):
            if not holds(weights[f"{prefix}{buffer}"]):
                raise found.damaged_error(f"weights/{prefix}{buffer} must {rule}")
    return weights


#: The rule for the input size that a constraint has seen.
CAP_RULES: tuple[BufferRule, ...] = (("size", "not be negative", lambda size: bool((size >= 0).all())),)


def _buffer_rules(module: nn.Module) -> tuple[BufferRule, ...]:
    """Return what the values of a module's buffers must be, besides finite; with others it would raise or fail."""
    if isinstance(module, SpectralCap):
        return CAP_RULES
    return type(module).buffer_rules if isinstance(module, Transform) else ()


def _is_direction(tensor: Tensor, cap: SpectralCap) -> bool:
    """Whether a tensor can be a power-iteration direction: empty (no input seen yet), or for inputs of some size."""
    channels = cap.gradient.shape[1] * cap.geometry.groups
    return tensor.numel() == 0 or (tensor.dim() == 1 + cap.geometry.axes and tensor.shape[0] == channels)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def _widens(narrow: torch.dtype, wide: torch.dtype) -> bool:
    both = narrow.is_floating_point and wide.is_floating_point
    return both and torch.promote_types(narrow, wide) == wide


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
