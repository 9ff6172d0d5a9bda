"""The forward pass as ONNX. If onnxruntime is installed, the file is run and compared with the model."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .. import atomic
from ..data import Schema
from ..spelling import first_line
from .forward import Forward, Tensors
from .program import largest_difference, prepare, trace

if TYPE_CHECKING:
    from torch.export import ExportedProgram


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
    missing = missing_packages()
    if missing:
        raise RuntimeError(
            f"ONNX needs the packages onnx and onnxscript; missing: {', '.join(missing)}. "
            f"Install them: pip install {' '.join(missing)}."
        )
    forward, inputs = prepare(model, example, context, schema, reference)
    return atomic.write(path, onnx_bytes(trace(forward, inputs)[0], forward, inputs)[0])


def missing_packages() -> list[str]:
    """Return the packages that ONNX needs and that are not installed."""
    return [name for name in ("onnx", "onnxscript") if find_spec(name) is None]


def onnx_bytes(program: ExportedProgram, forward: Forward, inputs: Tensors) -> tuple[bytes, float]:
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

    def run(*rows: Tensor) -> Tensors:
        return dict(zip(outputs, made(*rows), strict=True))

    return data, largest_difference(run, forward, inputs, "ONNX file")


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
