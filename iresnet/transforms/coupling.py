"""Couplings: one part of x is kept, and determines how the other is transformed (NICE, Real NVP, Glow, i-RevNet).

additive    z2 = x2 + t(x1)                 ln det = 0           x2 = z2 - t(z1)
affine      z2 = x2 exp(s(x1)) + t(x1)      ln det = sum s       x2 = (z2 - t(z1)) exp(-s(z1))      with z1 = x1

The network that computes s and t, the conditioner, may be any network: it is never inverted. Since x1 is recovered
without an error, the error of the inverse is known exactly, ||x - x*|| = ||exp(-s(x1)) (F(x) - z)_2||. `solve` computes
it in float64, relative to the conditioner's output there. If the conditioner is not known to be a function of one
sample (`per_sample`), such as with a user's own layers, the error is reported but not proven. Of a coupling with a
user's own `Split` nothing is known.

An additive coupling has the singular values of [[I, 0], [T, I]], so both Lip(F) and Lip(F^-1) are at most
(L + sqrt(L^2 + 4)) / 2 with L = Lip(t). An affine one has no Lipschitz constant at all: dz2/dx1 grows with x2.
"""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod

import torch
from torch import Tensor, nn

from ..batch import Shape, check_batch, in_float64
from ..branch import copy_branch, lipschitz_bound
from ..float64 import RESIDUAL_ROUNDING
from ..precision import full_precision
from ..proof import nan_to_infinity, sample_norms
from ..transform import UNKNOWN, Stretch, Transform, check_context, why_unproven
from ..tree import modules_of
from ..trust import NoBoundKnown
from .closed_form import Explicit
from .per_sample import check_axes, may_work_in_place, why_no_function
from .split import Halves, Split, is_known

#: The default bound on |s| of an affine coupling: no coordinate is stretched or shrunk by more than a factor of e^2.
MAX_LOG_SCALE = 2.0


