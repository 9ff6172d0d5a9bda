"""Hybrid: one invertible network that classifies and gives likelihoods.

The code z = F(x) is used twice: by a base, for the density log p(x) = log p_base(z) + ln |det dF/dx| (Eq. 3), and by a
head, for logits. One pass gives both; training minimises a weighted sum (`train.Joint`). The transform must not have
injective padding: a density on constant channels is unbounded.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from .base import Base
from .batch import Shape
from .classifier import Classifier
from .fixed_point import Solver
from .flow import Flow, LogProb, code_and_log_prob
from .logdet import Estimator
from .model import Model
from .outermost import outermost_call
from .transform import Transform


class HybridOutput(NamedTuple):
    """The output of a hybrid: log p(x) in nats, shape (batch,), and logits, shape (batch, classes)."""

    log_prob: Tensor
    logits: Tensor


class Hybrid(Model):
    """A transform with a base and a head: `hybrid(x)` returns log p(x) and logits from one pass.

    `flow` and `classifier` are views that share its weights.

    >>> from iresnet import DiagonalNormal, ResidualBlock, contractive_mlp
    >>> block = ResidualBlock(contractive_mlp(4, hidden=(8,)))
    >>> model = Hybrid(block, DiagonalNormal(4), nn.Linear(4, 3)).eval()
    >>> log_prob, logits = model(torch.randn(2, 4))
    >>> log_prob.shape, logits.shape, model.sample((5,)).shape
    (torch.Size([2]), torch.Size([2, 3]), torch.Size([5, 4]))
    """

    def __init__(
        self,
        transform: Transform,
        base: Base,
        head: nn.Module,
        *,
        estimator: Estimator | None = None,
        event_shape: Shape | None = None,
    ) -> None:
        super().__init__(transform)
        self.base, self.head = base, head
        self.estimator, self.event_shape = estimator, event_shape
        _ = self.flow  # refuses a transform without a density

    @property
    def flow(self) -> Flow:
        """The density alone, sharing every weight."""
        view = Flow(self.transform, self.base, estimator=self.estimator, event_shape=self.event_shape)
        view.training, view.decoder = self.training, self.decoder
        return view

    @property
    def classifier(self) -> Classifier:
        """The classifier alone, sharing every weight."""
        view = Classifier(self.transform, self.head)
        view.training, view.decoder = self.training, self.decoder
        return view

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        estimator: Estimator | None = None,
        generator: torch.Generator | None = None,
    ) -> HybridOutput:
        """Return log p(x) and logits. In eval mode the likelihood is deterministic, as for a `Flow`."""
        with outermost_call(self, x):
            z, log_prob = code_and_log_prob(self, x, context, estimator, generator)
            return HybridOutput(log_prob, self.head(z))

    def log_prob(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        estimator: Estimator | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return log p(x | context) in nats, shape (batch,)."""
        return self.flow.log_prob(x, context, estimator=estimator, generator=generator)

    def log_prob_with_error(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        tolerance: float = 1e-2,
        generator: torch.Generator | None = None,
    ) -> LogProb:
        """Return log p(x) with its errors, like `Flow.log_prob_with_error`."""
        return self.flow.log_prob_with_error(x, context, tolerance=tolerance, generator=generator)

    def logits(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the logits alone, without computing a log-determinant."""
        return cast(Tensor, self.classifier(x, context))

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
        """Draw samples, like `Flow.sample`."""
        sample = self.flow.sample
        return sample(shape, context, generator=generator, temperature=temperature, tolerance=tolerance, solver=solver)
