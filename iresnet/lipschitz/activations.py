"""Activations for contractive networks, one record each: everything the library knows about an activation.

A residual branch g is a contraction only if its activations do not expand (Sec. 2.1). For densities the slope must
also be continuous (Sec. 3.2): ELU, softplus, tanh, LipSwish and sine qualify; ReLU and MaxMin do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..float64 import ELEMENTARY, UNIT
from ..trust import NoBoundKnown, known_type, register_torch_classes, unwrap, unwrap_unmodified
from . import elu

#: max over x of d/dx (x sigmoid(x)), rounded up; it is the same for x sigmoid(beta x) with any beta.
SWISH_SLOPE = 1.09984

#: Torch's softplus switches to the identity at its threshold t, a jump by ln(1 + exp(-t)) / beta. From this t on there
#: is no jump in float64: both sides round to the same number.
MIN_SOFTPLUS_THRESHOLD = 40.0


def lipswish_beta(raw: Tensor) -> Tensor:
    """Compute beta of LipSwish by a softplus without torch's jump, so that it agrees in every precision."""
    return functional.softplus(raw, threshold=MIN_SOFTPLUS_THRESHOLD)


class LipSwish(nn.Module):
    """x sigmoid(beta x) / 1.1 with a learned beta > 0: Swish, scaled so that its slope stays below one."""

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        if not beta > 0:
            raise ValueError(f"beta must be positive; got {beta}.")
        self.raw_beta = nn.Parameter(torch.tensor(beta + math.log(-math.expm1(-beta))))  # softplus of it is beta

    def forward(self, x: Tensor) -> Tensor:
        return _lipswish(x, self.raw_beta)


def _lipswish(x: Tensor, raw: Tensor) -> Tensor:
    return x * torch.sigmoid(lipswish_beta(raw) * x) / 1.1


class Sine(nn.Module):
    """sin(frequency x) / frequency: slope cos(frequency x), at most one."""

    def __init__(self, frequency: float = 1.0) -> None:
        super().__init__()
        if not frequency > 0:
            raise ValueError(f"frequency must be positive; got {frequency}.")
        self.frequency = float(frequency)

    def forward(self, x: Tensor) -> Tensor:
        return _sine(x, self.frequency)

    def extra_repr(self) -> str:
        return f"frequency={self.frequency:g}"


def _sine(x: Tensor, frequency: float) -> Tensor:
    return torch.sin(frequency * x) / frequency


class MaxMin(nn.Module):
    """Sorts neighbouring channels in pairs; preserves gradient norms (the sorting activation mentioned in Sec. 7)."""

    def forward(self, x: Tensor) -> Tensor:
        return _sort_pairs(x)


def _sort_pairs(x: Tensor) -> Tensor:
    if x.shape[1] % 2:
        raise ValueError(f"MaxMin sorts channels in pairs; got {x.shape[1]} channels. Use an even number.")
    a, b = x[:, 0::2], x[:, 1::2]
    return torch.stack((torch.maximum(a, b), torch.minimum(a, b)), dim=2).flatten(1, 2)


# ---------------------------------------------------------------------------------------------- records


def _one(*_: Any) -> float:
    return 1.0


def _nothing(*_: Any) -> None:
    return None


def _never(*_: Any) -> bool:
    return False


def _always(*_: Any) -> bool:
    return True


#: Settings that are strings; all others are numbers.
STRING_SETTINGS = frozenset({"approximate"})

#: A factor in this range that is multiplied in and divided out again neither over- nor underflows in float64.
FACTOR_RANGE = (1e-100, 1e100)


def _in_range(factor: float) -> bool:
    return FACTOR_RANGE[0] <= abs(factor) <= FACTOR_RANGE[1]


