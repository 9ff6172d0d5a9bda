"""The forward pass that is exported: from x to a code and, for a density of rows, its scores.

    code        F(x)
    logits      head(F(x)), if the model has a head
    log_prob    ln p(x) = ln p_base(F(x)) + ln det dF/dx, in nats and in the units of the data (Eq. 3)
    anomaly     `evaluate.typicality.anomaly` of log_prob, relative to reference values that are stored in the program

Both scores are those of `iresnet score`. If columns are discrete, ln p is the mean over the same draws of noise; a
value that its column cannot have gives -inf. Up to 64 dimensions the determinant of every block is exact: the dense
Jacobian, and one operator that ONNX has, Det. It lies between (1 - L)^d and (1 + L)^d (Lemma 7): 1e-53 for L = 0.85
and d = 64, which float32 cannot hold, so that the matrix is scaled (`Determinant`). The base is evaluated in float64,
where the square of a code far out does not overflow.
"""

from __future__ import annotations

import copy
import math
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from ..base import Base
from ..batch import Shape
from ..data import Schema
from ..evaluate import DRAWS, anomaly
from ..flow import code_and_log_prob
from ..logdet import EXACT_UP_TO, Estimator, Jacobian
from ..spelling import quoted
from ..transform import Transform
from ..transforms.dequantisation import dequantise_for, has_noise, raw_noise

Tensors: TypeAlias = dict[str, Tensor]


SCORES = """\
log_prob is ln p(x) in nats, in the units of the data; -inf for a value that its column cannot have.
anomaly is that of `iresnet score`: the fraction of validation data that is more likely.
"""

#: The line of the README above the columns.
COLUMNS = "The columns of x, in this order:"

README = """\
The batch size is arbitrary. Unlike in the library, the values of x are not checked: NaN in, NaN out.

program.pt2 needs only torch and runs on the CPU (torch.export.passes.move_to_device_pass moves it):

    import torch
    forward = torch.export.load("program.pt2").module()
    outputs = forward({arguments})  # a dictionary

{onnx}

The {rest} and the certificate need the library. With a model of the same architecture:

    from safetensors.torch import load_file
    model = iresnet.export.without_constraints(model)
    model.load_state_dict(load_file("weights.safetensors"))
"""

WITH_ONNX = """\
model.onnx needs only onnxruntime; arrays are NumPy arrays:

    import onnxruntime
    session = onnxruntime.InferenceSession("model.onnx")
    outputs = session.run({outputs}, {{{feed}}})  # a list"""

WITHOUT_ONNX = "model.onnx is missing: pip install onnx onnxscript, and export again."


