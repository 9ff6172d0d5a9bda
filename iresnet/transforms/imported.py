"""MADE, MAF and FFJORD as transforms, from the library zuko (`pip install 'iresnet[flows]'`).

made      z_i = exp(a_i) x_i + b_i, a_i and b_i of x_1 ... x_{i-1}: one masked network    Germain et al. (2015)
maf       several of these, with the coordinates reversed between them                    Papamakarios et al. (2017)
ffjord    z = x(1) for dx/dt = f(t, x), x(0) = x: any network f                           Grathwohl et al. (2019)

ln det of the first two is exact, the sum of a_i. That of FFJORD is the integral of tr df/dx: the exact trace up to 64
dimensions in eval and up to 8 in training; beyond that Hutchinson's unbiased estimate v' (df/dx) v with one random v
per sample. All integrals come from an adaptive solver, within its tolerances.

An inverse takes one pass per dimension (MADE, MAF), or integrates backwards (FFJORD). Neither is proven: `solve`
reports an infinite bound, and the code residual of a chain measures the error.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..batch import Shape, check_batch
from ..logdet import EVAL_SEED, EXACT_UP_TO
from ..precision import full_precision
from ..spelling import at_least
from ..transform import UNKNOWN, Stretch, Transform
from .closed_form import Explicit
from .mixing import Reverse

#: Up to this dimension the exact trace is used in training; beyond, its estimate is cheaper.
EXACT_IN_TRAINING = 8


class Imported(Explicit):
    """Wraps a lazy transform of zuko, from data to code, for vectors of this dimension.

    `exact` says whether the log-determinant is exact, (in training, in eval), or estimated. The random numbers of an
    estimate come from the generator; in eval, without one, they are the same every time. `adaptive` marks a transform
    that is computed by an adaptive solver.
    """

    def __init__(
        self, lazy: nn.Module, dimension: int, *, exact: tuple[bool, bool] = (True, True), adaptive: bool = False
    ) -> None:
        super().__init__()
        self.lazy, self.dimension, self.exact, self.adaptive = lazy, dimension, exact, adaptive

    @property
    def random(self) -> bool:
        """Whether the log-determinant is an estimate in the current mode."""
        return not self.exact[0 if self.training else 1]

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        check_batch(x, "x", (self.dimension,))
        return cast(Tensor, self.lazy()(x))

    def _compute_forward_and_logdet(
        self, x: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        check_batch(x, "x", (self.dimension,))
        lazy: Any = self.lazy
        if self.adaptive:
            lazy.exact = not self.random
        with _seeded(x, generator, fixed=not self.training) if self.random else nullcontext():
            z, logdet = lazy().call_and_ladj(x)
        return z, logdet

    def _compute_inverse(self, z: Tensor, context: Tensor | None) -> Tensor:
        check_batch(z, "z", (self.dimension,))
        with full_precision(z):
            return cast(Tensor, self.lazy().inv(z))

    def reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        check_batch(x, "x", (self.dimension,))
        with full_precision(x):
            return cast(Tensor, copy.deepcopy(self.lazy).double()()(x.double()))

    def verify(self, x: Tensor, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, bool, str]:
        """Return an infinite error bound: nothing is proven."""
        bound = torch.full((len(z),), math.inf, dtype=torch.float64, device=z.device)
        return bound, False, "No error bound is known for the inverse of a transform from zuko."

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        return UNKNOWN

    def extra_repr(self) -> str:
        return f"{self.dimension}, one probe" if self.random else f"{self.dimension}"


def made(
    dimension: int, blocks: int = 1, hidden: Sequence[int] = (64, 64), activation: Callable[[], nn.Module] = nn.ReLU
) -> list[Transform]:
    """Build MADE with a normal distribution for every coordinate: one autoregressive transform."""
    if blocks != 1:
        raise ValueError(f'blocks must be 1 for MADE; got {blocks}. Use blocks = [1], or family = "maf" for several.')
    return maf(dimension, 1, hidden, activation)


def maf(
    dimension: int, blocks: int = 5, hidden: Sequence[int] = (64, 64), activation: Callable[[], nn.Module] = nn.ReLU
) -> list[Transform]:
    """Build MAF: `blocks` autoregressive transforms, with the coordinates reversed between them."""
    at_least(1, dimension=dimension, blocks=blocks)
    kind, steps = _zuko().MaskedAutoregressiveTransform, list[Transform]()
    for i in range(blocks):
        reverse: list[Transform] = [Reverse()] if i else []
        lazy = kind(dimension, hidden_features=tuple(hidden), activation=activation)
        steps += [*reverse, Imported(lazy, dimension)]
    return steps


def ffjord(
    dimension: int,
    blocks: int = 1,
    hidden: Sequence[int] = (64, 64),
    activation: Callable[[], nn.Module] = nn.ELU,
    *,
    exact: bool | None = None,
    absolute: float = 1e-5,
    relative: float = 1e-5,
) -> list[Transform]:
    """Build FFJORD: `blocks` flows of ordinary differential equations, solved within these tolerances.

    `exact` uses the exact trace instead of its estimate; by default up to 8 dimensions in training and 64 in eval.
    """
    at_least(1, dimension=dimension, blocks=blocks)
    both = (dimension <= EXACT_IN_TRAINING, dimension <= EXACT_UP_TO) if exact is None else (exact, exact)
    kind, options = _zuko().FFJTransform, {"atol": absolute, "rtol": relative}
    lazies = [kind(dimension, hidden_features=tuple(hidden), activation=activation, **options) for _ in range(blocks)]
    return [Imported(lazy, dimension, exact=both, adaptive=True) for lazy in lazies]


def _zuko() -> Any:
    try:
        return importlib.import_module("zuko.flows")
    except ImportError:
        raise ValueError(
            "MADE, MAF and FFJORD come from zuko, which is not installed. Run `pip install 'iresnet[flows]'`, or "
            "`pip install zuko`."
        ) from None


@contextmanager
def _seeded(x: Tensor, generator: torch.Generator | None, *, fixed: bool) -> Iterator[None]:
    """Seed torch's global generator, which zuko draws from, by this one, or else, if `fixed`, by a fixed seed."""
    if generator is None and not fixed:
        yield
        return
    seed = EVAL_SEED
    if generator is not None:
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    with torch.random.fork_rng([x.device] if x.is_cuda else [], device_type=x.device.type):
        torch.manual_seed(seed)
        yield