@dataclass(frozen=True, eq=False)
class Activation:
    """One kind of activation. Every callable takes the values of `settings`, then of `tensors`, by position."""

    kind: type[nn.Module]
    #: (x, *settings, *tensors) -> y
    function: Callable[..., Tensor]
    #: Attributes of the module that hold its settings, and its parameters.
    settings: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    #: (x, y, *settings, *tensors) -> dy/dx; None if there is no closed form.
    slope: Callable[..., Tensor] | None = None
    #: (x, dy/dx, g, *settings) -> g d^2y/dx^2; None: by automatic differentiation of `slope`.
    curvature: Callable[..., Tensor] | None = None
    #: (x, out, *settings) -> dy/dx, with y written to `out`, on a CPU: faster than `function` and `slope`.
    fast_slope: Callable[..., Tensor] | None = None
    #: (x, *settings) -> y, on a CPU without a gradient: faster than `function`.
    fast_value: Callable[..., Tensor] | None = None
    #: The largest slope; None if these settings have no bound.
    lipschitz: Callable[..., float | None] = _one
    #: Whether it acts elementwise and never decreases.
    monotone: Callable[..., bool] = _never
    #: (c, c') with |fl(y) - y| <= c |x| + c' in float64.
    rounding: Callable[..., tuple[float, float]] = lambda *_: (0.0, 0.0)
    #: The code of the activation in the GPU kernels: 0 for ELU, the frequency of a sine; None if there is no kernel.
    kernel: Callable[..., float | None] = _nothing
    #: Whether it changes the shape and no value.
    is_reshape: bool = False

    @property
    def name(self) -> str:
        return self.kind.__name__.lower()

    @property
    def may_return_input(self) -> bool:
        """Whether its output may be the input itself or a view of it."""
        return self.is_reshape or self.kind is nn.Identity

    def settings_of(self, layer: nn.Module) -> tuple[Any, ...]:
        """Return the current settings of a module of this kind; raise `NoBoundKnown` for those without a bound."""
        for name, t in zip(self.tensors, self.tensors_of(layer), strict=True):
            if t.shape not in ((), (1,)):  # it would broadcast
                raise NoBoundKnown(f"{name} of {type(layer).__name__} must be one number; got shape {tuple(t.shape)}.")
        return tuple(_plain_setting(name, getattr(layer, name)) for name in self.settings)

    def tensors_of(self, layer: nn.Module) -> list[Tensor]:
        """Return the tensors of a module of this kind."""
        return [getattr(layer, name) for name in self.tensors]


def _plain_setting(name: str, value: Any) -> Any:
    """Return a setting as a number, a string or a tuple; raise `NoBoundKnown` for anything else, and for NaN."""
    if isinstance(value, str) if name in STRING_SETTINGS else isinstance(value, int | tuple):
        return value
    try:
        number = tuple(value) if isinstance(value, list) else math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if name in STRING_SETTINGS or number != number:
        raise NoBoundKnown(f"{name} must be a {'string' if name in STRING_SETTINGS else 'number'}; got {value!r}.")
    return number


def _lipswish_slope(x: Tensor, y: Tensor, raw: Tensor) -> Tensor:
    beta = lipswish_beta(raw)
    s = torch.sigmoid(beta * x)
    return (s + beta * x * s * (1 - s)) / 1.1


def _softplus_rounding(beta: float, threshold: float) -> tuple[float, float]:
    if not _softplus_is_continuous(beta, threshold):
        raise NoBoundKnown(
            f"Softplus(beta={beta}, threshold={threshold}) jumps at its threshold. "
            f"Use nn.Softplus(threshold={MIN_SOFTPLUS_THRESHOLD:g})."
        )
    return 2 * ELEMENTARY, 4 * ELEMENTARY / abs(beta)


def _reshape_constant(axis: Any, *_: Any) -> float | None:
    # Axis 0 is the batch and must not be merged; a negative axis may turn out to be the batch axis.
    return 1.0 if isinstance(axis, int) and axis >= 1 else None


def _softplus_is_continuous(beta: float, threshold: float) -> bool:
    return threshold >= MIN_SOFTPLUS_THRESHOLD and _in_range(beta)


