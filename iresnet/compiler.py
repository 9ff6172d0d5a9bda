"""torch.compile, once per shape; whose code compiles; and what may not be done in compiled code or torch.func."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

# torch has no public names for these and the import above; they are the same from 2.7 to 2.13.
_functorch: Any = torch._C._functorch
_functorch_is_active: Any = torch._C._are_functorch_transforms_active

#: The backends of torch.compile that compute what they are given.
_KNOWN_BACKENDS = ("inductor", "eager", "aot_eager", "aot_eager_decomp_partition", "cudagraphs")

#: The settings of torch's compiler, for the whole process, that may hold code of a user's own.
_CUSTOM_PASSES = (
    "pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass", "_pre_fusion_custom_pass", "_post_fusion_custom_pass", "custom_partitioner_fn",
)  # fmt: skip


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def maybe_compile(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """Return the function compiled, or as it is."""
    if not compiled:
        return function

    def call(*arguments: Any) -> Any:
        with compile_settings():
            return _compiled(function)(*arguments)

    return call


@contextmanager
def compile_settings() -> Iterator[None]:
    """Within this context a compiled function may see many shapes, and the compiler's irrelevant warnings are off.

    Nor does the compiler cut it where DistributedDataParallel, inside which it may run, averages gradients.
    """
    with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=256, optimize_ddp=False):
        # The compiler reads .grad of every input, also of non-leaf tensors; and it recommends TensorFloat32.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores for float32 matrix multiplication")
        yield


def has_known_backend(compiled: Any) -> bool:
    """Whether what torch.compile returned is computed by a backend of torch, and not by one of a user's own.

    >>> has_known_backend(torch.compile(abs)), has_known_backend(torch.compile(abs, backend=lambda graph, x: graph))
    (True, False)
    """
    if torch.compiler.is_compiling():  # nothing is proven while compiling, and dynamo cannot inspect itself
        return True
    stance = getattr(sys.modules["torch._dynamo.eval_frame"], "_stance", None)
    if getattr(stance, "backend", None) is not None:  # of torch.compiler.set_stance, for everything
        return False
    cells = [cell.cell_contents for cell in getattr(compiled, "__closure__", None) or ()]
    contexts = [c for c in cells if type(c).__module__ == "torch._dynamo.eval_frame" and hasattr(c, "callback")]
    if not contexts:  # of torch.compiler.disable in torch 2.7
        return len(cells) == 1 and bool(getattr(compiled, "_torchdynamo_disable", False))
    return all(type(c).__name__ == "DisableContext" or _is_known_backend(c.callback) for c in contexts)


def _is_known_backend(callback: Any) -> bool:
    while True:  # the names in torch 2.7 and since
        for name in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable"):
            if (inner := getattr(callback, name, None)) is not None:
                callback = inner
                break
        else:
            break
    if type(callback) is torch._TorchCompileInductorWrapper:
        # An option may be code of a user's own.
        passes = (getattr(sys.modules.get("torch._inductor.config"), name, None) for name in _CUSTOM_PASSES)
        return all(isinstance(value, bool | int | float | str | None) for value in callback.config.values()) and all(
            value is None for value in passes
        )
    if type(callback) is not torch._TorchCompileWrapper:
        return False
    lookup = sys.modules["torch._dynamo.backends.registry"].lookup_backend
    function = callback.compiler_fn
    return function.__module__.startswith("torch._dynamo.backends.") and any(
        function is lookup(name) for name in _KNOWN_BACKENDS[1:]
    )


def drawing_from(generator: torch.Generator | None) -> dict[str, Any]:
    """Return the keywords for `torch.randn` and so on. With `generator=None` they compile for one shape only."""
    if isinstance(generator, int):
        raise ValueError(
            f"generator must be a torch.Generator; got {generator}. Use torch.Generator().manual_seed({generator})."
        )
    return {} if generator is None else {"generator": generator}


def can_read_values(x: Tensor) -> bool:
    """Whether the values of x can be read: not in compiled code or a CUDA graph capture, nor inside `torch.func.vmap`.

    >>> can_read_values(torch.ones(2)), torch.func.vmap(lambda x: x * can_read_values(x))(torch.ones(2)).tolist()
    (True, [0.0, 0.0])
    """
    if torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return not is_batched(x)


def is_transforming() -> bool:
    """Whether the code runs inside `torch.func.grad`, `vmap`, `jacrev` and so on."""
    return not torch.compiler.is_compiling() and bool(_functorch_is_active())


def has_tangent(*tensors: Tensor) -> bool:
    """Whether forward-mode AD (`torch.autograd.forward_ad`) carries a derivative along with one of these tensors."""
    if forward_ad._current_level < 0:  # which costs less than to ask every tensor
        return False
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)  # type: ignore[no-untyped-call]


def outside_transforms() -> AbstractContextManager[Any]:
    """Within this context no `torch.func` transform is active: new tensors are plain ones."""
    return cast(AbstractContextManager[Any], temporarily_clear_interpreter_stack())


def is_batched(x: Tensor) -> bool:
    """Whether x is a batched tensor inside `torch.func.vmap`."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False


def detach_completely(x: Tensor) -> Tensor:
    """Return x detached from all graphs, including those of `torch.func`."""
    while _functorch.is_gradtrackingtensor(x):
        x = _functorch.get_unwrapped(x)
    return x.detach()
