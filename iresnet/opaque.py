"""Calls that are one operation of compiled code: torch.compile does not look inside, and they run eagerly.

An inverse stops when the data allow it, raises if it is not proven, and its proof compares weights bit for bit. A graph
of tensor operations cannot express that. So compiled code calls such a function as a whole, and results, proofs and
errors are those of eager code. The backward pass calls it again, with an autograd graph; so it must be deterministic,
given a seed.

An operation has tensors and numbers as arguments. The module is named by its `id`, which the compiler guards, and the
settings are text. The module's tensors are arguments too: gradients reach them, and they are compared with those that
the module holds, since compiled code that changes weights stores them only at its end.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

T = TypeVar("T")


@dataclass(frozen=True)
class Function:
    """A function that compiled code calls as a whole: (module, x, context, tolerance=, generator=, ...) -> tensors.

    `empty` returns uninitialised tensors like the results, given the module and x. `classes` are the frozen dataclasses
    that settings may have.
    """

    compute: Callable[..., Sequence[Tensor]]
    empty: Callable[[Any, Tensor], Sequence[Tensor]]
    classes: tuple[type, ...]


_functions: dict[str, Function] = {}
_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()


def define(name: str, function: Function) -> None:
    """Make a function known by a name."""
    _functions[name] = function


def keep_track(thing: object) -> None:
    """Make an object known by its id, for as long as it lives."""
    _objects[id(thing)] = thing


def tracked(key: int) -> Any:
    """Return the object with this id."""
    found = _objects.get(key)
    if found is None:
        raise RuntimeError(
            "compiled code with an inverse belongs to the model and the process that it was compiled for; got another "
            "one. Compile it again."
        )
    return found


def call(
    name: str, owner: nn.Module, x: Tensor, context: Tensor | None, tolerance: float | None, seed: Tensor | None,
    settings: dict[str, Any],
) -> list[Tensor]:  # fmt: skip
    """Call a function in compiled code, with the random numbers of this seed."""
    kind = x.device.type
    lowered = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
    which = name, id(owner), tolerance, _as_text({"autocast": lowered, **settings})
    return cast("list[Tensor]", torch.ops.iresnet.call(x, context, seed, _tensors(owner), *which))


def outside_graph(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Call a function between two graphs of compiled code; with fullgraph=True, the compiler refuses to."""
    return cast(T, torch.compiler.disable(function)(*arguments, **options))  # type: ignore[no-untyped-call]


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


