"""Activations for contractive networks, one record each: all that the library knows of one is in its record.

A residual branch g stays a contraction only if its activations do not expand (Sec. 2.1). For densities the slope must
be continuous as well (Sec. 3.2): ELU, softplus, tanh, LipSwish and sine qualify; ReLU and MaxMin do not.
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
from ..trust import NoBoundKnown, known_type, register_torch_classes, unwrap

#: max over x of d/dx (x sigmoid(x)), rounded up: the same for x sigmoid(beta x) and every beta.
SWISH_SLOPE = 1.09984

#: Torch's softplus is the identity from its threshold t on, a jump by ln(1 + exp(-t)) / beta. From this t on it is no
#: jump: both are the same number of float64, and a part in 10^19 apart.
MIN_SOFTPLUS_THRESHOLD = 40.0


def lipswish_beta(raw: Tensor) -> Tensor:
    """The beta of a LipSwish: a softplus without torch's jump, so that it is the same number in every arithmetic."""
    return functional.softplus(raw, threshold=MIN_SOFTPLUS_THRESHOLD)


class LipSwish(nn.Module):
    """x sigmoid(beta x) / 1.1 with a learned beta > 0: Swish, divided so that its slope stays below one."""

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
    """Sorts neighbouring channels in pairs: norm-preserving, the sorting activation of Sec. 7's outlook."""

    def forward(self, x: Tensor) -> Tensor:
        return _sort_pairs(x)


def _sort_pairs(x: Tensor) -> Tensor:
    if x.shape[1] % 2:
        raise ValueError(f"MaxMin sorts channels in pairs; got {x.shape[1]} channels. Use an even number.")
    a, b = x[:, 0::2], x[:, 1::2]
    return torch.stack((torch.maximum(a, b), torch.minimum(a, b)), dim=2).flatten(1, 2)


# ---------------------------------------------------------------------------------------------- the records


def _one(*_: Any) -> float:
    return 1.0


def _nothing(*_: Any) -> None:
    return None


def _never(*_: Any) -> bool:
    return False


def _always(*_: Any) -> bool:
    return True


#: Settings that are words; all others are numbers.
WORDS = frozenset({"approximate"})

#: The range in which a factor inside a function, divided out again, neither over- nor underflows in float64.
FACTORS = (1e-100, 1e100)


def _in_range(factor: float) -> bool:
    return FACTORS[0] <= abs(factor) <= FACTORS[1]


@dataclass(frozen=True, eq=False)
class Activation:
    """One kind of activation. Every function takes its `settings`, and then its `tensors`, by position.

    `slope` takes x and y = function(x) first; None where there is none in closed form. `lipschitz` is None where these
    settings have no bound. `monotone`: acts on every number by itself and never falls. `rounding` is (c, c') with
    |fl(y) - y| <= c |x| + c' in float64. `kernel` is what the kernels of a GPU know it by: 0 for ELU, the frequency of
    a sine. `is_reshape`: no number changes.
    """

    kind: type[nn.Module]
    function: Callable[..., Tensor]
    settings: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    slope: Callable[..., Tensor] | None = None
    lipschitz: Callable[..., float | None] = _one
    monotone: Callable[..., bool] = _never
    rounding: Callable[..., tuple[float, float]] = lambda *_: (0.0, 0.0)
    kernel: Callable[..., float | None] = _nothing
    is_reshape: bool = False

    @property
    def name(self) -> str:
        return self.kind.__name__.lower()

    @property
    def may_return_input(self) -> bool:
        """Whether it may return what it is given itself, in another shape at most."""
        return self.is_reshape or self.kind is nn.Identity

    def settings_of(self, layer: nn.Module) -> tuple[Any, ...]:
        """The settings of a layer as they are now."""
        return tuple(_plain_setting(name, getattr(layer, name)) for name in self.settings)

    def tensors_of(self, layer: nn.Module) -> list[Tensor]:
        """The tensors of a layer."""
        return [getattr(layer, name) for name in self.tensors]


def _plain_setting(name: str, value: Any) -> Any:
    """A setting as a number, a word or a tuple; NaN is refused, since it makes g(x) NaN, of which nothing is true."""
    if isinstance(value, str) if name in WORDS else isinstance(value, int | tuple):
        return value
    try:
        found = tuple(value) if isinstance(value, list) else math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError):
        found = math.nan
    if name in WORDS or found != found:
        raise NoBoundKnown(f"{name} must be a {'string' if name in WORDS else 'number'}; got {value!r}.")
    return found


def elu_slope(y: Tensor) -> Tensor:
    """The slope of ELU where it made y, for alpha = 1."""
    return y.clamp(max=0) + 1


