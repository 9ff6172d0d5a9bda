"""Functions by torch.compile, once for every shape they meet; and what compilers, captures and torch.func forbid."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

# torch has no public names for these and what is imported; they are the same from 2.7 to 2.13.
_functorch: Any = torch._C._functorch
_functorch_is_active: Any = torch._C._are_functorch_transforms_active


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def maybe_compile(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """The function as it is, or compiled."""
    if not compiled:
        return function

    def call(*arguments: Any) -> Any:
        with compile_settings():
            return _compiled(function)(*arguments)

    return call


@contextmanager
def compile_settings() -> Iterator[None]:
    """Within this context a compiled function may meet many shapes, and the compiler look at its arguments in peace."""
    with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=256):
        # It looks at .grad of every input, and torch warns where that is not a leaf; and it would have TensorFloat32.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores for float32 matrix multiplication")
        yield


def can_read_values(x: Tensor) -> bool:
    """Whether values of x may be read back: not in a graph that is compiled or captured, nor inside of
    `torch.func.vmap`, where x stands for many tensors at once.

    >>> can_read_values(torch.ones(2)), torch.func.vmap(lambda x: x * can_read_values(x))(torch.ones(2)).tolist()
    (True, [0.0, 0.0])
    """
    if torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return not is_batched(x)


def is_transforming() -> bool:
    """Whether the code runs inside of `torch.func.grad`, `vmap`, `jacrev` and so on."""
    return not torch.compiler.is_compiling() and bool(_functorch_is_active())


def outside_transforms() -> AbstractContextManager[Any]:
    """Within this context nothing of `torch.func` is active: tensors that are made are plain ones."""
    return cast(AbstractContextManager[Any], temporarily_clear_interpreter_stack())


def is_batched(x: Tensor) -> bool:
    """Whether x stands for many tensors at once, those that `torch.func.vmap` is called with."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False


def detach_completely(x: Tensor) -> Tensor:
    """x detached from all graphs, those of `torch.func` too."""
    while _functorch.is_gradtrackingtensor(x):
        x = _functorch.get_unwrapped(x)
    return x.detach()
