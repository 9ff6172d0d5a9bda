"""Functions by torch.compile, once for every shape they meet."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def compiled_or_plain(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """The function as it is, or compiled: more often than the compiler expects of one function."""
    if not compiled:
        return function

    def call(*arguments: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=256):
            return _compiled(function)(*arguments)

    return call
