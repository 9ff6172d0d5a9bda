"""MADE, MAF and FFJORD, which are zuko's (`pip install 'iresnet[rivals]'`), as transforms.

made      z_i = exp(a_i) x_i + b_i, a_i and b_i of x_1 ... x_{i-1}: one masked network    Germain et al. (2015)
maf       several of these, the order of the coordinates turned around between them       Papamakarios et al. (2017)
ffjord    z = x(1) for dx/dt = f(t, x), x(0) = x: any network f                           Grathwohl et al. (2019)

ln det of the first two is exact, the sum of a_i. That of FFJORD is the integral of tr df/dx: of the whole trace up to
64 dimensions in eval and up to 8 in training, beyond that of v' (df/dx) v with one random v for each sample
(Hutchinson), without bias. All integrals are those of an adaptive solver, within its tolerances.

An inverse takes as many passes as there are dimensions (MADE, MAF), or integrates backwards (FFJORD). Nothing is proven
of either: `solve` reports an infinite bound, and the residual of a chain says what was reached.
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

from ..fixed_point import Solution, Solver
from ..logdet import EVAL_SEED, EXACT_UP_TO, Estimator
from ..precision import full_precision
from ..transform import Shape, Stretch, Transform, check_batch
from .mixing import Reverse

#: Up to this dimension a whole trace is worth its price in training.
FEW = 8

#: Nothing is known but that there is an inverse.
UNKNOWN = Stretch(math.inf, math.inf, (-math.inf, math.inf), proven=False)


class Imported(Transform):
    """A lazy transform of zuko's, from data to code, for rows of so many numbers.

    `exact`: whether its log-determinant is, in training and in eval, or an estimate. Noise then follows the generator;
    without one, in eval, it is the same every time. `adaptive`: it is found by a solver that chooses its steps.
    """

    def __init__(
        self, lazy: nn.Module, dimension: int, *, exact: tuple[bool, bool] = (True, True), adaptive: bool = False
    ) -> None:
        super().__init__()
        self.lazy, self.dimension, self.exact, self.adaptive = lazy, dimension, exact, adaptive

    @property
    def random(self) -> bool:
        """Whether the log-determinant is an estimate, in the present mode."""
        return not self.exact[0 if self.training else 1]

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        check_batch(x, "x", (self.dimension,))
        return cast(Tensor, self.lazy()(x))

    def forward_and_logdet(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        estimator: Estimator | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        check_batch(x, "x", (self.dimension,))
        lazy: Any = self.lazy
        if self.adaptive:
            lazy.exact = not self.random
        with _drawing(x, generator, fixed=not self.training) if self.random else nullcontext():
            z, logdet = lazy().call_and_ladj(x)
        return z, logdet

    def inverse(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Tensor:
        check_batch(z, "z", (self.dimension,))
        with full_precision(z):
            return cast(Tensor, self.lazy().inv(z))

    def reference(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        check_batch(x, "x", (self.dimension,))
        with full_precision(x):
            return cast(Tensor, copy.deepcopy(self.lazy).double()()(x.double()))

    def solve(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Solution:
        """The inverse, of which nothing is proven; no gradient."""
        with torch.no_grad():
            x = self.inverse(z)
        none = torch.full((len(z),), math.inf, dtype=torch.float64, device=z.device)
        return Solution(x, torch.zeros_like(none).long(), none, torch.zeros_like(none).bool(), proven=False)

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        return UNKNOWN

    def extra_repr(self) -> str:
        return f"{self.dimension}, one probe" if self.random else f"{self.dimension}"


def made(
    dimension: int, blocks: int = 1, hidden: Sequence[int] = (64, 64), activation: Callable[[], nn.Module] = nn.ReLU
) -> list[Transform]:
    """MADE with a normal distribution for every coordinate: one autoregressive transform."""
    if blocks != 1:
        raise ValueError(f'MADE is one transform; got {blocks}. Use blocks = [1], or family = "maf" for several.')
    return maf(dimension, 1, hidden, activation)


def maf(
    dimension: int, blocks: int = 5, hidden: Sequence[int] = (64, 64), activation: Callable[[], nn.Module] = nn.ReLU
) -> list[Transform]:
    """MAF: so many autoregressive transforms, the order of the coordinates turned around between them."""
    _check(dimension, blocks)
    kind, steps = _zuko().MaskedAutoregressiveTransform, list[Transform]()
    for i in range(blocks):
        turn: list[Transform] = [Reverse()] if i else []
        lazy = kind(dimension, hidden_features=tuple(hidden), activation=activation)
        steps += [*turn, Imported(lazy, dimension)]
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
    """FFJORD: so many flows of differential equations, solved within these tolerances.

    `exact`: the whole trace, and not an estimate; by default up to 8 dimensions in training and up to 64 in eval.
    """
    _check(dimension, blocks)
    both = (dimension <= FEW, dimension <= EXACT_UP_TO) if exact is None else (exact, exact)
    kind, options = _zuko().FFJTransform, {"atol": absolute, "rtol": relative}
    lazies = [kind(dimension, hidden_features=tuple(hidden), activation=activation, **options) for _ in range(blocks)]
    return [Imported(lazy, dimension, exact=both, adaptive=True) for lazy in lazies]


def _zuko() -> Any:
    try:
        return importlib.import_module("zuko.flows")
    except ImportError:
        raise ValueError(
            "MADE, MAF and FFJORD come from zuko, which is not installed. Run `pip install 'iresnet[rivals]'`, or "
            "`pip install zuko`."
        ) from None


def _check(dimension: int, blocks: int) -> None:
    if dimension < 1 or blocks < 1:
        raise ValueError(f"dimension and blocks must be at least 1; got {dimension} and {blocks}.")


@contextmanager
def _drawing(x: Tensor, generator: torch.Generator | None, *, fixed: bool) -> Iterator[None]:
    """torch's global generator, which zuko draws from, seeded by this one within the context."""
    if generator is None and not fixed:
        yield
        return
    seed = EVAL_SEED
    if generator is not None:
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    with torch.random.fork_rng([x.device] if x.is_cuda else [], device_type=x.device.type):
        torch.manual_seed(seed)
        yield