class Coupling(Explicit):
    """The base class of additive and affine couplings.

    `conditioner` takes the kept part (see `Split.sizes`) and returns `outputs` numbers for each transformed one,
    channel by channel. It may contain BatchNorm: an inverse uses it in eval mode, whatever its mode.
    """

    #: How many numbers the conditioner returns for each transformed one.
    outputs: int
    #: Whether ln det is zero for all weights.
    volume_preserving: bool

    def __init__(self, conditioner: nn.Module, split: Split | None = None) -> None:
        super().__init__()
        self.conditioner, self.split = conditioner, Halves() if split is None else split
        self._takes_context = "context" in inspect.signature(type(conditioner).forward).parameters

    @property
    def takes_context(self) -> bool:
        return self._takes_context

    @abstractmethod
    def transform_part(self, transformed: Tensor, h: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (z2, s) for x2 and the conditioner's output h; s is None if it is zero."""

    @abstractmethod
    def invert_part(self, transformed: Tensor, h: Tensor) -> Tensor:
        """Return x2 for z2."""

    @abstractmethod
    def inverse_scale(self, h: Tensor) -> Tensor | None:
        """Return exp(-s), the factor from an error in z2 to one in x2; None if it is one."""

    def forward_and_log_scale(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return (z, s), the whole forward computation; s is None if it is zero."""
        self._check(x, "x")
        check_context(self, context)
        kept, transformed = self.split.separate(x)
        h = self._condition(kept, transformed, context)
        if h.dim() == 4 and h.is_contiguous(memory_format=torch.channels_last):  # the layout that convolutions chose
            kept, transformed = self.split.separate(x.contiguous(memory_format=torch.channels_last))
        transformed, s = self.transform_part(transformed, h)
        return self.split.join(kept, transformed), s

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.forward_and_log_scale(x, context)[0]

    def _compute_forward_and_logdet(
        self, x: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        z, s = self.forward_and_log_scale(x, context)
        return z, x.new_zeros(len(x)) if s is None else s.flatten(1).sum(1)

    def _compute_inverse(self, z: Tensor, context: Tensor | None) -> Tensor:
        self._check(z, "z")
        check_context(self, context)
        kept, transformed = self.split.separate(z)
        with full_precision(z):
            h = self._condition(kept, transformed, context, self._conditioner_in_eval())
            return self.split.join(kept, self.invert_part(transformed, h))

    def reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        kept, transformed = self.split.separate(x.double())
        h = self._condition_in_float64(kept, transformed, context)
        return self.split.join(kept, self.transform_part(transformed, h)[0])

    def verify(self, x: Tensor, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, bool, str]:
        """Return the error of x, which a coupling allows to compute exactly, whether it is proven, and if not why."""
        kept, transformed = self.split.separate(x.double())
        h = self._condition_in_float64(kept, transformed, context)
        residual = self.transform_part(transformed, h)[0] - self.split.separate(z.double())[1]
        factor = self.inverse_scale(h)
        # What rounding can hide grows with the terms of the sum: x2 exp(s), t and z2.
        largest = 1.0 if factor is None else 1 / factor.flatten(1).amin(1)
        allowance = RESIDUAL_ROUNDING * (
            1 + sample_norms(z.double()) + largest * sample_norms(transformed) + sample_norms(h)
        )
        if factor is not None:
            steepest = factor.log().abs().flatten(1).amax(1)  # exp(s) has an error relative to s, too
            allowance = allowance * (1 + steepest / 8)
            residual, allowance = residual * factor, allowance * factor.flatten(1).amax(1)
        reason = why_unproven(self) or self.why_changing()
        bound = nan_to_infinity(sample_norms(residual) + allowance)
        return torch.full_like(bound, math.inf) if self.why_unknown() else bound, not reason, reason

    def why_unknown(self) -> str:
        """Return whether the split is a user's own, whose `join` may not undo its `separate`."""
        return (
            ""
            if is_known(self.split)
            else f"{type(self.split).__name__} is not a split of this library, or was changed."
        )

    def why_changing(self) -> str:
        return why_no_function(self.conditioner)

    def output_shape(self, input_shape: Shape) -> Shape:
        self.split.check(input_shape)
        return input_shape

    def extra_repr(self) -> str:
        return str(self.split)

    def _check(self, x: Tensor, name: str) -> None:
        check_batch(x, name)
        self.split.check(tuple(x.shape[1:]))

    def _condition(
        self, kept: Tensor, transformed: Tensor, context: Tensor | None, conditioner: nn.Module | None = None
    ) -> Tensor:
        """The conditioner's output for the kept part, in the dtype of x."""
        conditioner = self.conditioner if conditioner is None else conditioner
        check_axes(conditioner, kept)
        if any(map(may_work_in_place, modules_of(conditioner))):  # what is kept must stay as it is
            kept, context = kept.clone(), None if context is None else context.clone()
        h = conditioner(kept, context) if self._takes_context else conditioner(kept)
        # Back to the dtype of x, where autocast lowered it: z and ln det must use the same s.
        h = h.to(transformed.dtype)
        expected = (len(transformed), self.outputs * transformed.shape[1], *transformed.shape[2:])
        if h.shape != expected:
            raise ValueError(
                f"the conditioner of this {type(self).__name__} must return shape {expected}, {self.outputs} for each "
                f"transformed number; got {tuple(h.shape)}. Give its last layer {expected[1]} outputs."
            )
        return self.split.mask(h)

    def _conditioner_in_eval(self) -> nn.Module:
        """The conditioner in eval mode; a copy if it is in training, since another thread may be training it."""
        training = any(m.training for m in self.conditioner.modules())
        return copy_branch(self.conditioner).eval() if training else self.conditioner

    def _condition_in_float64(self, kept: Tensor, transformed: Tensor, context: Tensor | None) -> Tensor:
        """The output of the conditioner with its stored weights, in float64 and in eval mode."""
        with full_precision(kept):
            exact = copy_branch(self.conditioner).double().eval()
            return self._condition(kept, transformed, in_float64(context), exact)


class AdditiveCoupling(Coupling):
    """z2 = x2 + t(x1) (NICE). It preserves volume: ln det is exactly zero.

    >>> coupling = AdditiveCoupling(nn.Linear(1, 1))
    >>> coupling.volume_preserving, coupling.forward_and_logdet(torch.ones(3, 2))[1].tolist()
    (True, [0.0, 0.0, 0.0])
    """

    outputs, volume_preserving = 1, True

    def transform_part(self, transformed: Tensor, h: Tensor) -> tuple[Tensor, Tensor | None]:
        return transformed + h, None

    def invert_part(self, transformed: Tensor, h: Tensor) -> Tensor:
        return transformed - h

    def inverse_scale(self, h: Tensor) -> Tensor | None:
        return None

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        """Compute bounds from Lip(t) if the conditioner's layers are known; otherwise only ln det has one."""
        if self.why_unknown():
            return UNKNOWN
        shape = None if input_shape is None else (self.split.sizes(input_shape[0])[0], *input_shape[1:])
        try:
            constant = lipschitz_bound(self.conditioner, shape).value
        except NoBoundKnown:
            constant = math.inf
        most = (constant + math.sqrt(constant * constant + 4)) / 2
        return Stretch(most, most, (0.0, 0.0))


class AffineCoupling(Coupling):
    """z2 = x2 exp(s(x1)) + t(x1) (Real NVP, Glow). The conditioner returns the channels of s, then those of t.

    s = max_log_scale tanh(r / max_log_scale) for the conditioner's output r: close to r near zero, and bounded. (Real
    NVP has a tanh with a learned factor; Glow ln sigmoid(r + 2), which has no lower bound.)

    >>> coupling = AffineCoupling(nn.Linear(1, 2))
    >>> x = torch.randn(5, 2)
    >>> torch.allclose(coupling.inverse(coupling(x)), x, atol=1e-5)
    True
    """

    outputs, volume_preserving = 2, False

    def __init__(
        self, conditioner: nn.Module, split: Split | None = None, *, max_log_scale: float = MAX_LOG_SCALE
    ) -> None:
        super().__init__(conditioner, split)
        if not 0 < max_log_scale < math.inf:
            raise ValueError(
                f"max_log_scale must be positive and finite; got {max_log_scale}. Use AdditiveCoupling for 0."
            )
        self.max_log_scale = max_log_scale

    def transform_part(self, transformed: Tensor, h: Tensor) -> tuple[Tensor, Tensor | None]:
        s, t = self._read(h)
        return transformed * s.exp() + t, s

    def invert_part(self, transformed: Tensor, h: Tensor) -> Tensor:
        s, t = self._read(h)
        return (transformed - t) * (-s).exp()

    def inverse_scale(self, h: Tensor) -> Tensor | None:
        return (-self._read(h)[0]).exp()

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        """Bound |ln det| by `max_log_scale` times the transformed numbers; there is no Lipschitz constant."""
        if self.why_unknown():
            return UNKNOWN
        most = math.inf if input_shape is None else self.max_log_scale * self.split.count_transformed(input_shape)
        return Stretch(math.inf, math.inf, (-most, most))

    def why_unknown(self) -> str:
        valid = 0 < self.max_log_scale < math.inf
        return super().why_unknown() or ("" if valid else f"max_log_scale must be positive; got {self.max_log_scale}.")

    def extra_repr(self) -> str:
        return f"{self.split}, max_log_scale={self.max_log_scale:g}"

    def _read(self, h: Tensor) -> tuple[Tensor, Tensor]:
        r, t = h.chunk(2, dim=1)
        return self.max_log_scale * torch.tanh(r / self.max_log_scale), t


def preserves_volume(transform: Transform) -> bool:
    """Whether the structure of a transform makes ln det zero for all weights and inputs, as in NICE and i-RevNet.

    Padding with zeros counts as preserving volume, since it is an isometry onto its image.
    """
    parts = transform.parts()
    if parts:
        return all(preserves_volume(part) for _, part, _ in parts)
    if isinstance(transform, Coupling):
        return transform.volume_preserving and not transform.why_unknown()
    return not list(transform.parameters()) and transform.stretch().logdet in (None, (0.0, 0.0))
