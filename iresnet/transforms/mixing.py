"""Linear maps of the channels, the same at every position: InvertibleConv1x1, PrincipalAxes and Reverse.

W = P L U, with a fixed permutation P, L lower triangular with a unit diagonal, U upper triangular with diagonal
sign exp(log_s), so that W is invertible for all parameters (from Glow; an option here, not in the paper):

    z = W x,    ln |det| = (height * width) sum(log_s),    x = U^-1 L^-1 P' z    by two triangular solves

PrincipalAxes is such a convolution, initialised to the principal axes of the data, so that the residual blocks after it
need not spend their Lipschitz constants on a linear map. Reverse puts the channels in the opposite order: the
permutation that invertible convolutions replaced.
"""

from __future__ import annotations

import math
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from ..batch import Shape, check_batch, check_finite, dimension
from ..float64 import ELEMENTARY, Rounding, gamma
from ..precision import without_autocast
from ..spectral import ROUNDING_MARGIN, absolute_norm
from ..spelling import at_least
from ..transform import UNKNOWN, BufferRule, Stretch
from .closed_form import ClosedForm, Rearrangement, check_channels
from .first_batch import DataInitialised

#: How many vectors per channel a batch must have for its principal axes to be estimated.
VECTORS_PER_CHANNEL = 4


def _is_permutation(indices: Tensor) -> bool:
    return torch.equal(indices.sort().values, torch.arange(len(indices), device=indices.device))


