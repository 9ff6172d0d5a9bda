"""Flow: a density from a transform and a base, log p(x) = log p_base(F(x)) + ln |det dF/dx| (Eq. 3).

`Flow.forward` is the log-likelihood, so that everything that wraps `forward` (DistributedDataParallel, torch.compile)
wraps the loss. If integer data get learned noise, wrap the training objective instead. Sampling draws a code and
inverts it block by block, with every solve proven; on a GPU the first call prepares what later calls use.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor, nn

from .allowed import positive
from .base import Base, check_base
from .batch import Shape, as_plain, check_batch, dimension
from .bijector import Bijector
from .certificate import residual_blocks, unknown_parts, unlisted_blocks
from .distribution import FlowDistribution, check_contexts, is_single
from .fixed_point import Solver
from .lipschitz import Conditioned
from .logdet import EVAL_SEED, EXACT_UP_TO, CertifiedSeries, Estimator
from .model import Model, code_and_logdet
from .outermost import outermost_call
from .precision import full_precision
from .residual import ResidualBlock
from .spelling import quoted
from .transform import Transform, check_context, check_eval, why_unproven
from .transforms.elementary import InjectivePad
from .transforms.first_batch import check_initialised
from .transforms.per_sample import check_axes, why_no_function
from .tree import modules_of
from .trust import unwrap, why_untrusted

#: Passes of the pilot run that determines how many passes an estimate needs, and the most that it takes.
PILOT_PASSES, MAX_PASSES = 16, 10_000


@dataclass(frozen=True)
class LogProb:
    """Log-likelihoods with their errors, in nats per sample.

    `bias_bound` bounds the systematic error of `value`, and `standard_error` is the statistical one; if both are zero,
    the value is exact up to rounding. `passes` is the number of independent estimates averaged. `proven` is False if an
    error relies on an asserted constant or on something unknown: a user's own transform, base or layer of a
    conditioner, a hook. The bias bound is infinite if a log-determinant is not known to be exact, or the value is not
    finite.
    """

    value: Tensor
    bias_bound: Tensor
    standard_error: Tensor
    dimension: int
    passes: int
    proven: bool = False

    def bits_per_dim(self) -> LogProb:
        """Convert to -log2 p per dimension, with both errors in the same unit."""
        unit = self.dimension * math.log(2)
        return replace(
            self,
            value=-self.value / unit,
            bias_bound=self.bias_bound / unit,
            standard_error=self.standard_error / unit,
        )


class Flow(Model):
    """A density model: `flow(x)` is log p(x), `flow.sample((n,))` draws samples.

    In eval mode `log_prob` is deterministic: exact up to 64 dimensions, beyond that with the number of terms from the
    proven bound and probes from a fixed seed. Training beyond 64 dimensions needs an `estimator`.

    >>> from iresnet import mlp_flow
    >>> flow = mlp_flow(2, blocks=2, hidden=(8,)).eval()
    >>> flow.log_prob(torch.zeros(3, 2)).shape, flow.sample((5,)).shape
    (torch.Size([3]), torch.Size([5, 2]))
    """

    def __init__(
        self,
        transform: Transform,
        base: Base,
        *,
        estimator: Estimator | None = None,
        event_shape: Shape | None = None,
        dequantiser: nn.Module | None = None,
    ) -> None:
        super().__init__(transform)
        check_base(base)
        self.base, self.estimator, self.event_shape = base, estimator, event_shape
        #: Learned dequantisation noise for integer data (`transforms.dequantisation.LearnedNoise`), or None.
        self.dequantiser = dequantiser
        if any(isinstance(m, InjectivePad) for m in transform.modules()):
            raise ValueError(
                "a density needs a transform that keeps the dimension; got one with injective padding, on whose "
                "constant channels log p is unbounded. Leave the padding out, or use Classifier."
            )

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        estimator: Estimator | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return log p(x | context) in nats, shape (batch,)."""
        with outermost_call(self, x):
            return code_and_log_prob(self, x, context, estimator, generator)[1]

    def log_prob(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        estimator: Estimator | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return log p(x | context) in nats, shape (batch,): the same as calling the flow.

        If the flow has an `event_shape`, x may also be a single sample or have several batch dimensions, and is
        broadcast with the batch of contexts.
        """
        if self.event_shape is None or not isinstance(x, Tensor) or torch.compiler.is_compiling():
            return cast(Tensor, self(x, context, estimator=estimator, generator=generator))
        # What is no batch of contexts gets the sentence of a call.
        is_batch = isinstance(context, Tensor) and context.dim() > 0 and not is_single(context)
        one_each = len(cast(Tensor, context)) == len(x) if is_batch else not is_single(context)
        if x.dim() == 1 + len(self.event_shape) and one_each:
            return cast(Tensor, self(x, context, estimator=estimator, generator=generator))
        return self.given(context).log_prob(x, estimator=estimator, generator=generator)

    @torch.no_grad()
    def log_prob_with_error(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float = 1e-2,
        generator: torch.Generator | None = None,
    ) -> LogProb:
        """Return log p(x) with a proven bound on the truncation error and a standard error, each <= tolerance / 2.

        (If that would take more than 10,000 passes, the standard error stays larger, with a warning.)

        The number of terms follows from the proven Lipschitz bounds. A pilot run determines the number of passes, and
        the estimate uses new ones: stopping as soon as the error looks small would bias it.
        """
        check_eval(self, "log_prob_with_error")
        positive.check("tolerance", tolerance)
        check_batch(x, "x", self.event_shape)
        if x.dtype.itemsize < 4:
            raise ValueError(f"log_prob_with_error needs float32 or float64; got {x.dtype}. Convert model and x.")
        with full_precision(x):
            return self._log_prob_with_error(as_plain(x), as_plain(context), tolerance, generator)

    def _log_prob_with_error(
        self, x: Tensor, context: Tensor | None, tolerance: float, generator: torch.Generator | None
    ) -> LogProb:
        d, zeros = dimension(x), torch.zeros(len(x), dtype=torch.float64, device=x.device)
        known, proven = self.proof_status(tuple(x.shape[1:]))
        unknown = 0.0 if known else math.inf

        def result(value: Tensor, bias: float, error: Tensor, passes: int) -> LogProb:
            # Of numbers that overflowed nothing is known.
            return LogProb(value, (zeros + bias).where(value.isfinite(), math.inf), error, d, passes, proven)

        if d <= EXACT_UP_TO:
            return result(self.log_prob(x, context).double(), unknown, zeros, 1)
        if generator is None:
            generator = torch.Generator(device=x.device).manual_seed(EVAL_SEED)
        blocks = list(residual_blocks(self, tuple(x.shape[1:])))
        estimator = CertifiedSeries(0.5 * tolerance / max(1, len(blocks)))
        bias = (0.5 * tolerance if blocks else 0.0) + unknown

        def passes(count: int) -> Tensor:
            drawn = [self.log_prob(x, context, estimator=estimator, generator=generator).double() for _ in range(count)]
            return torch.stack(drawn)

        spread = float(passes(PILOT_PASSES).std(0).nan_to_num(0.0, 0.0).max())
        # 16 pilot passes estimate the spread to about a fifth: a factor of 1.5 covers that.
        wanted = max(PILOT_PASSES, math.ceil((1.5 * spread / (0.5 * tolerance)) ** 2))
        count = min(MAX_PASSES, wanted)
        if count < wanted:
            warnings.warn(
                f"a standard error of {0.5 * tolerance:.1e} would take {wanted} passes; the limit is {count}. "
                "Use a larger tolerance.",
                stacklevel=3,
            )
        drawn = passes(count)
        return result(drawn.mean(0), bias, drawn.std(0) / math.sqrt(count), count)

    def proof_status(self, shape: Shape) -> tuple[bool, bool]:
        """Return (whether every log-determinant is known to be correct, whether the whole likelihood is proven)."""
        blocks = [(block, at, _why_block_unknown(block, at)) for _, block, at in residual_blocks(self, shape)]
        known = not any(map(why_untrusted, (self, self.base, self.transform))) and not any(why for *_, why in blocks)
        known = known and not type(self.base).why_unknown(self.base)
        known = known and not (
            list(unknown_parts(cast(Transform, unwrap(self.transform)))) or list(unlisted_blocks(self))
        )
        known = known and not any(map(_why_unknown, self._noise_parts()))
        known = known and not any(map(why_no_function, _embeddings(self.transform)))
        return known, known and all(_is_contraction(block, at) for block, at, _ in blocks)

    def _noise_parts(self) -> Iterator[nn.Module]:
        yield from () if self.dequantiser is None else self.dequantiser.modules()

    @torch.no_grad()
    def sample(
        self,
        shape: tuple[int, ...] | int = (),
        context: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
        temperature: float = 1.0,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Tensor:
        """Draw samples of shape `shape` + (context batch) + event shape, with every block's solve proven.

        A context of real numbers without a batch dimension is a single one: `flow.sample((1000,), observation)`.
        Below a `temperature` of 1, codes are closer to their mean: cleaner samples, not those of the density.
        In eval mode on a GPU they come from an `Inverter`, which the first call prepares (this takes seconds) and later
        calls use until the transform changes. It is kept, with its memory, in `decoder.inverter`.
        """
        shape = _sample_shape(shape)
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature must be finite and at least 0; got {temperature}.")
        count, flat, batch = _expand_context(self, shape, context)
        z = self.base.rsample(count, generator, temperature=temperature)
        x = self.decoder(self.transform, z, flat, tolerance=tolerance, solver=solver)
        return x.reshape(*shape, *batch, *x.shape[1:])

    def rsample_and_log_prob(
        self,
        shape: tuple[int, ...] | int = (),
        context: Tensor | None = None,
        *,
        estimator: Estimator | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draw differentiable samples (reparametrised, implicit inverse); return them and their log p(x)."""
        shape = _sample_shape(shape)
        if not self.base.reparametrised:
            raise ValueError(
                "differentiable samples need a reparametrised base; got a "
                f"{type(self.base).__name__}, which draws a component. Use DiagonalNormal as the base."
            )
        check_initialised(self)
        count, flat, batch = _expand_context(self, shape, context)
        with outermost_call(self, self.base.mean.new_zeros(1, 1)):
            z = self.base.rsample(count, generator)
            x = self.decoder(self.transform, z, flat)
            _, logdet = self.transform.forward_and_logdet(
                x, flat, estimator=estimator or (self.estimator if self.training else None), generator=generator
            )
            log_prob = self.base.log_prob(z) + logdet
        return x.reshape(*shape, *batch, *x.shape[1:]), log_prob.reshape((*shape, *batch))

    def given(self, context: Tensor | None = None) -> FlowDistribution:
        """Return p(. | context) as a `torch.distributions.Distribution` with the context's batch shape.

        A context of real numbers without a batch dimension is a single one, whose batch shape is ().
        """
        return FlowDistribution(self, context)

    def bijector(self, context: Tensor | None = None) -> Bijector:
        """Return the transform as a `torch.distributions.Transform` from data to codes; `.inv` maps codes to data."""
        shape = self.event_shape or self.transform.data_shape(self.base.shape)
        return Bijector(self.transform, shape, context, estimator=self.estimator, decoder=self.decoder)


def code_and_log_prob(
    model: Any, x: Tensor, context: Tensor | None, estimator: Estimator | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Return (z, log p(x)) of a model that has a transform and a base; its own estimator is the default in training."""
    check_batch(x, "x", model.event_shape)
    check_context(model.transform, context)
    if context is not None and not torch.compiler.is_compiling():
        for embed in _embeddings(model.transform):
            check_axes(embed, context)
    if estimator is None and model.training:
        estimator = model.estimator
    z, logdet = code_and_logdet(model.transform, x, context, estimator, generator)
    if tuple(z.shape[1:]) != model.base.shape:
        raise ValueError(
            f"the base must have the shape of the codes, {tuple(z.shape[1:])}; got {model.base.shape}. "
            "Build the base with the transform's output shape."
        )
    return z, model.base.log_prob(z) + logdet


def _embeddings(transform: nn.Module) -> Iterator[nn.Module]:
    yield from (m.embed for m in modules_of(transform) if isinstance(m, Conditioned))


def _why_unknown(module: nn.Module) -> str:
    return why_unproven(module) if isinstance(module, Transform) else why_untrusted(module)


def _why_block_unknown(block: ResidualBlock, shape: Shape | None) -> str:
    return why_untrusted(block) or block.bound(shape).reason


def _is_contraction(block: ResidualBlock, shape: Shape | None) -> bool:
    found = block.bound(shape)
    return found.proven and found.value < 1


def _sample_shape(shape: tuple[int, ...] | int) -> Shape:
    """Return the number of samples as a tuple; refuse what are not whole numbers, at least 1."""
    sizes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    if not all(isinstance(size, Integral) and size > 0 for size in sizes):
        raise ValueError(
            f"shape must be a number of samples, at least 1, or a tuple of them; got {quoted(shape)}. "
            "Use flow.sample((64,)) for 64 samples."
        )
    return sizes


def _expand_context(flow: Flow, shape: Shape, context: Tensor | None) -> tuple[int, Tensor | None, Shape]:
    """Return (number of codes, the context repeated for each of them, batch shape of the result)."""
    count = math.prod(shape)
    if context is None:
        return count, None, ()
    contexts = context[None] if (single := is_single(context)) else context
    check_contexts(flow.transform, contexts)
    repeated = contexts.expand(count, *contexts.shape).flatten(0, 1)
    return count * len(contexts), repeated, () if single else (len(contexts),)
