"""A view of a module: some of its parts replaced, the same parameters, buffers and settings. It stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import nn


def module_view(module: nn.Module, wrapped: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The module with `wrapped(part)` in the place of each part, from the innermost outwards.

    What holds no such part is taken as it is, and what holds one is a shallow copy.
    """
    seen: dict[nn.Module, nn.Module] = {}  # a part that is used twice is one in the view, too

    def view(part: nn.Module) -> nn.Module:
        if part not in seen:
            seen[part] = wrapped(_with(part, {n: None if m is None else view(m) for n, m in part._modules.items()}))
        return seen[part]

    return view(module)


def _with(module: nn.Module, children: dict[str, nn.Module | None]) -> nn.Module:
    """The module itself, or a shallow copy of it that has other children."""
    if all(children[name] is child for name, child in module._modules.items()):
        return module
    if "_orig_mod" in children:  # torch.compile: its function is that of the children it had
        return cast(nn.Module, children["_orig_mod"])
    # As torch copies a module for another device, but with the parameters; copy.copy would ask the class how.
    copy = cast(Any, module)._replicate_for_data_parallel()
    copy._parameters, copy._buffers, copy._modules = module._parameters, module._buffers, children
    copy._compiled_call_impl = None
    return cast(nn.Module, copy)
