"""Which modules a proof may rely on: those whose function is determined by their class, settings and tensors.

A proof covers a closed world. A module belongs to it if all of these hold:

    class         it is a class of this library, one of torch's in `KNOWN_TORCH`, or a subclass of one of these that
                  adds nothing but a constructor
    methods       no instance attribute shadows a method, a parameter, a buffer or a submodule
    hooks         no forward hooks but this library's own, on the module or global ones; a backward hook changes
                  gradients, not the function
    parametrizations    none but this library's own, and only on `weight`
    tensors       plain ones of real numbers: a subclass of `Tensor` or `Parameter` may compute anything
    modes         no mode of a user's own (`TorchFunctionMode`, `TorchDispatchMode`) is active, which may change any
                  operation

Wrappers that call what they wrap (`torch.compile` with a backend of torch, DistributedDataParallel, AveragedModel) are
unwrapped. Everything else still works, but nothing is proven of it, and the reason is reported. Not covered: code that
edits torch's own classes.

Whether a module is still the same function later is checked by `fingerprint`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .compiler import has_known_backend

#: The torch classes whose function is known: linear layers, containers, and what `register_torch_classes` adds.
KNOWN_TORCH: set[type] = {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Sequential, nn.ModuleList}

#: Names that a subclass may define without changing its function: its constructor and its description.
HARMLESS = frozenset(
    {
        "__module__", "__qualname__", "__doc__", "__init__", "__annotations__", "__annotate__", "__annotate_func__",
        "__annotations_cache__", "__static_attributes__", "__firstlineno__", "__parameters__", "__orig_bases__",
        "__type_params__", "__constants__", "__abstractmethods__", "_abc_impl", "__dict__", "__weakref__", "__repr__",
        "extra_repr", "cls_to_become",
    }
)  # fmt: skip

#: Names in the class that torch creates for a parametrized layer, set by torch and by this library.
PARAMETRIZED = HARMLESS | {"__getstate__", "__setstate__", "__deepcopy__", "__reduce_ex__", "train", "weight"}

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
PLAIN_TENSORS = (Tensor, nn.Parameter)

#: The dtypes of parameters, and of buffers, which may also count and mask. A complex weight has another norm than its
#: real part.
REAL_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
BUFFER_DTYPES = REAL_DTYPES | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}

#: The methods that run when a module is called.
CALL_METHODS = ("forward", "_call_impl", "_wrapped_call_impl", "_conv_forward")

WRAPPERS = (AveragedModel, nn.parallel.DistributedDataParallel, nn.DataParallel)

#: Where the functions that `torch.compile` makes are defined.
_DYNAMO = str(Path(torch.__file__).parent / "_dynamo")

#: What decides how a module is copied. A proof is about a copy.
_COPYING = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")

#: Half of it is zero where the processor flushes denormal numbers.
_SMALLEST_NORMAL = sys.float_info.min

#: How many numbers torch gives to a thread before it uses another.
_GRAIN = 32768

_trusted_hooks: set[Any] = set()
_trusted_parametrizations: set[type] = set()

T = TypeVar("T", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


class NoBoundKnown(ValueError):
    """No Lipschitz bound can be proven for a module; the message says why."""


def register_torch_classes(*classes: type) -> None:
    """Add classes of torch whose function this library knows; classes from elsewhere are ignored."""
    KNOWN_TORCH.update(cls for cls in classes if cls.__module__.startswith("torch."))


def trusted_hook(function: F) -> F:
    """Decorator: trust a forward hook of this library, which does not change the function."""
    _trusted_hooks.add(function)
    return function


def trusted_parametrization(cls: T) -> T:
    """Decorator: trust a parametrization of this library."""
    _trusted_parametrizations.add(cls)
    return cls


# ---------------------------------------------------------------------------------------------- checks


def check_global_state() -> None:
    """Raise `NoBoundKnown` under global state that changes modules: hooks, modes, cached weights, flushed numbers."""
    if _SMALLEST_NORMAL / 2 == 0:
        raise NoBoundKnown(
            "torch.set_flush_denormal(True) is set, which rounds small weights to zero; call it with False."
        )
    hooks = (*torch_module._global_forward_hooks.values(), *torch_module._global_forward_pre_hooks.values())
    # Global hooks and modes of torch and of this library only observe.
    if any(map(_is_foreign, hooks)):
        raise NoBoundKnown("global forward hooks are registered, which may change any function; remove them.")
    dispatching: list[Any] = _get_current_dispatch_mode_stack()
    modes = (*dispatching, *_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    if foreign := [type(mode).__name__ for mode in modes if _is_foreign(mode)]:
        raise NoBoundKnown(f"the mode {foreign[0]} is active, which may change any operation; leave it.")
    if not dispatching and _workers_flush():
        raise NoBoundKnown(
            "torch.set_flush_denormal(True) was set when torch started its threads, which still round small weights to "
            "zero; call torch.set_num_threads(1), or start again without it."
        )
    if parametrize._cache_enabled:
        raise NoBoundKnown(
            "torch.nn.utils.parametrize.cached() is active, so layers may use outdated weights; leave that context."
        )


class _ThreadState(threading.local):
    #: The number of threads among which torch divided work when they were last found not to flush.
    checked = 1


_thread_state = _ThreadState()


def _workers_flush() -> bool:
    """Whether a thread among which torch divides work flushes numbers: each keeps what was set when it was started."""
    threads = torch.get_num_threads()
    if threads != _thread_state.checked:
        numbers = torch.full((threads * _GRAIN,), _SMALLEST_NORMAL, dtype=torch.float64, device="cpu")
        if not bool((numbers / 2).all()):
            return True
        _thread_state.checked = threads
    return False


def _is_foreign(observer: object) -> bool:
    """Whether a hook or a mode is neither torch's nor this library's."""
    return not (getattr(observer, "__module__", None) or "").startswith(("torch.", "iresnet."))


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside any wrappers; the module itself if it is not wrapped."""
    while (inner := wrapped_module(module)) is not None:
        module = inner
    return module