def _slope_of_elu(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    return elu_slope(y) if alpha == 1 else torch.where(x > 0, torch.ones_like(x), y + alpha)


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
    # The first axis counts samples, which must stay apart; an axis counted from the end may turn out to be that.
    return 1.0 if isinstance(axis, int) and axis >= 1 else None


def _softplus_is_continuous(beta: float, threshold: float) -> bool:
    return threshold >= MIN_SOFTPLUS_THRESHOLD and _in_range(beta)


# Where `rounding` comes from, the formula that torch evaluates:
#
#   ELU, CELU    alpha (exp(t) - 1), or by expm1: two factors of size one at most, and the argument of exp, t / alpha
#   softplus     ln(1 + exp(beta t)) / beta: an argument is wrong by u |beta t|, exp by a factor, which is a summand of
#                its logarithm; and what the threshold leaves out
#   sine         sin(f t) / f: an argument is wrong by u |f t|
#   LipSwish     t sigmoid(beta t) / 1.1: factors of t, as |s sigmoid'(s)| < 1/4 for the error of s = beta t
#   GELU, SiLU   t times a number of size one, likewise
#   the others   factors of a result that is no larger than t, or than one
_RECORDS = (
    Activation(
        nn.ELU, functional.elu, ("alpha",), slope=_slope_of_elu,
        lipschitz=lambda alpha: max(1.0, abs(alpha)),  # alpha exp(x) for x < 0
        monotone=lambda alpha: alpha >= 0,
        rounding=lambda alpha: (0.0, 2 * ELEMENTARY * abs(alpha)),
        kernel=lambda alpha: 0.0 if alpha == 1 else None,
    ),
    Activation(
        nn.CELU, functional.celu, ("alpha",),
        # exp(x / alpha) for x < 0: without bound for alpha < 0
        lipschitz=lambda alpha: 1.0 if alpha > 0 and _in_range(alpha) else None,
        monotone=_always, rounding=lambda alpha: (0.0, 2 * ELEMENTARY * abs(alpha)),
    ),
    Activation(
        nn.LeakyReLU, functional.leaky_relu, ("negative_slope",), lipschitz=lambda slope: max(1.0, abs(slope)),
        monotone=lambda slope: slope >= 0, rounding=lambda slope: (2 * UNIT * abs(slope), 0.0),
    ),
    Activation(
        nn.Softplus, functional.softplus, ("beta", "threshold"), slope=lambda x, y, beta, _: torch.sigmoid(beta * x),
        lipschitz=lambda *settings: 1.0 if _softplus_is_continuous(*settings) else None, monotone=_always,
        rounding=_softplus_rounding,
    ),
    Activation(
        nn.Tanh, torch.tanh, slope=lambda x, y: 1 - y.square(), monotone=_always, rounding=lambda: (ELEMENTARY, 0.0)
    ),
    Activation(nn.ReLU, functional.relu, slope=lambda x, y: (x > 0).to(x.dtype), monotone=_always),
    Activation(nn.ReLU6, functional.hardtanh, ("min_val", "max_val"), monotone=_always),  # as its forward does
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

#: Every known activation by its name, and by its class.
ACTIVATIONS: dict[str, Activation] = {record.name: record for record in _RECORDS}
_BY_CLASS: dict[type, Activation] = {record.kind: record for record in _RECORDS}
register_torch_classes(*_BY_CLASS)


# ---------------------------------------------------------------------------------------------- of a module


def record_of(activation: nn.Module) -> Activation | None:
    """The record of a known activation; None for any other module, one that a user has changed included."""
    try:
        return _BY_CLASS.get(known_type(unwrap(activation)))
    except NoBoundKnown:
        return None


def lipschitz_constant(activation: nn.Module) -> float | None:
    """The largest slope of a known activation; None for any other module, one that a user has changed included."""
    record = record_of(activation)
    return None if record is None else record.lipschitz(*record.settings_of(unwrap(activation)))


def is_monotone(activation: nn.Module) -> bool:
    """Whether a known activation acts on every number by itself and never falls: its slopes lie in [0, constant]."""
    record = record_of(activation)
    if record is None or lipschitz_constant(activation) is None:
        return False
    return record.monotone(*record.settings_of(unwrap(activation)))


def check_contractive(activation: nn.Module) -> nn.Module:
    """The activation itself if its slope never exceeds one; else a ValueError that says so."""
    constant = lipschitz_constant(activation)
    if constant is None:
        raise ValueError(
            f"no Lipschitz constant is on record for {type(activation).__name__}: {why_no_constant(activation)}"
        )
    if constant > 1:
        advice = " LipSwish is its contractive form." if isinstance(activation, nn.SiLU) else " Use ELU or LipSwish."
        raise ValueError(f"an activation must have a slope of at most 1; {activation} reaches {constant:.4g}.{advice}")
    return activation


def why_no_constant(activation: nn.Module) -> str:
    """Why an activation has no constant on record, and what to use."""
    if type(activation) is nn.Softplus and _in_range(activation.beta):
        return (
            f"torch's softplus jumps to the identity at its threshold; got {activation}. "
            f"Use nn.Softplus(threshold={MIN_SOFTPLUS_THRESHOLD:g}), which has no jump in float64."
        )
    if record_of(activation) is not None:
        return f"its function is not finite, or not to be computed in float64, with these settings; got {activation}."
    return "its slope is not on record. Use ELU, Softplus(threshold=40), Tanh, ReLU, LipSwish, Sine or MaxMin."
