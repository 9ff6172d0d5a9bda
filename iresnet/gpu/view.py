"""Views of modules: copies with some submodules replaced, which share all parameters and buffers with the original."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import nn


def module_view(module: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Return the module with each submodule `m` replaced by `wrap(m)`, from the innermost outwards.

    A module in which nothing is replaced is shared; one in which something is replaced is copied shallowly.
    """
    seen: dict[nn.Module, nn.Module] = {}  # a submodule that is used twice is one module in the view, too

    def view(part: nn.Module) -> nn.Module:
        if part not in seen:
            children = {name: None if child is None else view(child) for name, child in part._modules.items()}
            seen[part] = wrap(_with_children(part, children))
        return seen[part]

    return view(module)


def _with_children(module: nn.Module, children: dict[str, nn.Module | None]) -> nn.Module:
    """Return the module itself, or a shallow copy of it with other children."""
    if all(children[name] is child for name, child in module._modules.items()):
        return module
    if "_orig_mod" in children:  # torch.compile: its compiled function has the original children
        return cast(nn.Module, children["_orig_mod"])
    # As torch replicates a module for another device, but sharing parameters; copy.copy might be overridden.
    copy = cast(Any, module)._replicate_for_data_parallel()
    copy._parameters, copy._buffers, copy._modules = module._parameters, module._buffers, children
    copy._compiled_call_impl = None
    return cast(nn.Module, copy)
