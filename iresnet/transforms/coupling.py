"""Couplings: one part of x stays as it is and says how the other is moved (NICE, Real NVP, Glow, i-RevNet).

additive    z2 = x2 + t(x1)                 ln det = 0           x2 = z2 - t(z1)
affine      z2 = x2 exp(s(x1)) + t(x1)      ln det = sum s       x2 = (z2 - t(z1)) exp(-s(z1))      with z1 = x1

The network that gives s and t, the conditioner, is free: it is never inverted. x1 comes back without an error, so that
of the whole is known exactly, ||x - x*|| = ||exp(-s(x1)) (F(x) - z)_2||: `solve` computes it in float64, relative to
what the conditioner returns there. With layers of a user's own in the conditioner it is shown, and not proven.

An additive coupling has the singular values of [[I, 0], [T, I]], so both Lip(F) and Lip(F^-1) are at most
(L + sqrt(L^2 + 4)) / 2 with L = Lip(t). An affine one has no Lipschitz constant at all: dz2/dx1 grows with x2.
"""

from __future__ import annotations

import copy
import inspect
import math
from abc import abstractmethod

import torch
from torch import Tensor, nn

from ..branch import lipschitz_bound
from ..fixed_point import Solution, Solver
from ..float64 import RESIDUAL_ROUNDING
from ..logdet import Estimator
from ..precision import full_precision
from ..proof import sample_norms
from ..transform import Shape, Stretch, Transform, check_batch, check_context, in_float64
from ..trust import NoBoundKnown, why_modified, why_untrusted
from .split import Halves, Split

#: The largest |s| of an affine coupling: no layer stretches a coordinate by more than e^2 or shrinks it by more.
LARGEST = 2.0


