"""The forward pass as a `torch.export` program, compared with the model at several batch sizes."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .. import atomic
from ..batch import check_batch
from ..classifier import Classifier
from ..data import Schema
from ..evaluate import anomaly
from ..flow import Flow
from ..hybrid import Hybrid
from ..spelling import first_line
from ..transform import Transform
from .forward import Forward, Tensors
from .weights import check_ready, without_constraints

if TYPE_CHECKING:
    from torch.export import ExportedProgram

#: What a call of each kind of model returns, by the names of `Forward`.
RETURNED: tuple[tuple[type[nn.Module], tuple[str, ...]], ...] = (
    (Hybrid, ("log_prob", "logits")),
    (Flow, ("log_prob",)),
    (Classifier, ("logits",)),
    (Transform, ("code",)),
)

#: The batch sizes at which a program is compared with its model, and their allowed difference in rounding errors.
SIZES, ROUNDINGS = (1, 2, 5), 1e4


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
    return trace(*prepare(model, example, context, schema, reference))[0]


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
    program = forward_program(model, example, context, schema=schema, reference=reference)
    return atomic.write(path, program_bytes(program))


def prepare(
    model: nn.Module, example: Tensor, context: Tensor | None, schema: Schema | None, reference: Tensor | None
) -> tuple[Forward, Tensors]:
    """The forward pass with plain weights on the CPU, and the inputs it was tested with."""
    check_ready(model)
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


def trace(forward: Forward, inputs: Tensors) -> tuple[ExportedProgram, float]:
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
            return trace(forward, inputs)
        raise RuntimeError(
            f"the forward pass cannot be traced into one program: {first_line(error)}. Remove control flow that "
            "depends on values of x, such as an if; save_weights needs no program."
        ) from error
    return program, largest_difference(program.module(), forward, inputs, "program")


def program_bytes(program: ExportedProgram) -> bytes:
    """Return the content of the .pt2 file of a program."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def largest_difference(run: Callable[..., Tensors], forward: Forward, inputs: Tensors, kind: str) -> float:
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