def unwrap_unmodified(module: nn.Module) -> nn.Module:
    """Return the module inside any wrappers; raise `NoBoundKnown` if one of them may compute another function."""
    while (inner := wrapped_module(module)) is not None:
        if (reason := why_modified(module)) is not None:
            raise NoBoundKnown(f"{type(module).__name__} {reason}")
        module = inner
    return module


def wrapped_module(module: nn.Module) -> nn.Module | None:
    """Return what a wrapper calls, which may be a wrapper too; None for any other module."""
    cls = type(module)
    if cls in WRAPPERS:
        return cast(nn.Module, module.module)
    if cls.__name__ == "OptimizedModule" and cls.__module__ == "torch._dynamo.eval_frame":
        return cast(nn.Module, module._orig_mod)
    return None


def known_type(module: nn.Module, *, unmodified: bool = False) -> type:
    """Return the known class whose function this module computes; raise `NoBoundKnown` if there is none.

    `unmodified`: the caller has just found that `why_modified` is None, which takes most of the time.

    >>> known_type(nn.Linear(2, 2)).__name__
    'Linear'
    """
    cls = type(module)
    if _is_parametrized(module) and (torch.compiler.is_compiling() or PARAMETRIZED.issuperset(vars(cls))):
        cls = cls.__bases__[0]  # torch gives a parametrized module a class of its own
    known = _known_class(cls)
    if known is None:
        raise NoBoundKnown(_why_unknown_class(cls))
    if not unmodified and (reason := why_modified(module)) is not None:
        raise NoBoundKnown(f"{type(module).__name__} {reason}")
    return known


def why_untrusted(module: nn.Module) -> str:
    """Return why a module is not trusted, its submodules aside; an empty string if it is.

    >>> why_untrusted(nn.Linear(2, 2)), why_untrusted(nn.Dropout())
    ('', 'Dropout is not a class with a known function.')
    """
    try:
        check_global_state()
        known_type(unwrap_unmodified(module))
    except NoBoundKnown as error:
        return str(error)
    return ""


def _known_class(cls: type) -> type | None:
    """Return the class itself if known, or the known base class to which it adds only a constructor."""
    if _is_known(cls):
        return cls
    if torch.compiler.is_compiling():  # dynamo cannot inspect classes
        return None
    for base in cls.__mro__:
        if _is_known(base):
            # A second base class after the known one could change what that one inherits.
            position = cls.__mro__.index(base)
            return base if cls.__mro__[position:] == base.__mro__ else None
        if not HARMLESS.issuperset(vars(base)):
            return None
    return None


def _is_known(cls: type) -> bool:
    return cls in KNOWN_TORCH or cls.__module__.startswith("iresnet.")


def _why_unknown_class(cls: type) -> str:
    parent = next((base for base in cls.__mro__[1:] if _is_known(base) and base is not nn.Module), None)
    if parent is None:
        return f"{cls.__name__} is not a class with a known function."
    added = [name for base in cls.__mro__[: cls.__mro__.index(parent)] for name in vars(base) if name not in HARMLESS]
    what = f"its own {', '.join(dict.fromkeys(added))}" if added else "further base classes"
    return f"{cls.__name__} is a {parent.__name__} with {what}, which may change its function."