# Where `rounding` comes from: the formula that torch evaluates.
#
#   ELU, CELU    alpha (exp(t) - 1), or with expm1: two factors of at most one, and the argument of exp, t / alpha; or
#                2^(t / ln 2) - 1, where the argument has an error of 2 u |t| / ln 2, and |t| exp(t) < 1/2; for t > 0
#                the smaller of this and t: it is t, unless they differ by less than the error
#   softplus     ln(1 + exp(beta t)) / beta: the argument has an error of u |beta t|, exp a relative error, which its
#                logarithm turns into an absolute one; plus what the threshold drops
#   sine         sin(f t) / f: the argument has an error of u |f t|
#   LipSwish     t sigmoid(beta t) / 1.1: relative to t, as |s sigmoid'(s)| < 1/4 bounds the effect of s = beta t
#   GELU, SiLU   t times a number of at most one, likewise
#   the others   relative errors of a result that is no larger than t, or than one
_RECORDS = (
    Activation(
        nn.ELU, functional.elu, ("alpha",), slope=elu.slope, curvature=elu.curvature, fast_slope=elu.fast_slope,
        fast_value=elu.fast_value,
        lipschitz=lambda alpha: max(1.0, abs(alpha)),  # alpha exp(x) for x < 0
        monotone=lambda alpha: alpha >= 0,
        rounding=lambda alpha: (0.0, 2 * ELEMENTARY * abs(alpha)),
        kernel=lambda alpha: 0.0 if alpha == 1 else None,
    ),
    Activation(
        nn.CELU, functional.celu, ("alpha",),
        # exp(x / alpha) for x < 0: unbounded for alpha < 0
        lipschitz=lambda alpha: 1.0 if alpha > 0 and _in_range(alpha) else None,
        monotone=_always, rounding=lambda alpha: (0.0, 2 * ELEMENTARY * abs(alpha)),
    ),
    Activation(
        nn.LeakyReLU, functional.leaky_relu, ("negative_slope",), lipschitz=lambda slope: max(1.0, abs(slope)),
        monotone=lambda slope: slope >= 0, rounding=lambda slope: (2 * UNIT * abs(slope), 0.0),
    ),
    Activation(
        nn.Softplus, functional.softplus, ("beta", "threshold"), slope=lambda x, y, beta, _: torch.sigmoid(beta * x),
        curvature=lambda x, d, g, beta, _: beta * d * (1 - d) * g,
        lipschitz=lambda *settings: 1.0 if _softplus_is_continuous(*settings) else None, monotone=_always,
        rounding=_softplus_rounding,
    ),
    Activation(
        nn.Tanh, torch.tanh, slope=lambda x, y: 1 - y.square(), curvature=lambda x, d, g: -2 * torch.tanh(x) * d * g,
        monotone=_always, rounding=lambda: (ELEMENTARY, 0.0),
    ),
    Activation(
        nn.ReLU, functional.relu, slope=lambda x, y: (x > 0).to(x.dtype),
        curvature=lambda x, d, g: torch.zeros_like(x), monotone=_always,
    ),
    Activation(nn.ReLU6, functional.hardtanh, ("min_val", "max_val"), monotone=_always),  # as in its forward
    Activation(nn.Hardtanh, functional.hardtanh, ("min_val", "max_val"), monotone=_always),
    Activation(nn.Softsign, functional.softsign, monotone=_always, rounding=lambda: (ELEMENTARY, 0.0)),
    Activation(
        nn.LogSigmoid, functional.logsigmoid, monotone=_always, rounding=lambda: (ELEMENTARY, 2 * ELEMENTARY)
    ),
    Activation(
        nn.Sigmoid, torch.sigmoid, lipschitz=lambda: 0.25, monotone=_always, rounding=lambda: (0.0, 2 * ELEMENTARY)
    ),
    Activation(nn.Identity, lambda x: x, slope=lambda x, y: torch.ones_like(x), monotone=_always),
    Activation(
        Sine, _sine, ("frequency",), slope=lambda x, y, f: torch.cos(f * x),
        curvature=lambda x, d, g, f: -f * torch.sin(f * x) * g,
        lipschitz=lambda f: 1.0 if _in_range(f) else None,
        rounding=lambda f: (2 * ELEMENTARY, 0.0), kernel=float,
    ),
    Activation(
        LipSwish, _lipswish, tensors=("raw_beta",),
        slope=_lipswish_slope, lipschitz=lambda: SWISH_SLOPE / 1.1, rounding=lambda: (2 * ELEMENTARY, 0.0),
    ),
    Activation(MaxMin, _sort_pairs),
    Activation(
        nn.SiLU, functional.silu, lipschitz=lambda: SWISH_SLOPE, rounding=lambda: (2 * ELEMENTARY, 0.0)
    ),
    Activation(
        nn.GELU, lambda x, approximate: functional.gelu(x, approximate=approximate), ("approximate",),
        lipschitz=lambda _: 1.13, rounding=lambda _: (2 * ELEMENTARY, 0.0),
    ),
    Activation(nn.Flatten, torch.flatten, ("start_dim", "end_dim"), lipschitz=_reshape_constant, is_reshape=True),
    Activation(
        nn.Unflatten, torch.unflatten, ("dim", "unflattened_size"), lipschitz=_reshape_constant, is_reshape=True
    ),
)  # fmt: skip