class _Call(torch.autograd.Function):
    """The operation, with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, call: tuple[Any, ...], x: Tensor, context: Tensor | None, seed: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        results = tuple(torch.ops.iresnet.compute(x, context, seed, tensors, *call))
        ctx.call, ctx.results = call, len(results)
        ctx.save_for_backward(*results, x, context, seed, *tensors)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        results, (x, context, seed, *tensors) = ctx.saved_tensors[: ctx.results], ctx.saved_tensors[ctx.results :]
        needed = ctx.needs_input_grad
        wanted = [needed[1], needed[2], *needed[4:]]
        given = list(gradients), wanted, list(results)
        found = torch.ops.iresnet.compute_gradient(*given, x, context, seed, tensors, *ctx.call)
        of_x, of_context, *others = _spread(found, wanted)
        return None, of_x, of_context, None, *others


def _spread(found: list[Tensor], wanted: list[bool]) -> list[Tensor | None]:
    """Return one gradient per input, None where it is not wanted."""
    remaining = list(found)
    return [remaining.pop(0) if each else None for each in wanted]


# ---------------------------------------------------------------------------------------------- the operations


def _call(
    x: Tensor, context: Tensor | None, seed: Tensor | None, tensors: list[Tensor], *call: Any
) -> list[Tensor]:  # fmt: skip
    return list(_Call.apply(call, x, context, seed, *tensors))  # type: ignore[no-untyped-call]


def _compute(
    x: Tensor, context: Tensor | None, seed: Tensor | None, tensors: list[Tensor], name: str, owner: int,
    tolerance: float | None, settings: str,
) -> list[Tensor]:  # fmt: skip
    module = _unchanged_module(owner, tensors)
    with torch.no_grad():
        results = _run(module, x, context, seed, name, tolerance, settings)
        _check_shapes(results, name, module, x)
        return [_contiguous_copy(t) for t in results]


def _compute_gradient(
    gradients: list[Tensor], wanted: list[bool], before: list[Tensor], x: Tensor, context: Tensor | None,
    seed: Tensor | None, tensors: list[Tensor], name: str, owner: int, tolerance: float | None, settings: str,
) -> list[Tensor]:  # fmt: skip
    module = _unchanged_module(owner, tensors)
    x = x.detach().requires_grad_(wanted[0])
    context = None if context is None else context.detach().requires_grad_(wanted[1])
    inputs = [t for t, each in zip((x, context, *_tensors(module)), wanted, strict=True) if each and t is not None]
    with torch.enable_grad():
        results = _run(module, x, context, seed, name, tolerance, settings)
        if not all(map(_is_near, before, results)):
            raise RuntimeError(
                f"the model changed between a compiled {name} and its backward pass, which computes it again. Change "
                "weights and settings after the backward pass."
            )
        pairs = [(t, g) for t, g in zip(results, gradients, strict=True) if t.requires_grad]
        found = torch.autograd.grad([t for t, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True)
    return [_contiguous_copy(torch.zeros_like(t) if g is None else g) for t, g in zip(inputs, found, strict=True)]


def _contiguous_copy(t: Tensor) -> Tensor:
    """Return what an operation may return: in the layout that the compiler expects, and not one of its arguments."""
    return t.clone(memory_format=torch.contiguous_format)


def _run(
    module: nn.Module, x: Tensor, context: Tensor | None, seed: Tensor | None, name: str, tolerance: float | None,
    settings: str,
) -> Sequence[Tensor]:  # fmt: skip
    function, generator = _functions[name], None
    if seed is not None:
        generator = torch.Generator(device=x.device).manual_seed(int(seed))
    compute = torch.compiler.disable(function.compute)  # type: ignore[no-untyped-call]
    options = _read(settings, function.classes)
    with _autocast(x, options.pop("autocast", None)):
        return cast(
            "Sequence[Tensor]", compute(module, x, context, tolerance=tolerance, generator=generator, **options)
        )


def _autocast(x: Tensor, lowered: str | None) -> AbstractContextManager[object]:
    """Compute in this precision, that of the place where the call was traced; where it runs, autocast may differ."""
    dtype = None if lowered is None else getattr(torch, lowered.removeprefix("torch."))
    return torch.autocast(x.device.type, dtype, enabled=dtype is not None)


def _empty(
    x: Tensor, context: Tensor | None, seed: Tensor | None, tensors: list[Tensor], name: str, owner: int,
    tolerance: float | None, settings: str,
) -> list[Tensor]:  # fmt: skip
    _read(settings, _functions[name].classes)
    return list(_functions[name].empty(tracked(owner), x))


def _empty_gradient(
    gradients: list[Tensor], wanted: list[bool], before: list[Tensor], x: Tensor, context: Tensor | None,
    seed: Tensor | None, tensors: list[Tensor], *call: Any,
) -> list[Tensor]:  # fmt: skip
    inputs = zip((x, context, *tensors), wanted, strict=True)
    return [t.new_empty(t.shape) for t, each in inputs if each and t is not None]


# Not `torch.library.custom_op`, in whose kernels autograd is off. `call` is in the graphs that torch.compile traces; it
# consists of the others, so that no autograd function is traced, which torch 2.13 warns about.
_library: Any = torch.library.Library("iresnet", "DEF")  # type: ignore[no-untyped-call]
_UNSAFE_TAG = getattr(torch.Tag, "cudagraph_unsafe", None)  # torch 2.7 does not have it
_TAGS = () if _UNSAFE_TAG is None else (_UNSAFE_TAG,)
_INPUTS = (
    "Tensor x, Tensor? context, Tensor? seed, Tensor[] tensors, str name, int owner, float? tolerance, str settings"
)
_library.define(f"call({_INPUTS}) -> Tensor[]")
_library.define(f"compute({_INPUTS}) -> Tensor[]", tags=_TAGS)
_library.define(
    f"compute_gradient(Tensor[] gradients, bool[] wanted, Tensor[] before, {_INPUTS}) -> Tensor[]", tags=_TAGS
)
_library.impl("call", _call, "CompositeImplicitAutograd")
_library.impl("compute", _compute, "CompositeExplicitAutograd")
_library.impl("compute_gradient", _compute_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("iresnet::compute", _empty, lib=_library)
torch.library.register_fake("iresnet::compute_gradient", _empty_gradient, lib=_library)


# ---------------------------------------------------------------------------------------------- checks


def _unchanged_module(owner: int, tensors: Sequence[Tensor]) -> nn.Module:
    """Return the module; raise `RuntimeError` unless it holds these tensors, bit for bit."""
    module: nn.Module = tracked(owner)
    own = _tensors(module)
    if len(own) != len(tensors) or not all(map(_is_same, own, tensors)):
        raise RuntimeError(
            "weights and buffers must not change in compiled code that also inverts the model; got changed ones. "
            "Compile what changes them apart: an optimiser's step, or a forward pass in training mode."
        )
    return module


def _is_same(a: Tensor, b: Tensor) -> bool:
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return (a.data_ptr() == b.data_ptr() and a.stride() == b.stride()) or torch.equal(a, b)


def _is_near(a: Tensor, b: Tensor) -> bool:
    """Whether two results of the same function are equal up to rounding, which may differ with a graph and on a GPU."""
    a, b, rounding = a.detach(), b.detach(), 1e3 * torch.finfo(a.dtype).eps
    largest = float(a.nan_to_num(0.0, 0.0, 0.0).abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=rounding, atol=rounding * max(1.0, largest), equal_nan=True)


def _check_shapes(results: Sequence[Tensor], name: str, module: nn.Module, x: Tensor) -> None:
    """Raise `ValueError` if results are not what compiled code expects."""
    expected, found = _kinds(_functions[name].empty(module, x)), _kinds(results)
    if found != expected:
        raise ValueError(
            f"the result of a compiled {name} must have shape and dtype {expected}; got {found}. A Transform of your "
            "own that changes shapes must implement `data_shape`; and x must have the dtype of the model."
        )


def _kinds(tensors: Sequence[Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(t.shape), t.dtype) for t in tensors]


# ---------------------------------------------------------------------------------------------- settings as text


#: Not a union of types, which torch.compile of torch 2.7 cannot trace.
_LITERALS = (type(None), bool, int, float, str)


def _as_text(value: Any) -> str:
    """Write a setting as a Python literal: an object is a pair of its class and a dictionary."""
    if isinstance(value, dict):
        return "{" + ", ".join([f"{key!r}: {_as_text(each)}" for key, each in value.items()]) + "}"
    if isinstance(value, _LITERALS):
        return f"{value!r}"
    own = {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else {}
    return f"({_class_name(type(value))!r}, {_as_text(own)})"


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _read(text: str, classes: Sequence[type]) -> dict[str, Any]:
    """Return the settings written by `_as_text`."""
    known = {_class_name(cls): cls for cls in classes}

    def read(value: Any) -> Any:
        if not isinstance(value, tuple):
            return value
        if value[0] not in known:
            names = ", ".join(cls.__name__ for cls in classes)
            raise ValueError(
                f"in compiled code, solvers and estimators must be of the classes {names}; got {value[0]}. Call this "
                "function outside of the compiled code."
            )
        return known[value[0]](**value[1])

    return {key: read(value) for key, value in ast.literal_eval(text).items()}
