"""Base class of transforms that replace the forward pass of another transform and delegate everything else to it."""

from __future__ import annotations

from torch import Tensor

from ..batch import Shape
from ..fixed_point import ChainSolution, Solution, Solver
from ..float64 import Rounding
from ..transform import Stretch, Transform


class Wrapper(Transform):
    """Wraps the transform `inner`: subclasses implement `forward` and `forward_and_logdet`, the rest is delegated."""

    def __init__(self, inner: Transform) -> None:
        super().__init__()
        self.inner = inner
        self.training = inner.training

    def inverse(
        self, z: Tensor, context: Tensor | None = None, *, tolerance: float | None = None, solver: Solver | None = None
    ) -> Tensor:
        return self.inner.inverse(z, context, tolerance=tolerance, solver=solver)

    def solve(
        self, z: Tensor, context: Tensor | None = None, *, tolerance: float | None = None, solver: Solver | None = None
    ) -> Solution | ChainSolution:
        return self.inner.solve(z, context, tolerance=tolerance, solver=solver)

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        return self.inner.stretch(input_shape)

    def why_unknown(self) -> str:
        return self.inner.why_unknown()

    def output_shape(self, input_shape: Shape) -> Shape:
        return self.inner.output_shape(input_shape)

    def data_shape(self, code_shape: Shape) -> Shape:
        return self.inner.data_shape(code_shape)

    def parts(self, input_shape: Shape | None = None) -> list[tuple[str, Transform, Shape | None]]:
        return self.inner.parts(input_shape)

    @property
    def takes_context(self) -> bool:
        return self.inner.takes_context

    def reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.inner.reference(x, context)

    def rounding(self, input_shape: Shape) -> Rounding:
        return self.inner.rounding(input_shape)