class InvertibleConv1x1(ClosedForm):
    """z = W x at every position of x, of shape (batch, channels, ...); for (batch, channels) a matrix product.

    W is initialised to a random rotation, drawn from the global generator. `factors` holds L below its diagonal, log_s
    on it and U above it.

    >>> mix = InvertibleConv1x1(3)
    >>> x = torch.randn(2, 3, 4, 4)
    >>> torch.allclose(mix.inverse(mix(x)), x, atol=1e-5)
    True
    """

    permutation: Tensor
    sign: Tensor

    buffer_rules: ClassVar[tuple[BufferRule, ...]] = (
        ("permutation", "be a permutation", _is_permutation),
        ("sign", "be 1 or -1", lambda sign: bool((sign.abs() == 1).all())),
    )

    def __init__(self, channels: int) -> None:
        super().__init__()
        at_least(1, "Give the size of dimension 1 of the input.", channels=channels)
        self.channels = channels
        factors, sign, permutation = _factor(_random_rotation(channels))
        dtype = torch.get_default_dtype()
        self.factors = nn.Parameter(factors.to(dtype))
        self.register_buffer("sign", sign.to(dtype))
        self.register_buffer("permutation", permutation)

    def value(self, x: Tensor) -> Tensor:
        check_channels(x, "x", "InvertibleConv1x1", self.channels)
        with without_autocast(x):  # the log-determinant is that of the exact W
            lower, upper = self._triangles(x.dtype)
            return _product((lower @ upper).index_select(0, self.permutation), x)

    def logdet(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, self.factors.dtype)
        positions = dimension(x) // self.channels
        return (positions * self.log_s.to(dtype).sum()).expand(len(x))

    def undo(self, z: Tensor) -> Tensor:
        check_channels(z, "z", "InvertibleConv1x1", self.channels)
        with without_autocast(z):
            lower, upper = self._triangles(z.dtype)
            columns = z.to(lower.dtype).transpose(0, 1)
            y = columns.flatten(1)[self.permutation.argsort()]
            y = torch.linalg.solve_triangular(lower, y, upper=False, unitriangular=True)
            x = torch.linalg.solve_triangular(upper, y, upper=True)
            return cast(Tensor, x.reshape(columns.shape).transpose(0, 1).contiguous())

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        """Compute bounds from the singular values of W; ln det is exact, but needs the shape, with which it grows."""
        if self.why_unknown():
            return UNKNOWN
        lower, upper = (t.detach() for t in self._triangles(torch.float64))
        sigma = torch.linalg.svdvals(lower @ upper)
        # Rounding changes each singular value by at most the errors of the product and of its decomposition.
        margin = ROUNDING_MARGIN * float(lower.norm() * upper.norm())
        least = float(sigma.min()) - margin
        logdet = (-math.inf, math.inf)
        if input_shape is not None:
            logdet = (math.prod(input_shape[1:]) * float(self.log_s.detach().double().sum()),) * 2
        return Stretch(float(sigma.max()) + margin, 1 / least if least > 0 else math.inf, logdet)

    def rounding(self, input_shape: Shape) -> Rounding:
        """Bound the rounding of W = L U and of W x: sums of `channels` products, both bounded by |L| |U| |x|."""
        lower, upper = self._triangles(torch.float64)
        lost = 2 * gamma(self.channels) + 2 * ELEMENTARY
        return Rounding.of(lost * absolute_norm(lower) * absolute_norm(upper), 0.0, math.prod(input_shape))

    def extra_repr(self) -> str:
        return f"{self.channels}"

    @property
    def log_s(self) -> Tensor:
        """The logarithms of the absolute values on the diagonal of U."""
        return self.factors.diagonal()

    @property
    def weight(self) -> Tensor:
        """The matrix W."""
        lower, upper = self._triangles(self.factors.dtype)
        return (lower @ upper)[self.permutation]

    def _triangles(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # In the wider of both dtypes, so that a float64 input gets a float64 exponential.
        factors = self.factors.to(torch.promote_types(dtype, self.factors.dtype))
        diagonal = self.sign.to(factors.dtype) * factors.diagonal().exp()
        one = torch.eye(self.channels, dtype=factors.dtype, device=factors.device)
        return factors.tril(-1) + one, factors.triu(1) + diagonal.diag()


class PrincipalAxes(InvertibleConv1x1, DataInitialised):
    """An InvertibleConv1x1 that the first training batch initialises to the principal axes of its channels.

    The axes are in the order of their variance, the smallest first, so that in a multiscale network the detail leaves
    first. W starts as a rotation, since scales are left to an ActNorm after it, and is learned from there on. Fewer
    than four vectors per channel say little about the axes of small variance, which an ActNorm would amplify: such a
    batch leaves the random rotation as it is.

    >>> axes = PrincipalAxes(2).initialise_(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]).repeat(4, 1))
    >>> (axes(torch.tensor([[3.0, 3.0]])) ** 2).round().tolist()
    [[0.0, 18.0]]
    """

    def value(self, x: Tensor) -> Tensor:
        check_channels(x, "x", "InvertibleConv1x1", self.channels)
        self._initialise_if_first(x)
        return super().value(x)

    @torch.no_grad()
    def initialise_(self, x: Tensor) -> PrincipalAxes:
        """Set W to the principal axes of this batch, the largest entry of each axis positive."""
        check_channels(x, "x", "InvertibleConv1x1", self.channels)
        check_finite(x, "x")
        self._mark_initialised()
        vectors = x.double().transpose(0, 1).flatten(1)
        if vectors.shape[1] < VECTORS_PER_CHANNEL * self.channels:
            return self
        axes = torch.linalg.eigh(torch.cov(vectors).view(self.channels, self.channels)).eigenvectors.T
        largest = axes.gather(1, axes.abs().argmax(dim=1, keepdim=True))
        factors, sign, permutation = _factor(axes * largest.sign())
        self.factors.copy_(factors)
        self.sign.copy_(sign)
        self.permutation.copy_(permutation)
        return self


class Reverse(Rearrangement):
    """Reverses the order of the channels: an isometry, and its own inverse.

    >>> Reverse()(torch.tensor([[1.0, 2.0, 3.0]])).tolist()
    [[3.0, 2.0, 1.0]]
    """

    def value(self, x: Tensor) -> Tensor:
        check_batch(x)
        return x.flip(1)

    def undo(self, z: Tensor) -> Tensor:
        check_batch(z, "z")
        return z.flip(1)


def _product(weight: Tensor, x: Tensor) -> Tensor:
    """W x at every position; channels_last inputs stay so.

    A matrix product, since a convolution may round its factors to TF32; and by torch.mm or torch.bmm, whose results,
    unlike those of torch.matmul, are the same with and without gradients.
    """
    x = x.to(weight.dtype)
    if x.dim() == 2:
        return torch.mm(x, weight.T)
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        pixels = x.permute(0, 2, 3, 1)
        return torch.mm(pixels.reshape(-1, len(weight)), weight.T).view(pixels.shape).permute(0, 3, 1, 2)
    return torch.bmm(weight.expand(len(x), -1, -1), x.reshape(len(x), len(weight), -1)).view(x.shape)


def _factor(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Factor W = P L U: return the factors as stored, the signs of U's diagonal, and the permutation."""
    p, lower, upper = torch.linalg.lu(weight)
    diagonal = upper.diagonal()
    return lower.tril(-1) + upper.triu(1) + diagonal.abs().log().diag(), diagonal.sign(), p.argmax(dim=1)


def _random_rotation(d: int) -> Tensor:
    """Draw an orthogonal matrix with determinant 1 from the uniform (Haar) distribution, in float64."""
    q, r = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64))
    q = q * r.diagonal().sign()
    q[:, 0] *= torch.linalg.det(q).sign()
    return cast(Tensor, q)
