"""Export a trained model to files that run without this library.

    weights.safetensors   the constrained weights as plain ones: W min(1, c / sigma(W)) of Eq. (2), computed once
    program.pt2           x -> {"code": F(x), ...} as a `torch.export` program; needs only torch
    model.onnx            the same as ONNX; needs only a runtime such as onnxruntime

Both programs accept any batch size, and each is compared with the model before it is written. They contain the forward
pass (`forward.Forward`): the code, the logits of a classifier, and the scores of a density of rows. The inverse and
the proven bounds need the library, which loads the weights again.
"""

from __future__ import annotations

import math
from pathlib import Path

from torch import Tensor, nn

from .. import atomic
from ..data import Schema
from ..spelling import counted, round_up
from .onnx import missing_packages, onnx_bytes, save_onnx
from .program import SIZES, forward_program, prepare, program_bytes, save_program, trace
from .weights import VERSION, About, save_weights, without_constraints

__all__ = ["export", "forward_program", "save_onnx", "save_program", "save_weights", "without_constraints"]


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
    forward, inputs = prepare(model, example, context, schema, reference)
    program, difference = trace(forward, inputs)
    rows = counted(min(len(example), max(SIZES)), "given sample")
    measured = f"On {rows}, program.pt2 differs from the model by at most {round_up(difference, '.1e')}"
    onnx = b""
    if not missing_packages():
        onnx, difference = onnx_bytes(program, forward, inputs)
        finite = math.isfinite(difference)
        measured += f", model.onnx by {round_up(difference, '.1e')}" if finite else "; model.onnx was not run"
    files = {
        "weights": save_weights(model, folder / "weights.safetensors", shape=tuple(example.shape[1:]), about=about),
        "program": atomic.write(folder / "program.pt2", program_bytes(program)),
    }
    if onnx:
        files["onnx"] = atomic.write(folder / "model.onnx", onnx)
    head = f"{type(model).__name__}, exported by {VERSION}"
    text = forward.readme(head, inputs, measured, with_onnx=bool(onnx))
    files["readme"] = atomic.write(folder / "README.txt", text)
    if not onnx:
        (folder / "model.onnx").unlink(missing_ok=True)
    return files
