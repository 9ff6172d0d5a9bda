"""Export a trained model to files that run without this library.

    weights.safetensors   the constrained weights as plain ones: W min(1, c / sigma(W)) of Eq. (2), computed once
    program.pt2           x -> {"code": F(x), ...} as a `torch.export` program; needs only torch
    model.onnx            the same as ONNX; needs only a runtime such as onnxruntime

Both programs accept any batch size, and each is compared with the model before it is written. They contain the forward
pass (`forward.Forward`): the code, the logits of a classifier, and the scores of a density of rows. The inverse and
the proven bounds need the library, which loads the weights again.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import atomic
from ..batch import Shape, check_batch
from ..classifier import Classifier
from ..data import Schema
from ..evaluate import anomaly
from ..flow import Flow
from ..hybrid import Hybrid
from ..lipschitz import release_
from ..spelling import counted, first_line, round_up
from ..transform import Transform
from ..transforms.first_batch import uninitialised
from ..version import __version__
from .forward import Forward, Tensors

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Model = TypeVar("Model", bound=nn.Module)
About: TypeAlias = Mapping[str, Any]

VERSION = f"iresnet {__version__} with torch {torch.__version__}"

#: What a call of each kind of model returns, by the names of `Forward`.
RETURNED: tuple[tuple[type[nn.Module], tuple[str, ...]], ...] = (
    (Hybrid, ("log_prob", "logits")),
    (Flow, ("log_prob",)),
    (Classifier, ("logits",)),
    (Transform, ("code",)),
)

#: The batch sizes at which a program is compared with its model, and their allowed difference in rounding errors.
SIZES, ROUNDINGS = (1, 2, 5), 1e4


def without_constraints(model: Model) -> Model:
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
    return cast(Model, plain.requires_grad_(False))


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
    _check_ready(model)
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


def forward_program(
    model: nn.Module,
    example: Tensor,
    context: Tensor | None = None,
    *,
    schema: Schema | None = None,
    reference: Tensor | None = None,
) -> ExportedProgram:
    """Trace the forward pass (see `Forward`) into a `torch.export` program for the CPU, with a dynamic batch size.

    `example` is a batch of at least one input of the model; only its shape and dtype enter the program. The `schema` of
    a table says which columns are discrete and which values are possible. `reference` holds ln p of held-out samples
    (`Run.reference()`), which the anomaly score is relative to; without it, there is none.
    """
    return _trace(*_prepare(model, example, context, schema, reference))[0]


def save_program(
    model: nn.Module,
    example: Tensor,
    path: str | Path,
    context: Tensor | None = None,
    *,
    schema: Schema | None = None,
    reference: Tensor | None = None,
) -> Path:
    """Write `forward_program` to a .pt2 file, which `torch.export.load(path).module()` loads as a function."""
    if Path(path).suffix != ".pt2":
        raise ValueError(f"the file of a program must end in .pt2, or torch does not load it; got {path}. Rename it.")
    return atomic.write(path, _to_bytes(forward_program(model, example, context, schema=schema, reference=reference)))


def save_onnx(
    model: nn.Module,
    example: Tensor,
    path: str | Path,
    context: Tensor | None = None,
    *,
    schema: Schema | None = None,
    reference: Tensor | None = None,
) -> Path:
    """Write the same forward pass as ONNX. If onnxruntime is installed, it is run and compared with the model."""
    missing = _missing_packages()
    if missing:
        raise RuntimeError(
            f"ONNX needs the packages onnx and onnxscript; missing: {', '.join(missing)}. "
            f"Install them: pip install {' '.join(missing)}."
        )
    forward, inputs = _prepare(model, example, context, schema, reference)
    return atomic.write(path, _onnx(_trace(forward, inputs)[0], forward, inputs)[0])


def export(
    model: nn.Module,
    example: Tensor,
    folder: str | Path,
    context: Tensor | None = None,
    *,
    schema: Schema | None = None,
    reference: Tensor | None = None,
    about: About | None = None,
) -> dict[str, Path]:
    """Write weights, program and ONNX to a folder, with a README.txt that explains how to load each.

    The arguments are those of `forward_program`; `about` is stored with the weights.
    Files of an earlier export are replaced. If the packages for ONNX are missing, there is no ONNX file (an old one is
    removed), and the README says what to install.
    """
    folder = Path(folder)
    forward, inputs = _prepare(model, example, context, schema, reference)
    program, difference = _trace(forward, inputs)
    rows = counted(min(len(example), max(SIZES)), "given sample")
    measured = f"On {rows}, program.pt2 differs from the model by at most {round_up(difference, '.1e')}"
    onnx = b""
    if not _missing_packages():
        onnx, difference = _onnx(program, forward, inputs)
        measured += (
            f", model.onnx by {round_up(difference, '.1e')}"
            if math.isfinite(difference)
            else "; model.onnx was not run"
        )
    files = {
        "weights": save_weights(model, folder / "weights.safetensors", shape=tuple(example.shape[1:]), about=about),
        "program": atomic.write(folder / "program.pt2", _to_bytes(program)),
    }
    if onnx:
        files["onnx"] = atomic.write(folder / "model.onnx", onnx)
    head = f"{type(model).__name__}, exported by {VERSION}"
    text = forward.readme(head, inputs, measured, with_onnx=bool(onnx))
    files["readme"] = atomic.write(folder / "README.txt", text)
    if not onnx:
        (folder / "model.onnx").unlink(missing_ok=True)
    return files


def _check_ready(model: nn.Module) -> None:
    cold = uninitialised(model)
    if cold:
        raise ValueError(
            f"a model must be initialised before export; {len(cold)} layers still wait for their first batch, e.g. "
            f"{cold[0] or 'the model itself'}. Train the model, or call it on one batch in training mode."
        )


def _prepare(
    model: nn.Module, example: Tensor, context: Tensor | None, schema: Schema | None, reference: Tensor | None
) -> tuple[Forward, Tensors]:
    """The forward pass with plain weights on the CPU, and the inputs it was tested with."""
    _check_ready(model)
    check_batch(example, "example", getattr(model, "event_shape", None))
    plain = without_constraints(model).cpu()
    forward = without_constraints(Forward(plain, schema, reference)).cpu()
    inputs = {name: t.detach().cpu() for name, t in (("x", example), ("context", context)) if t is not None}
    try:
        shape = tuple(forward(**inputs)["code"].shape[1:])
    except RuntimeError as error:  # raised by torch in a layer that does not check shapes and dtypes
        raise ValueError(
            f"example must be a batch that the model accepts; got shape {tuple(example.shape)} of {example.dtype}: "
            f"{first_line(error)}. Give samples like those the model was trained on."
        ) from error
    expected = getattr(getattr(model, "base", None), "shape", shape)
    if shape != tuple(expected):
        raise ValueError(
            f"the code of example must have the shape of the base, {tuple(expected)}; got {shape} for "
            f"{tuple(example.shape)}. Give samples like those the model was trained on."
        )
    if not isinstance(plain, Flow) or forward.scores:
        _check_whole(plain, {name: t[:2] for name, t in inputs.items()})
    return forward, inputs


@torch.no_grad()
def _check_whole(model: nn.Module, inputs: Tensors) -> None:
    """Refuse a model that returns something else than its parts compute, by a forward or a hook of its own."""
    names = next((names for kind, names in RETURNED if isinstance(model, kind)), ())
    parts, own = Forward(model).eval()(**inputs), model(**inputs) if names else ()
    for name, y in zip(names, own if isinstance(own, tuple) else (own,), strict=False):
        allowed = ROUNDINGS * torch.finfo(y.dtype).eps * (1 + float(y.abs().max()))
        if name in parts and not float((y - parts[name]).abs().max()) <= allowed:
            raise RuntimeError(
                f"the model must return what its parts compute; this {type(model).__name__} returns another {name}. "
                "Remove its hooks, or do what its own forward does in the transform or the head."
            )


def _trace(forward: Forward, inputs: Tensors) -> tuple[ExportedProgram, float]:
    """Trace the program; return it and its largest difference from the model."""
    if any(getattr(m, "adaptive", False) for m in forward.modules()):
        raise RuntimeError(
            "the forward pass cannot be traced into one program: the steps of its solver depend on the values of x "
            "(FFJORD). The model runs only with this library; use save_weights for its weights."
        )
    # A program keeps its example: zeros, not the user's data; a batch of two, since torch fixes a batch size of one.
    blank = tuple(torch.zeros(2, *t.shape[1:], dtype=t.dtype) for t in inputs.values())
    batch = torch.export.Dim("batch", min=1, max=2**40)  # torch 2.7 needs a maximum for x[:, ::2]
    try:
        # Strict, since otherwise len(x), here or in the user's network, would fix the batch size.
        program = torch.export.export(forward, blank, dynamic_shapes={name: {0: batch} for name in inputs}, strict=True)
    except Exception as error:
        if forward.scores:  # a log-determinant may need what cannot be traced, such as torch.func
            forward.scores, forward.no_scores = False, f"its log-determinant cannot be traced: {first_line(error)}"
            return _trace(forward, inputs)
        raise RuntimeError(
            f"the forward pass cannot be traced into one program: {first_line(error)}. Remove control flow that "
            "depends on values of x, such as an if; save_weights needs no program."
        ) from error
    return program, _difference(program.module(), forward, inputs, "program")


def _to_bytes(program: ExportedProgram) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _difference(run: Callable[..., Tensors], forward: Forward, inputs: Tensors, kind: str) -> float:
    """The largest difference of an output over several batch sizes; raise an error if it is more than rounding."""
    worst = 0.0
    for size in SIZES:
        rows = [t[torch.arange(size) % len(t)] for t in inputs.values()]
        got, expected = run(*rows), forward(*rows)
        if forward.reference is not None:  # of the same ln p: between close reference values the score is steep
            expected["anomaly"] = anomaly(got["log_prob"], forward.reference)
        for name, y in expected.items():
            difference = float((got[name].double() - y.double()).abs().max())
            allowed = ROUNDINGS * torch.finfo(rows[0].dtype).eps * (1 + float(y.abs().max()))
            if not difference <= allowed:
                raise RuntimeError(
                    f"the {kind} must agree with the model; for a batch of {size} their {name} differ by "
                    f"{difference:.2g}, with {allowed:.2g} allowed for rounding. Look for a layer that is random, or "
                    "that behaves differently when it is compiled."
                )
            worst = max(worst, difference)
    return worst


def _missing_packages() -> list[str]:
    return [name for name in ("onnx", "onnxscript") if find_spec(name) is None]


@contextmanager
def _silence_exporter() -> Iterator[None]:
    """Silence internal warnings of torch's exporter: deprecations, and optional packages that no model here uses."""
    logs = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def _onnx(program: ExportedProgram, forward: Forward, inputs: Tensors) -> tuple[bytes, float]:
    """The bytes of the ONNX file, and its largest difference from the model; NaN if no runtime is installed."""
    outputs, shapes = list(forward(**inputs)), {name: {0: "batch"} for name in inputs}
    try:
        with _silence_exporter():
            made = torch.onnx.export(
                program, input_names=list(inputs), output_names=outputs, dynamic_shapes=shapes, verbose=False
            )
            assert made is not None
            data: bytes = made.model_proto.SerializeToString()
            if find_spec("onnxruntime"):
                made.initialize_inference_session()
    except Exception as error:
        raise RuntimeError(
            f"this forward pass cannot be exported to ONNX: {first_line(error)}. Use a float32 model and common "
            "layers; save_weights and save_program need no ONNX."
        ) from error
    if not find_spec("onnxruntime"):
        return data, math.nan
    return data, _difference(lambda *rows: dict(zip(outputs, made(*rows), strict=True)), forward, inputs, "ONNX file")
