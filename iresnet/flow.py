"""Flow: a density from a transform and a base, log p(x) = log p_base(F(x)) + ln |det dF/dx| (Eq. 3).

`Flow.forward` IS the log-likelihood of numbers, so that everything that wraps forward (DDP, compile) wraps the loss;
where integers get noise that is learned, wrap the objective. Sampling
draws a code and inverts it, block by block, each solve proven; on a GPU the first call prepares what later ones use.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from .base import Base
from .certificate import residual_blocks, unknown_parts, unlisted_blocks
from .fixed_point import Solver
from .inverse import Decoder
from .logdet import EVAL_SEED, EXACT_UP_TO, CertifiedSeries, Estimator
from .residual import ResidualBlock, outermost_call
from .transform import Shape, Transform, check_batch, check_context, dimension
from .transforms.elementary import InjectivePad
from .transforms.first_batch import uninitialised
from .trust import why_untrusted

#: Passes of the pilot run that decides how many probes an estimate needs, and the most that are taken.
PILOT, MOST_PASSES = 16, 10_000


@dataclass(frozen=True)
class LogProb:
    """A log-likelihood with its errors, in nats per sample: `value` +- `standard_error`, off by at most `bias_bound`.

    `passes` is the number of independent estimates averaged; one with both errors zero is exact up to rounding.
    `proven` is False where an error rests on what was asserted or is not known: a constant, a transform or a base of a
    user's own, a hook; the bias has no bound where a log-determinant is not known to be exact.
    """

    value: Tensor
    bias_bound: Tensor
    standard_error: Tensor
    dimension: int
    passes: int
    proven: bool = False

    def bits_per_dim(self) -> LogProb:
        """-log2 p per dimension, with both errors in the same unit."""
        unit = self.dimension * math.log(2)
        return replace(
            self,
            value=-self.value / unit,
            bias_bound=self.bias_bound / unit,
            standard_error=self.standard_error / unit,
        )


class Flow(nn.Module):
    """A density model: `flow(x)` is log p(x), `flow.sample((n,))` draws.

    In eval, `log_prob` gives the same number twice: exact up to 64 dimensions, beyond that with terms from the proven
    bound and probes from a fixed seed. For training beyond 64 dimensions name an `estimator`.

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
        super().__init__()
        self.transform, self.base, self.estimator, self.event_shape = transform, base, estimator, event_shape
        #: The noise that integers get, where it is learned (`transforms.dequantisation.LearnedNoise`).
        self.dequantiser = dequantiser
        #: What turns codes into samples: `decoder.reason` says why the last ones were not accelerated.
        self.decoder = Decoder()
        if any(isinstance(m, InjectivePad) for m in transform.modules()):
            raise ValueError(
                "a density needs a transform that keeps the dimension; this one has injective padding, on whose "
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
        """log p(x | context) in nats, shape (batch,)."""
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
        """The same as calling the flow."""
        return cast(Tensor, self(x, context, estimator=estimator, generator=generator))

    @torch.no_grad()
    def log_prob_with_error(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float = 1e-2,
        generator: torch.Generator | None = None,
    ) -> LogProb:
        """log p(x) with a proven bound on the truncation error and a standard error, each at most tolerance / 2.

        (The standard error may stay larger where that would take more than 10,000 passes: a warning says so.)

        The number of terms follows from the proven Lipschitz bounds. The number of probes is fixed by a pilot run, and
        the estimate is made of fresh ones: stopping when the error looks small would bias it.
        """
        if self.training:
            raise ValueError("log_prob_with_error judges a finished model; call flow.eval() first.")
        if not tolerance > 0:
            raise ValueError(f"tolerance must be positive; got {tolerance}.")
        check_batch(x, "x", self.event_shape)
        d, zeros = dimension(x), torch.zeros(len(x), dtype=torch.float64, device=x.device)
        known, proven = self.standing(tuple(x.shape[1:]))
        unknown = 0.0 if known else math.inf
        if d <= EXACT_UP_TO:
            return LogProb(self.log_prob(x, context).double(), zeros + unknown, zeros, d, 1, proven)
        if generator is None:
            generator = torch.Generator(device=x.device).manual_seed(EVAL_SEED)
        blocks = list(residual_blocks(self, tuple(x.shape[1:])))
        estimator = CertifiedSeries(0.5 * tolerance / max(1, len(blocks)))
        bias = (0.5 * tolerance if blocks else 0.0) + unknown

        def passes(count: int) -> Tensor:
            drawn = [self.log_prob(x, context, estimator=estimator, generator=generator).double() for _ in range(count)]
            return torch.stack(drawn)

        spread = float(passes(PILOT).std(0).max())
        # A pilot of 16 knows its spread to a fifth or so: half as much again covers it.
        wanted = max(PILOT, math.ceil((1.5 * spread / (0.5 * tolerance)) ** 2))
        count = min(MOST_PASSES, wanted)
        if count < wanted:
            warnings.warn(
                f"a standard error of {0.5 * tolerance:.1e} would take {wanted} passes; {count} are made. "
                "Allow a larger tolerance.",
                stacklevel=2,
            )
        drawn = passes(count)
        return LogProb(drawn.mean(0), zeros + bias, drawn.std(0) / math.sqrt(count), d, count, proven)

    def standing(self, shape: Shape) -> tuple[bool, bool]:
        """(whether every log-determinant is known to be what it says, whether all of a likelihood is proven)."""
        known = not (why_untrusted(self) or why_untrusted(self.base) or list(unknown_parts(self.transform)))
        known = known and not list(unlisted_blocks(self))
        return known, known and all(_is_contraction(block, at) for _, block, at in residual_blocks(self, shape))

    @torch.no_grad()
    def sample(
        self,
        shape: tuple[int, ...] | int = (),
        context: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
        tolerance: float | None = None,
        solver: Solver | None = None,
    ) -> Tensor:
        """Draw samples of shape `shape` + (batch of the context) + event, every block's solve proven.

        In eval on a GPU they come from an `Inverter`, which the first call prepares (seconds) and later calls use
        until the transform changes; it lives, and keeps its memory, in `decoder.inverter`.
        """
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        count, flat, batch = _spread(self, shape, context)
        z = self.base.rsample(count, generator)
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
        """Samples that can be differentiated (reparametrised, implicit inverse), and their log p at x."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if not self.base.reparametrised:
            raise ValueError(
                f"{type(self.base).__name__} draws a component, which has no gradient; samples of it cannot be "
                "differentiated. Use DiagonalNormal as the base."
            )
        if self.training and uninitialised(self):
            raise ValueError(
                "in training the first batch initialises ActNorms and principal axes, and samples must not be that "
                "batch; call the flow on data first, or flow.eval() to sample it as it is."
            )
        count, flat, batch = _spread(self, shape, context)
        with outermost_call(self, self.base.mean.new_zeros(1, 1)):
            z = self.base.rsample(count, generator)
            x = self.decoder(self.transform, z, flat)
            _, logdet = self.transform.forward_and_logdet(
                x, flat, estimator=estimator or (self.estimator if self.training else None), generator=generator
            )
            log_prob = self.base.log_prob(z) + logdet
        return x.reshape(*shape, *batch, *x.shape[1:]), log_prob.reshape((*shape, *batch))

    def given(self, context: Tensor) -> ConditionalDistribution:
        """p(. | context) as a `torch.distributions.Distribution` with the context's batch shape."""
        return ConditionalDistribution(self, context)


def code_and_log_prob(
    model: Any, x: Tensor, context: Tensor | None, estimator: Estimator | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """(z, log p(x)) of a model that has a transform and a base.

    Where the caller names nothing: the model's own estimator in training, a fixed seed in eval.
    """
    check_batch(x, "x", model.event_shape)
    check_context(model.transform, context)
    if estimator is None and model.training:
        estimator = model.estimator
    elif estimator is None and generator is None and dimension(x) > EXACT_UP_TO:
        generator = torch.Generator(device=x.device).manual_seed(EVAL_SEED)
    z, logdet = model.transform.forward_and_logdet(x, context, estimator=estimator, generator=generator)
    if tuple(z.shape[1:]) != model.base.shape:
        raise ValueError(
            f"the base has shape {model.base.shape}, but the transform gives codes of shape {tuple(z.shape[1:])}. "
            "Make the base with the transform's output shape."
        )
    return z, model.base.log_prob(z) + logdet


def _is_contraction(block: ResidualBlock, shape: Shape | None) -> bool:
    found = block.bound(shape)
    return not why_untrusted(block) and found.proven and found.value < 1


def _spread(flow: Flow, shape: Shape, context: Tensor | None) -> tuple[int, Tensor | None, Shape]:
    """(number of codes, context repeated for each, batch shape of the result)."""
    count = math.prod(shape)
    if context is None:
        return count, None, ()
    _check_contexts(flow, context)
    spread = context.expand(count, *context.shape).flatten(0, 1)
    return count * len(context), spread, (len(context),)


def _check_contexts(flow: Flow, context: Tensor) -> None:
    """Refuse what is no batch of contexts: rows of numbers, or integers, such as classes, one or more to a sample."""
    check_context(flow.transform, context)
    if isinstance(context, Tensor) and not (context.is_floating_point() or context.is_complex()):
        context = context[..., None].double()
    check_batch(context, "context")


class ConditionalDistribution(torch.distributions.Distribution):
    """A flow at a fixed batch of contexts, with the shapes of any of torch's distributions: a value is broadcast."""

    arg_constraints: ClassVar[dict[str, Any]] = {}
    has_rsample = True

    def __init__(self, flow: Flow, context: Tensor) -> None:
        _check_contexts(flow, context)
        self.flow, self.context = flow, context
        event = flow.event_shape or flow.base.shape
        super().__init__(torch.Size((len(context),)), torch.Size(event), validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        lead, own = self._leading(value), self.context.shape[1:]
        x = value.expand(*lead, *self.event_shape).reshape(-1, *self.event_shape)
        c = self.context.expand(*lead, *own).reshape(-1, *own)
        return self.flow.log_prob(x, c).reshape(lead)

    def _leading(self, value: Tensor) -> torch.Size:
        """The shape of log p(value): what stands before an event, broadcast with the batch of contexts."""
        at = value.dim() - len(self.event_shape)
        try:
            if at >= 0 and value.shape[at:] == self.event_shape:
                return cast(torch.Size, torch.broadcast_shapes(value.shape[:at], self.batch_shape))  # type: ignore[no-untyped-call]
        except RuntimeError:  # torch's own, which does not say what is what
            pass
        batch, event = (", ".join(map(str, shape)) for shape in (self.batch_shape, self.event_shape))
        raise ValueError(
            f"value must have shape (..., {event}), where ... is broadcast with the {batch} contexts; "
            f"got {tuple(value.shape)}. (A flow whose codes have another shape than its data is given event_shape=.)"
        )

    def sample(self, sample_shape: Any = ()) -> Tensor:
        return self.flow.sample(tuple(sample_shape), self.context)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        return self.flow.rsample_and_log_prob(tuple(sample_shape), self.context)[0]
