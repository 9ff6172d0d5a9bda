"""What a proof may rely on: modules whose function is known from their class, their settings and their numbers.

A proof covers a closed world. A module belongs to it if

    class         it is this library's, or one of torch's in `TORCH`, or adds nothing to one of them but a constructor
    methods       no instance attribute stands in the place of a method, a parameter, a buffer or a submodule
    hooks         no forward hooks but this library's own, on the module and on all modules of the process; a backward
                  hook changes gradients and no function
    parametrizations    none but this library's own, on `weight` alone
    tensors       plain ones of real numbers: no subclass of `Tensor` or `Parameter`, which may compute anything

Wrappers that call what they wrap (`torch.compile`, DistributedDataParallel, AveragedModel) are looked through. Whatever
lies outside works as before, but nothing is proven of it, and the reason is said. Not covered: code that edits torch's
own classes.

What was proven stays proven while the module is the same function: `Seal` keeps its settings and a copy of its numbers,
and compares them bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel

#: The classes of torch of which something is known: linear layers, what holds them, and what `known_classes` adds.
TORCH: set[type] = {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Sequential, nn.ModuleList}

#: What the body of a class may define without changing a method: its constructor and what describes it.
HARMLESS = frozenset(
    {
        "__module__", "__qualname__", "__doc__", "__init__", "__annotations__", "__annotate__", "__annotate_func__",
        "__annotations_cache__", "__static_attributes__", "__firstlineno__", "__parameters__", "__orig_bases__",
        "__type_params__", "__constants__", "__abstractmethods__", "_abc_impl", "__dict__", "__weakref__", "__repr__",
        "extra_repr", "cls_to_become",
    }
)  # fmt: skip

#: What torch and this library put into the class that a parametrized layer gets.
PARAMETRIZED = HARMLESS | {"__getstate__", "__setstate__", "__deepcopy__", "__reduce_ex__", "train", "weight"}

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
MACHINERY = frozenset(vars(nn.Module()))
PLAIN = (Tensor, nn.Parameter)

#: What parameters may be, and buffers, which also count and mask: real numbers. A complex weight has another norm than
#: its real part.
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
NUMBERS = FLOATS | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}

#: What a call of a module goes through.
CALLED = ("forward", "_call_impl", "_wrapped_call_impl", "_conv_forward")

#: Integers by their size in bytes: what numbers are compared as, so that a NaN equals itself and -0 is not 0.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WRAPPERS = (AveragedModel, nn.parallel.DistributedDataParallel, nn.DataParallel)

_own_hooks: set[Any] = set()
_own_parametrizations: set[type] = set()

T = TypeVar("T", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


class NoBoundKnown(ValueError):
    """Nothing is known of this module, so that nothing can be proven: the message says why."""


def known_classes(*classes: type) -> None:
    """Register classes of torch of which this library has a record."""
    TORCH.update(cls for cls in classes if cls.__module__.startswith("torch."))


def own_hook(function: F) -> F:
    """Register a hook of this library, which changes no function."""
    _own_hooks.add(function)
    return function


def own_parametrization(cls: T) -> T:
    """Register a parametrization of this library."""
    _own_parametrizations.add(cls)
    return cls


# ---------------------------------------------------------------------------------------------- what is known


def check_process() -> None:
    """Refuse a proof where any function may be another one: under hooks of all modules, or cached weights."""
    hooks = (*torch_module._global_forward_hooks.values(), *torch_module._global_forward_pre_hooks.values())
    # Those of torch and of this library only count and note.
    if any(not getattr(hook, "__module__", "").startswith(("torch.", "iresnet.")) for hook in hooks):
        raise NoBoundKnown("forward hooks of all modules are registered, which may change any function; remove them.")
    if parametrize._cache_enabled:
        raise NoBoundKnown(
            "torch.nn.utils.parametrize.cached() is entered, in which layers may keep weights of an earlier moment; "
            "leave it."
        )


def unwrap(module: nn.Module) -> nn.Module:
    """What a wrapper calls; the module itself where it is none."""
    while (inner := _inner(module)) is not None:
        module = inner
    return module


def _inner(module: nn.Module) -> nn.Module | None:
    cls = type(module)
    if cls in WRAPPERS:
        return cast(nn.Module, module.module)
    if cls.__name__ == "OptimizedModule" and cls.__module__ == "torch._dynamo.eval_frame":
        return cast(nn.Module, module._orig_mod)
    return None


def known_type(module: nn.Module) -> type:
    """The class whose function this module has; `NoBoundKnown` with the reason where that cannot be said.

    >>> known_type(nn.Linear(2, 2)).__name__
    'Linear'
    """
    cls = type(module)
    if _is_parametrized(module) and (torch.compiler.is_compiling() or PARAMETRIZED.issuperset(vars(cls))):
        cls = cls.__bases__[0]  # torch gives a parametrized module a class of its own
    known = _known_class(cls)
    if known is None:
        raise NoBoundKnown(_unknown_class(cls))
    if (reason := changed(module)) is not None:
        raise NoBoundKnown(f"{type(module).__name__} {reason}")
    return known


def doubt(module: nn.Module) -> str:
    """Why a module is not known, its own parts aside; empty where it is.

    >>> doubt(nn.Linear(2, 2)), doubt(nn.Dropout())
    ('', 'Dropout is not a class whose function is known here.')
    """
    try:
        while (inner := _inner(module)) is not None:
            if (reason := changed(module)) is not None:
                return f"{type(module).__name__} {reason}"
            module = inner
        known_type(module)
    except NoBoundKnown as error:
        return str(error)
    return ""


def _known_class(cls: type) -> type | None:
    """The known class of which this one is, or to which it adds only a constructor."""
    if _is_known(cls):
        return cls
    if torch.compiler.is_compiling():  # which cannot look into classes
        return None
    for base in cls.__mro__:
        if _is_known(base):
            # A second parent, behind the known one, could change what that one inherits.
            position = cls.__mro__.index(base)
            return base if cls.__mro__[position:] == base.__mro__ else None
        if not HARMLESS.issuperset(vars(base)):
            return None
    return None


def _is_known(cls: type) -> bool:
    return cls in TORCH or cls.__module__.startswith("iresnet.")


def _unknown_class(cls: type) -> str:
    parent = next((base for base in cls.__mro__[1:] if _is_known(base) and base is not nn.Module), None)
    if parent is None:
        return f"{cls.__name__} is not a class whose function is known here."
    changed = [name for base in cls.__mro__[: cls.__mro__.index(parent)] for name in vars(base) if name not in HARMLESS]
    what = f"its own {', '.join(dict.fromkeys(changed))}" if changed else "other parents as well"
    return f"{cls.__name__} is a {parent.__name__} with {what}, which may change its function."


def changed(module: nn.Module) -> str | None:
    """How the function of this instance may differ from that of its class."""
    own = vars(module)
    for kind in HOOKS:
        if own[kind] and any(hook not in _own_hooks for hook in own[kind].values()):
            return "has forward hooks, which may change its function; remove them."
    if (name := _shadowing(module, own)) is not None:
        return f"had its {name} replaced, which may change its function; restore it."
    if _inner(module) is not None:
        return None
    for kinds, names in ((FLOATS, own["_parameters"]), (NUMBERS, own["_buffers"])):
        for name, tensor in names.items():
            if tensor is None:
                continue
            if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
                return f"holds a tensor of a class of its own ({type(tensor).__name__}), which may compute anything."
            if tensor.dtype not in kinds:
                return f"has a {name} of {tensor.dtype}; bounds are for real numbers. Use float32 or float64."
    return _foreign_parametrization(own["_modules"]["parametrizations"]) if _is_parametrized(module) else None


def _is_parametrized(module: nn.Module) -> bool:
    return "parametrizations" in module._modules


def _shadowing(module: nn.Module, own: dict[str, Any]) -> str | None:
    """The name of an instance attribute that stands before a method, a parameter, a buffer or a submodule."""
    if "_compiled_call_impl" in own and not _is_compiled(own["_compiled_call_impl"], module):
        return "_compiled_call_impl"
    if torch.compiler.is_compiling():  # which proves nothing, and cannot look into classes
        return next((name for name in CALLED if name in own and not _is_torchs(name, module)), None)
    for names in (_methods(type(module)), own["_parameters"], own["_buffers"], own["_modules"], ("weight", "bias")):
        # Sets of names are disjoint nearly always, which is seen fast.
        if not own.keys().isdisjoint(names):
            found = [name for name in names if name in own and not _is_torchs(name, module)]
            if found:
                return found[0]
    return None


def _is_torchs(name: str, module: nn.Module) -> bool:
    """Whether torch itself put this attribute there: the forward of `torch.compile`."""
    return name == "forward" and type(module) not in WRAPPERS and _inner(module) is not None


_names: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()


def _methods(cls: type) -> frozenset[str]:
    """The names of methods and properties of a class, found once."""
    if cls not in _names:
        _names[cls] = _found_methods(cls)
    return _names[cls]


def _found_methods(cls: type) -> frozenset[str]:
    return frozenset(
        name
        for base in cls.__mro__[:-1]
        for name, value in vars(base).items()
        if callable(value) or isinstance(value, property | staticmethod | classmethod)
    )


def _is_compiled(call: Any, module: nn.Module) -> bool:
    """Whether this is what `module.compile()` calls: the same function, compiled; None where it was not."""
    method = getattr(call, "_torchdynamo_orig_callable", None)
    own = getattr(method, "__self__", None) is module and getattr(method, "__func__", None) is nn.Module._call_impl
    return call is None or own


def _foreign_parametrization(parametrizations: nn.Module) -> str | None:
    reason = "has a parametrization of another library, whose values are not known; remove it."
    if list(parametrizations._modules) != ["weight"]:
        return reason
    chain = parametrizations._modules["weight"]
    if type(chain) is not parametrize.ParametrizationList or len(chain) != 1 or changed(chain) is not None:
        return reason
    (rule,) = chain
    return None if type(rule) in _own_parametrizations and changed(rule) is None else reason


# ---------------------------------------------------------------------------------------------- what stays the same


class Seal:
    """What a module was when something was proven of it. `holds` says whether it is the same function still.

    Settings are compared by value; numbers bit for bit with a copy that lies on the same device, which waits for it
    once. Names in `outside_proof` of a class are left out: they are not part of the function of x.

    >>> layer = nn.Linear(2, 2)
    >>> seal = Seal(layer)
    >>> before = seal.holds(layer)
    >>> _ = layer.weight.data.neg_()
    >>> before, seal.holds(layer)
    (True, False)
    """

    def __init__(self, module: nn.Module) -> None:
        self.settings, tensors = described(module)
        self.kinds = [(t.shape, t.dtype, t.device) for t in tensors]
        self.numbers = [t.clone() for t in _flat(tensors)]

    @torch.no_grad()
    def holds(self, module: nn.Module) -> bool:
        """Whether this module is the sealed function; False also where it is not known any more."""
        try:
            settings, tensors = described(module)
        except NoBoundKnown:
            return False
        if settings != self.settings or [(t.shape, t.dtype, t.device) for t in tensors] != self.kinds:
            return False
        return same_numbers(self.numbers, tensors)


def same_numbers(kept: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
    """Whether tensors hold the numbers that were kept of them, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(_flat(tensors), kept, strict=True))


