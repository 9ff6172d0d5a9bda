"""Functions by torch.compile, once for every shape they meet."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def compiled_or_plain(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """The function as it is, or compiled."""
    if not compiled:
        return function

    def call(*arguments: Any) -> Any:
        with compiling():
            return _compiled(function)(*arguments)

    return call


@contextmanager
def compiling() -> Iterator[None]:
    """Within this context a compiled function may meet many shapes, and the compiler look at its arguments in peace."""
    with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=256):
        # It looks at .grad of every input, and torch warns where that is not a leaf; and it would have TensorFloat32.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores for float32 matrix multiplication")
        yield
