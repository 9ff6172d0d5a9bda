"""The weights of a model as plain ones, without constraints: W min(1, c / sigma(W)) of Eq. (2), computed once."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import torch
from safetensors.torch import save as to_bytes
from torch import nn
from torch.nn.utils import parametrize

from .. import atomic
from ..batch import Shape
from ..lipschitz import release_
from ..transforms.first_batch import uninitialised
from ..version import __version__

M = TypeVar("M", bound=nn.Module)

About: TypeAlias = Mapping[str, Any]

VERSION = f"iresnet {__version__} with torch {torch.__version__}"


def without_constraints(model: M) -> M:
    """Copy a model in eval mode with plain weights: the same function, with ordinary keys (`g.0.weight`).

    Nothing constrains the norms of the copy, so it is not meant for training: its parameters require no gradient. A
    model of the same architecture, passed through this function, loads what `save_weights` wrote.

    >>> from iresnet import ResidualBlock, contractive_mlp
    >>> sorted(without_constraints(ResidualBlock(contractive_mlp(2, hidden=(8,)))).state_dict())
    ['g.0.bias', 'g.0.weight', 'g.2.bias', 'g.2.weight']
    """
    plain = release_(copy.deepcopy(model).eval())  # eval() brings the norms to convergence
    for module in list(plain.modules()):
        if parametrize.is_parametrized(module):  # a parametrization by the user
            _remove_parametrizations_(module)
    return cast(M, plain.requires_grad_(False))


def _remove_parametrizations_(module: nn.Module) -> None:
    # A copy shares the class of its original in torch, and removing the parametrization would change both.
    shared = type(module)
    own = {k: v for k, v in vars(shared).items() if k not in ("__dict__", "__weakref__")}
    module.__class__ = type(shared.__name__, shared.__bases__, own)
    for name in list(cast(nn.ModuleDict, module.parametrizations)):
        parametrize.remove_parametrizations(module, name, leave_parametrized=True)


def save_weights(model: nn.Module, path: str | Path, *, shape: Shape | None = None, about: About | None = None) -> Path:
    """Write the plain weights to a safetensors file, atomically.

    The entry `iresnet` of the header is JSON that describes them: the model, the `shape` of a sample (by default the
    model's `event_shape`), the layer and shape of every key, and `about`: class names, a schema, or anything else.
    """
    check_ready(model)
    plain = without_constraints(model)
    # Clones, since the tensors of a block that is used twice have two names.
    state = {key: t.detach().cpu().contiguous().clone() for key, t in plain.state_dict().items()}
    layers = {key: type(plain.get_submodule(key.rpartition(".")[0])).__name__ for key in state}
    description = {
        "by": VERSION,
        "model": type(model).__name__,
        "shape": getattr(model, "event_shape", None) if shape is None else shape,
        "keys": {key: {"layer": layers[key], "shape": list(t.shape)} for key, t in state.items()},
        "about": dict(about or {}),
    }
    return atomic.write(
        path, to_bytes(state, metadata={"format": "pt", "iresnet": json.dumps(description, default=str)})
    )


def check_ready(model: nn.Module) -> None:
    """Refuse a model with layers that wait for their first batch."""
    cold = uninitialised(model)
    if cold:
        raise ValueError(
            f"a model must be initialised before export; {len(cold)} layers still wait for their first batch, e.g. "
            f"{cold[0] or 'the model itself'}. Train the model, or call it on one batch in training mode."
        )