#: Every known activation, by name and by class.
ACTIVATIONS: dict[str, Activation] = {record.name: record for record in _RECORDS}
_BY_CLASS: dict[type, Activation] = {record.kind: record for record in _RECORDS}
_KINDS = tuple(_BY_CLASS)
register_torch_classes(*_BY_CLASS)


# ---------------------------------------------------------------------------------------------- lookup


def record_of(activation: nn.Module, *, unmodified: bool = False) -> Activation | None:
    """Return the record of a known activation; None for any other module, or one that a user has modified.

    `unmodified` as in `trust.known_type`.
    """
    if not isinstance(unwrap(activation), _KINDS):
        return None
    try:
        return _BY_CLASS.get(known_type(unwrap_unmodified(activation), unmodified=unmodified))
    except NoBoundKnown:
        return None


def lipschitz_constant(activation: nn.Module) -> float | None:
    """Return the largest slope of a known activation; None for any other module, or one that a user has modified."""
    record = record_of(activation)
    return None if record is None else record.lipschitz(*record.settings_of(unwrap(activation)))


def is_monotone(activation: nn.Module) -> bool:
    """Whether a known activation acts elementwise and never decreases: its slopes lie in [0, lipschitz]."""
    record = record_of(activation)
    if record is None or lipschitz_constant(activation) is None:
        return False
    return record.monotone(*record.settings_of(unwrap(activation)))


def check_contractive(activation: nn.Module) -> nn.Module:
    """Return the activation if its slope never exceeds one; otherwise raise ValueError."""
    constant = lipschitz_constant(activation)
    if constant is None:
        raise ValueError(
            f"no Lipschitz constant is known for {type(activation).__name__}: {why_no_constant(activation)}"
        )
    if constant > 1:
        advice = " LipSwish is its contractive form." if isinstance(activation, nn.SiLU) else " Use ELU or LipSwish."
        raise ValueError(f"an activation must have a slope of at most 1; {activation} reaches {constant:.4g}.{advice}")
    return activation


def why_no_constant(activation: nn.Module) -> str:
    """Return why an activation has no known Lipschitz constant, and what to use instead."""
    if type(activation) is nn.Softplus and _in_range(activation.beta):
        return (
            f"torch's softplus jumps to the identity at its threshold; got {activation}. "
            f"Use nn.Softplus(threshold={MIN_SOFTPLUS_THRESHOLD:g}), which has no jump in float64."
        )
    if record_of(activation) is not None:
        return f"with these settings it is not finite, or cannot be computed in float64; got {activation}."
    return "its slope is not known. Use ELU, Softplus(threshold=40), Tanh, ReLU, LipSwish, Sine or MaxMin."