class Coupling(Transform):
    """What additive and affine couplings have in common.

    `conditioner` takes the part that stays (see `split.sizes`) and returns `outputs` numbers for each one that is
    moved, channel by channel. It may hold BatchNorm: an inverse takes it as it is in eval, whatever the mode.
    """

    #: Numbers that the conditioner returns for each one that is moved.
    outputs: int
    #: Whether ln det is zero, whatever the weights are.
    volume_preserving: bool

    def __init__(self, conditioner: nn.Module, split: Split | None = None) -> None:
        super().__init__()
        self.conditioner, self.split = conditioner, Halves() if split is None else split
        self._takes_context = "context" in inspect.signature(type(conditioner).forward).parameters

    @property
    def takes_context(self) -> bool:
        return self._takes_context

    @abstractmethod
    def move(self, moved: Tensor, h: Tensor) -> tuple[Tensor, Tensor | None]:
        """(z2, s, or None where it is zero) for x2 and what the conditioner says."""

    @abstractmethod
    def back(self, moved: Tensor, h: Tensor) -> Tensor:
        """x2 for z2."""

    @abstractmethod
    def shrinking(self, h: Tensor) -> Tensor | None:
        """exp(-s), by which an error in z2 is multiplied in x2; None for one."""

    def through(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(z, s, or None where it is zero): all that the forward map computes."""
        self._check(x, "x")
        check_context(self, context)
        kept, moved = self.split.take(x)
        h = self._ask(kept, moved, context)
        if h.dim() == 4 and h.is_contiguous(memory_format=torch.channels_last):  # the layout that convolutions chose
            kept, moved = self.split.take(x.contiguous(memory_format=torch.channels_last))
        moved, s = self.move(moved, h)
        return self.split.join(kept, moved), s

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.through(x, context)[0]

    def forward_and_logdet(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        estimator: Estimator | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        z, s = self.through(x, context)
        return z, summed(s, x)

    def inverse(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Tensor:
        self._check(z, "z")
        check_context(self, context)
        kept, moved = self.split.take(z)
        with full_precision(z):
            h = self._ask(kept, moved, context, self._in_eval())
            return self.split.join(kept, self.back(moved, h))

    def reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        kept, moved = self.split.take(x.double())
        return self.split.join(kept, self.move(moved, self._ask_exactly(kept, moved, context))[0])

    def solve(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Solution:
        """The inverse and its error, which a closed form allows to compute; no gradient."""
        with torch.no_grad():
            x = self.inverse(z, context)
            kept, moved = self.split.take(x.double())
            h = self._ask_exactly(kept, moved, context)
            residual, factor = self.move(moved, h)[0] - self.split.take(z.double())[1], self.shrinking(h)
            # The numbers that are added up: x2 exp(s), t and z2.
            largest = 1.0 if factor is None else 1 / factor.flatten(1).amin(1)
            allowance = RESIDUAL_ROUNDING * (
                1 + sample_norms(z.double()) + largest * sample_norms(moved) + sample_norms(h)
            )
            if factor is not None:
                residual, allowance = residual * factor, allowance * factor.flatten(1).amax(1)
            bound = torch.nan_to_num(sample_norms(residual) + allowance, nan=torch.inf, posinf=torch.inf)
        reason = why_untrusted(self) or next(filter(None, map(_foreign, self.conditioner.modules())), "")
        none = torch.zeros_like(bound).long()
        return Solution(x, none, bound, torch.isfinite(bound), proven=not reason, reason=reason)

    def output_shape(self, input_shape: Shape) -> Shape:
        self.split.check(input_shape)
        return input_shape

    def extra_repr(self) -> str:
        return str(self.split)

    def _check(self, x: Tensor, name: str) -> None:
        check_batch(x, name)
        self.split.check(tuple(x.shape[1:]))

    def _ask(self, kept: Tensor, moved: Tensor, context: Tensor | None, conditioner: nn.Module | None = None) -> Tensor:
        conditioner = self.conditioner if conditioner is None else conditioner
        h = conditioner(kept, context) if self._takes_context else conditioner(kept)
        # In the type of x again, where autocast made it coarser: s is then one number in the map and in ln det.
        return self._checked(h.to(moved.dtype), moved)

    def _in_eval(self) -> nn.Module:
        """The conditioner in eval; a copy where it is in training, where another thread may need it so."""
        training = any(m.training for m in self.conditioner.modules())
        return copy.deepcopy(self.conditioner).eval() if training else self.conditioner

    def _ask_exactly(self, kept: Tensor, moved: Tensor, context: Tensor | None) -> Tensor:
        """The conditioner as stored, in float64 and in eval."""
        with full_precision(kept):
            exact = copy.deepcopy(self.conditioner).double().eval()
            return self._ask(kept, moved, in_float64(context), exact)

    def _checked(self, h: Tensor, moved: Tensor) -> Tensor:
        expected = (len(moved), self.outputs * moved.shape[1], *moved.shape[2:])
        if h.shape != expected:
            raise ValueError(
                f"the conditioner of this {type(self).__name__} must return shape {expected}, {self.outputs} for every "
                f"number that is moved; got {tuple(h.shape)}. Give its last layer {expected[1]} outputs."
            )
        return self.split.only(h)


def summed(s: Tensor | None, x: Tensor) -> Tensor:
    """ln det of every sample of x, the sum of its s; zero where s is None."""
    return x.new_zeros(len(x)) if s is None else s.flatten(1).sum(1)


class AdditiveCoupling(Coupling):
    """z2 = x2 + t(x1) (NICE). It preserves volume: ln det is zero, exactly.

    >>> coupling = AdditiveCoupling(nn.Linear(1, 1))
    >>> coupling.volume_preserving, coupling.forward_and_logdet(torch.ones(3, 2))[1].tolist()
    (True, [0.0, 0.0, 0.0])
    """

    outputs, volume_preserving = 1, True

    def move(self, moved: Tensor, h: Tensor) -> tuple[Tensor, Tensor | None]:
        return moved + h, None

    def back(self, moved: Tensor, h: Tensor) -> Tensor:
        return moved - h

    def shrinking(self, h: Tensor) -> Tensor | None:
        return None

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        """From Lip(t), where the conditioner's layers can be read; else there is no bound but for ln det."""
        constant = self._lipschitz(input_shape)
        most = (constant + math.sqrt(constant * constant + 4)) / 2
        return Stretch(most, most, (0.0, 0.0))

    def _lipschitz(self, input_shape: Shape | None) -> float:
        shape = None if input_shape is None else (self.split.sizes(input_shape[0])[0], *input_shape[1:])
        try:
            return lipschitz_bound(self.conditioner, shape).value
        except NoBoundKnown:
            return math.inf


class AffineCoupling(Coupling):
    """z2 = x2 exp(s(x1)) + t(x1) (Real NVP, Glow). The conditioner returns the channels of s, then those of t.

    s = largest tanh(r / largest) of what the conditioner returns, r: close to r near zero, and bounded. (Real NVP has a
    tanh with a learned factor; Glow ln sigmoid(r + 2), which has no lower bound.)

    >>> coupling = AffineCoupling(nn.Linear(1, 2))
    >>> x = torch.randn(5, 2)
    >>> torch.allclose(coupling.inverse(coupling(x)), x, atol=1e-5)
    True
    """

    outputs, volume_preserving = 2, False

    def __init__(self, conditioner: nn.Module, split: Split | None = None, *, largest: float = LARGEST) -> None:
        super().__init__(conditioner, split)
        if not 0 < largest < math.inf:
            raise ValueError(f"largest must be positive, a bound for |s|; got {largest}. Use AdditiveCoupling for 0.")
        self.largest = largest

    def move(self, moved: Tensor, h: Tensor) -> tuple[Tensor, Tensor | None]:
        s, t = self._read(h)
        return moved * s.exp() + t, s

    def back(self, moved: Tensor, h: Tensor) -> Tensor:
        s, t = self._read(h)
        return (moved - t) * (-s).exp()

    def shrinking(self, h: Tensor) -> Tensor | None:
        return (-self._read(h)[0]).exp()

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        """No Lipschitz constant either way; ln det is at most `largest` times what is moved."""
        most = math.inf if input_shape is None else self.largest * self.split.moves(input_shape)
        return Stretch(math.inf, math.inf, (-most, most))

    def extra_repr(self) -> str:
        return f"{self.split}, largest={self.largest:g}"

    def _read(self, h: Tensor) -> tuple[Tensor, Tensor]:
        r, t = h.chunk(2, dim=1)
        return self.largest * torch.tanh(r / self.largest), t


def preserves_volume(transform: Transform) -> bool:
    """Whether ln det is zero for all weights and inputs, by what the transform is made of: NICE, i-RevNet.

    Padding with zeros counts as keeping volume, since it is an isometry onto its image.
    """
    parts = transform.parts()
    if parts:
        return all(preserves_volume(part) for _, part, _ in parts)
    if isinstance(transform, Coupling):
        return transform.volume_preserving
    return not list(transform.parameters()) and transform.stretch().logdet in (None, (0.0, 0.0))


def _foreign(module: nn.Module) -> str:
    """Why a module of a conditioner may be anything; empty where it is a layer of torch's or of this library's."""
    if type(module).__module__.partition(".")[0] not in ("torch", "iresnet"):
        return f"{type(module).__name__} is a layer of a user's own."
    reason = why_modified(module)
    return "" if reason is None else f"{type(module).__name__} {reason}"