class Determinant(Estimator):
    """ln det(I + J) = ln det(c (I + J)) - d ln c from determinants themselves, since ONNX has no LU factorisation.

    onnxruntime has Det in float32 only. Of c = 1, 2, 4, ... the one counts whose determinant is closest to 1: there are
    enough of them for every L up to 0.99.
    """

    def estimate(
        self, jacobian: Jacobian, x: Tensor, lipschitz: float | None, generator: torch.Generator | None
    ) -> Tensor:
        j = jacobian.matrix(x)
        d = j.shape[-1]
        a = torch.eye(d, dtype=j.dtype, device=j.device) + j
        distance = torch.full_like(a[:, 0, 0], math.inf)
        logdet = -distance
        for k in range(1 + d // 8):
            scaled = torch.linalg.det(2.0**k * a).log()  # -inf or inf if it is out of range
            logdet = torch.where(scaled.abs() < distance, scaled - k * d * math.log(2), logdet)
            distance = torch.where(scaled.abs() < distance, scaled.abs(), distance)
        return logdet


class Float64Base(nn.Module):
    """A copy of a base that evaluates codes in float64."""

    def __init__(self, base: Base) -> None:
        super().__init__()
        self.shape, self.base = base.shape, copy.deepcopy(base).double()

    def log_prob(self, z: Tensor) -> Tensor:
        return self.base.log_prob(z.double())


class Forward(nn.Module):
    """x -> {"code": F(x)}, with "logits" if the model has a head, and "log_prob" and "anomaly" if it can score rows.

    `schema` says which values the columns may have; `reference` holds ln p of held-out samples. `no_scores` is the
    reason why there is no "log_prob", or empty.
    """

    shifts: Tensor | None
    reference: Tensor | None

    def __init__(self, model: nn.Module, schema: Schema | None = None, reference: Tensor | None = None) -> None:
        super().__init__()
        transform = model if isinstance(model, Transform) else getattr(model, "transform", None)
        if not isinstance(transform, Transform):
            raise ValueError(
                "a model to export must be a Transform or have one as .transform (Flow, Classifier, Hybrid); "
                f"got {type(model).__name__}. Wrap it, for example as Classifier(transform, head)."
            )
        base = getattr(model, "base", None)
        self.transform, self.head = transform, getattr(model, "head", None)
        self.base = None if base is None else Float64Base(base)
        self.event_shape: Shape | None = getattr(model, "event_shape", None)
        self.schema = schema
        self.no_scores = "" if self.base is None else why_no_scores(self.base.shape, self.event_shape)
        self.scores = self.base is not None and not self.no_scores
        self.register_buffer("shifts", noise_shifts(model, schema) if self.scores else None)
        self.register_buffer("reference", reference if self.scores else None)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensors:
        z = self.transform(x, context)
        outputs = {"code": z} if self.head is None else {"code": z, "logits": self.head(z)}
        if self.scores:
            outputs["log_prob"] = self.log_prob(x, context)
            if self.reference is not None:
                outputs["anomaly"] = anomaly(outputs["log_prob"], self.reference)
        return outputs

    def log_prob(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Return ln p(x) in float64: the mean over the draws of noise.

        It is -inf for a value that a column cannot have, or that is so far out that its code overflows.
        """
        draws = 1 if self.shifts is None else len(self.shifts)
        points = x if self.shifts is None else (x + self.shifts.to(x.dtype).unsqueeze(1)).flatten(0, 1)
        repeated = None if context is None else torch.cat([context] * draws)
        # Run eagerly the estimator is the library's own, so that the program is compared with another algorithm.
        estimator = Determinant() if torch.compiler.is_compiling() else None
        values = code_and_log_prob(self, points, repeated, estimator, None)[1].double()
        mean = values.reshape(draws, -1).mean(0)
        mean = torch.where(mean.isnan() & ~x.isnan().flatten(1).any(dim=1), -math.inf, mean)
        return mean if self.schema is None else torch.where(self.schema.inside(x), mean, -math.inf)

    def readme(self, head: str, inputs: Tensors, measured: str, *, with_onnx: bool) -> str:
        """Return the text that explains the files: what the program computes, how closely, and how to load it."""
        outputs = self(**inputs)
        feed = ", ".join(f'"{name}": {name}' for name in inputs)
        onnx = WITH_ONNX.format(outputs=list(outputs), feed=feed) if with_onnx else WITHOUT_ONNX
        about = f"{head}: {_signature(inputs)} -> {_signature(outputs)}.\n{measured}.\n{self._about_scores()}"
        rest = "inverse" if self.scores else "inverse, the likelihood"
        return about + README.format(arguments=", ".join(inputs), onnx=onnx, rest=rest)

    def _about_scores(self) -> str:
        if not self.scores:
            return f"There is no log_prob: {self.no_scores}.\n" if self.no_scores else ""
        columns = "" if self.schema is None else _about_columns(self.schema)
        return (SCORES if self.reference is not None else SCORES.splitlines(keepends=True)[0]) + columns


def why_no_scores(code: Shape, event: Shape | None) -> str:
    """Say why a density cannot be scored without the library; empty if it can."""
    if len(event or code) > 1:
        return "only rows are scored, not images"
    if math.prod(code) > EXACT_UP_TO:
        return f"log-determinants are exact up to {EXACT_UP_TO} dimensions only, and this model has {math.prod(code)}"
    return ""


def noise_shifts(model: Any, schema: Schema | None) -> Tensor | None:
    """Return what `iresnet score` adds to a row in each of its draws, (draws, columns); None if it adds nothing."""
    if schema is None or not has_noise(model, schema.levels):
        return None
    zero = cast(Tensor, model.base.mean).new_zeros(1, *schema.shape)
    draws = (raw_noise(model, schema.shape, zero.device, torch.Generator().manual_seed(k)) for k in range(DRAWS))
    return torch.cat([dequantise_for(model, zero, schema.levels, noise=u)[0] for u in draws])


def _about_columns(schema: Schema) -> str:
    """List the columns of x; the categories of one with the numbers that stand for them."""
    lines = [COLUMNS]
    for i, (name, kind) in enumerate(zip(schema.names, schema.column_kinds, strict=True)):
        codes = ", ".join(f"{code} = {quoted(category)}" for code, category in enumerate(kind.categories))
        given = " (given)" if schema.targets and name not in schema.targets else ""
        lines.append(f"    {i}  {quoted(name)}{f': {codes}' if codes else ''}{given}")
    return "\n".join([*lines, ""])


def _signature(tensors: Tensors) -> str:
    return " and ".join(f"{name} ({', '.join(['batch', *map(str, t.shape[1:])])})" for name, t in tensors.items())
