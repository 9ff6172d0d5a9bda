"""Trained models shipped with the library, `iresnet/weights/NAME`: run folders without the files only training needs.

The name of a shipped model is accepted wherever a run folder is, unless a folder of that name exists. The folders are
never written to: the outputs of commands go to runs/NAME-shipped.

Their files are slim (`slim_state`): they hold the weights as they are used, W min(1, c / sigma), to the last bit,
without the state of power iteration (as much again, and a vector as large as an image for every layer). With G = 0 the
constraint leaves such a weight as it is; training measures its norm again. Weights that float16 holds exactly, those of
a model that `tools/float16.py` rounded, are stored as float16 and loaded as float32: the same numbers, half the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from ..lipschitz import SpectralCap, cap_of

WEIGHTS = Path(__file__).resolve().parent.parent / "weights"

#: Former name of a shipped model -> the name of the preset that made it, which it has now.
RENAMED = {"mnist-flow": "mnist-flow-noise"}


def shipped() -> list[str]:
    """Return the names of the models that come with the library: `iresnet.load(name)` loads one."""
    return sorted(p.parent.name for p in WEIGHTS.glob("*/model.safetensors"))


def resolve_folder(folder: Path) -> Path:
    """Return the folder itself, or, if it does not exist, the folder of the shipped model of this name."""
    return WEIGHTS / folder if not folder.exists() and str(folder) in shipped() else folder


def is_shipped(folder: Path) -> bool:
    """Whether a folder is that of a shipped model."""
    return folder.parent == WEIGHTS


def output_folder(folder: Path) -> Path:
    """Return the folder that commands write their outputs to."""
    return Path("runs") / f"{folder.name}-shipped" if is_shipped(folder) else folder


# ---------------------------------------------------------------------------------------------- slim files


def slim_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model in eval mode with constrained weights written out, without power iteration."""
    state = dict(model.state_dict())
    for name, layer, _ in _constrained_layers(model):
        state[f"{name}.original"] = _narrow(cast(Tensor, layer.weight).detach())
        del state[f"{name}.0.gradient"], state[f"{name}.0.direction"]
    return state


def _narrow(weight: Tensor) -> Tensor:
    """Return a weight as float16 if that loses nothing, else as it is."""
    half = weight.half()
    return half if torch.equal(half.to(weight.dtype), weight) else weight


def complete_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of a file, with the entries a slim one omits: a G that constrains nothing, no direction."""
    found = dict(state)
    for name, _, cap in _constrained_layers(model):
        if f"{name}.0.gradient" not in found and f"{name}.0.direction" not in found:
            found[f"{name}.0.gradient"] = cap.gradient.new_zeros(cap.gradient.shape)
            found[f"{name}.0.direction"] = cap.direction.new_empty(0)
    return found


def _constrained_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, SpectralCap]]:
    """Yield (prefix in the state dict, layer, constraint) of every constrained layer."""
    for name, layer in model.named_modules():
        if (cap := cap_of(layer)) is not None:
            yield f"{name}.parametrizations.weight", layer, cap