def described(module: nn.Module) -> tuple[Any, list[Tensor]]:
    """(settings, tensors): all that determines the function of a known module; `NoBoundKnown` for another."""
    check_process()
    tensors: list[Tensor] = []
    return _described(module, tensors), tensors


def _described(module: nn.Module, tensors: list[Tensor]) -> Any:
    wrapped = module
    module = unwrap(module)
    if wrapped is not module and (reason := doubt(wrapped)):
        raise NoBoundKnown(reason)
    known, own = known_type(module), vars(module)
    aside = getattr(known, "outside_proof", ())
    found = {**own["_parameters"], **own["_buffers"]}
    tensors += [t.detach() for name, t in found.items() if t is not None and name not in aside]
    # In this library's classes a name with an underscore is a note of their own; in torch's it may be a setting.
    hidden = known not in TORCH
    settings = {
        name: tuple(own[name]) if isinstance(own[name], list) else own[name]
        for name in own.keys() - MACHINERY
        if not (hidden and name[0] == "_") and name != "_compiled_call_impl"
    }
    children = [
        (name, _of_parametrizations(child, tensors) if name == "parametrizations" else _described(child, tensors))
        for name, child in own["_modules"].items()
        if child is not None and name not in aside
    ]
    present = [(name, t is not None) for name, t in found.items() if name not in aside]
    return known, settings, present, children


def _of_parametrizations(parametrizations: nn.Module, tensors: list[Tensor]) -> Any:
    """The one parametrization that `known_type` lets pass, and the weight it is made from."""
    chain = cast(Any, parametrizations._modules["weight"])
    tensors.append(chain.original.detach())
    return _described(chain[0], tensors)


def _flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    """All numbers as integers, one tensor for each device and type; of one tensor alone no copy."""
    groups: dict[Any, list[Tensor]] = {}
    for t in tensors:
        groups.setdefault((t.device, t.dtype), []).append(t.resolve_neg())
    flat = [cast(Tensor, _flatten_dense_tensors(group)) for group in groups.values()]  # type: ignore[no-untyped-call]
    return [t.view(INTEGERS[t.element_size()]) if t.is_floating_point() else t for t in flat if t.numel()]