def why_modified(module: nn.Module) -> str | None:
    """Return how this instance may compute another function than its class; None if it cannot."""
    own = vars(module)
    for kind in HOOKS:
        for hook in own[kind].values():
            if hook not in _trusted_hooks:
                return "has forward hooks, which may change its function; remove them."
    if (name := _shadowed_name(module, own)) is not None:
        return f"had its {name} replaced, which may change its function; restore it."
    if wrapped_module(module) is not None:
        return None
    for allowed, tensors in ((REAL_DTYPES, own["_parameters"]), (BUFFER_DTYPES, own["_buffers"])):
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
                return f"holds a tensor subclass ({type(tensor).__name__}), which may compute anything."
            if tensor.dtype not in allowed:
                return f"has a {name} of {tensor.dtype}; bounds are for real numbers. Use float32 or float64."
    return _foreign_parametrization(own["_modules"]["parametrizations"]) if _is_parametrized(module) else None


def _is_parametrized(module: nn.Module) -> bool:
    return "parametrizations" in module._modules


def _shadowed_name(module: nn.Module, own: dict[str, Any]) -> str | None:
    """Return an instance attribute that shadows a method, a parameter, a buffer or a submodule."""
    if "_compiled_call_impl" in own and not _is_own_compiled_call(own["_compiled_call_impl"], module):
        return "_compiled_call_impl"
    if torch.compiler.is_compiling():  # nothing is proven while compiling, and dynamo cannot inspect classes
        return next((name for name in CALL_METHODS if name in own and not _is_set_by_torch(name, module)), None)
    keys = own.keys()
    for names in (_methods(type(module)), own["_parameters"], own["_buffers"], own["_modules"]):
        # Almost always disjoint, and that test is fast.
        if names and not keys.isdisjoint(names):
            found = [name for name in names if name in own and not _is_set_by_torch(name, module)]
            if found:
                return found[0]
    return None


def _is_set_by_torch(name: str, module: nn.Module) -> bool:
    """Whether torch itself set this attribute: `torch.compile` sets `forward` on its wrapper."""
    inner = wrapped_module(module)
    if name != "forward" or type(module) in WRAPPERS or inner is None:
        return False
    return torch.compiler.is_compiling() or _calls(vars(module)["forward"], inner)


def _calls(compiled: Any, module: nn.Module) -> bool:
    """Whether a function was made by `torch.compile` from the call of this module."""
    if not getattr(getattr(compiled, "__code__", None), "co_filename", "").startswith(_DYNAMO):
        return False
    made_from = getattr(compiled, "_torchdynamo_orig_callable", None)
    closure = [cell.cell_contents for cell in getattr(made_from, "__closure__", None) or ()]
    own = any(owner is module for owner in (getattr(made_from, "__self__", None), *closure))
    return own and has_known_backend(compiled)


_method_names: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()


def _methods(cls: type) -> frozenset[str]:
    """Return the names of the methods and properties of a class, of copying, and of tensors of layers (cached)."""
    found = _method_names.get(cls)
    if found is None:
        found = _method_names[cls] = _collect_methods(cls)
    return found


def _collect_methods(cls: type) -> frozenset[str]:
    return frozenset(
        name
        for base in cls.__mro__[:-1]
        for name, value in vars(base).items()
        if callable(value) or isinstance(value, property | staticmethod | classmethod)
    ).union(("weight", "bias", *_COPYING))


def _is_own_compiled_call(call: Any, module: nn.Module) -> bool:
    """Whether `call` was set by `module.compile()`, so that it is the same function, compiled; or was never set."""
    if call is None:
        return True
    method = getattr(call, "_torchdynamo_orig_callable", None)
    own = getattr(method, "__self__", None) is module and getattr(method, "__func__", None) is nn.Module._call_impl
    return own and has_known_backend(call)


def _foreign_parametrization(parametrizations: nn.Module) -> str | None:
    reason = "has a parametrization of another library, whose values are not known; remove it."
    if list(parametrizations._modules) != ["weight"]:
        return reason
    chain = parametrizations._modules["weight"]
    if type(chain) is not parametrize.ParametrizationList or why_modified(chain) is not None:
        return reason
    if len(chain._modules) != 1:
        return reason
    (rule,) = cast("Iterable[nn.Module]", chain._modules.values())
    return None if type(rule) in _trusted_parametrizations and why_modified(rule) is None else reason
