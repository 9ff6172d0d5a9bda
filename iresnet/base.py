"""Base distributions of a flow, over its codes.

DiagonalNormal      N(z; mean, scale^2) for every coordinate
NormalMixture       sum_k w_k N(z; mean_k, scale_k^2): suits clustered data, which need not be mapped to one mode; with
                    one component per class, its posterior is a classifier
FullMixture         sum_k w_k N(z; mean_k, C_k) with full covariances, for numbers that are correlated
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from numbers import Integral
from typing import cast

import torch
from torch import Tensor, nn

from .batch import Shape
from .compiler import drawing_from
from .spelling import at_least


class Base(nn.Module, ABC):
    """A distribution over codes of `shape`. `reparametrised`: whether `rsample` can be differentiated."""

    mean: Tensor
    reparametrised: bool = True

    def __init__(self, shape: Shape | int) -> None:
        super().__init__()
        self.shape: Shape = (int(shape),) if isinstance(shape, Integral) else tuple(cast(Shape, shape))

    @abstractmethod
    def log_prob(self, z: Tensor) -> Tensor:
        """Return ln p(z), summed over the last axes; leading axes are batches."""

    @abstractmethod
    def rsample(self, count: int, generator: torch.Generator | None = None, *, temperature: float = 1.0) -> Tensor:
        """Draw codes (count, *shape), the scale of every normal multiplied by `temperature`."""

    def why_unknown(self) -> str:
        """Return why this may be no density, such as parameters whose shapes do not fit; empty if it is one."""
        return ""

    def _noise(self, count: int, generator: torch.Generator | None) -> Tensor:
        source = drawing_from(generator)
        return torch.randn(count, *self.shape, dtype=self.mean.dtype, device=self.mean.device, **source)

    def _log_normal(self, z: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
        u = (z - mean) * torch.exp(-log_scale)
        density = -0.5 * u.square() - log_scale - 0.5 * math.log(2 * math.pi)
        return density.flatten(-len(self.shape)).sum(-1)


def check_base(base: object) -> None:
    """Refuse what is not a `Base`, such as a distribution of torch, as the base of a model."""
    if not isinstance(base, Base):
        raise ValueError(
            f"the base must be a Base; got {type(base).__name__}. Use DiagonalNormal, NormalMixture or FullMixture, or "
            "derive a class from iresnet.base.Base. With a distribution of torch as the base, "
            "TransformedDistribution(base, [Bijector(transform, event_shape).inv]) is the density."
        )


class DiagonalNormal(Base):
    """A normal distribution with a mean and a scale per coordinate; the standard normal unless they are `learned`."""

    log_scale: Tensor

    def __init__(self, shape: Shape | int, *, learned: bool = False) -> None:
        super().__init__(shape)
        for name in ("mean", "log_scale"):
            value = torch.zeros(self.shape)
            if learned:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)

    def log_prob(self, z: Tensor) -> Tensor:
        return self._log_normal(z, self.mean, self.log_scale)

    def rsample(self, count: int, generator: torch.Generator | None = None, *, temperature: float = 1.0) -> Tensor:
        return self.mean + temperature * torch.exp(self.log_scale) * self._noise(count, generator)


class Mixture(Base):
    """A mixture of normals, with the weights softmax(`weight_logits`)."""

    weight_logits: Tensor
    reparametrised = False

    @abstractmethod
    def joint(self, z: Tensor) -> Tensor:
        """Return ln w_k p_k(z) for every component k, the last axis."""

    @abstractmethod
    def _draw(self, k: Tensor, noise: Tensor) -> Tensor:
        """Return a code of component k[i] for every row of standard normal noise."""

    def why_unknown(self) -> str:
        """Return whether there is not one weight per component, so that they do not sum to one."""
        if self.weight_logits.shape == self.mean.shape[:1]:
            return ""
        return (
            f"{type(self).__name__} must have one weight per component; got {self.weight_logits.numel()} for "
            f"{len(self.mean)}. Restore it from a checkpoint."
        )

    @property
    def components(self) -> int:
        """The number of components."""
        return len(self.weight_logits)

    def log_prob(self, z: Tensor) -> Tensor:
        return self.joint(z).logsumexp(-1)

    def rsample(
        self,
        count: int,
        generator: torch.Generator | None = None,
        *,
        temperature: float = 1.0,
        component: int | None = None,
    ) -> Tensor:
        """Draw codes of one component, or of components drawn by their weights."""
        if component is None:
            weights = self.weight_logits.detach().softmax(0)
            k = torch.multinomial(weights, count, replacement=True, generator=generator)
        else:
            k = torch.full((count,), component, device=self.mean.device)
        return self._draw(k, temperature * self._noise(count, generator))


class NormalMixture(Mixture):
    """A learned mixture of diagonal normals. Their initial means are drawn from torch's global generator.

    >>> NormalMixture((2, 2), components=3).log_prob(torch.zeros(5, 2, 2)).shape
    torch.Size([5])
    """

    def __init__(self, shape: Shape | int, components: int) -> None:
        super().__init__(shape)
        if components < 2:
            raise ValueError(f"components must be at least 2; got {components}. Use DiagonalNormal for one.")
        self.mean = nn.Parameter(0.1 * (2 * torch.rand(components, *self.shape) - 1))
        self.log_scale = nn.Parameter(torch.zeros(components, *self.shape))
        self.weight_logits = nn.Parameter(torch.zeros(components))

    def joint(self, z: Tensor) -> Tensor:
        z = z.unsqueeze(-len(self.shape) - 1)
        return self._log_normal(z, self.mean, self.log_scale) + self.weight_logits.log_softmax(0)

    def _draw(self, k: Tensor, noise: Tensor) -> Tensor:
        return self.mean[k] + torch.exp(self.log_scale[k]) * noise


class FullMixture(Mixture):
    """A mixture of normals with full covariances. `set_` gives it means and covariances, such as those found by EM.

    `factors[k]` holds a lower triangular matrix P_k with P_k' P_k = C_k^-1, the logarithms of its diagonal in place of
    the diagonal, so that C_k is a covariance for all parameters. They are fixed unless `learned`.

    >>> FullMixture(2, components=3).log_prob(torch.zeros(5, 2)).shape
    torch.Size([5])
    """

    factors: Tensor

    def __init__(self, shape: Shape | int, components: int = 1, *, learned: bool = True) -> None:
        super().__init__(shape)
        at_least(1, "Give the number of normals.", components=components)
        d = math.prod(self.shape)
        mean = torch.zeros(components, d) if components == 1 else torch.randn(components, d)
        for name, value in (
            ("mean", mean),
            ("factors", torch.zeros(components, d, d)),
            ("weight_logits", torch.zeros(components)),
        ):
            if learned:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)

    @torch.no_grad()
    def set_(self, weights: Tensor, means: Tensor, covariances: Tensor) -> FullMixture:
        """Set the weights (K), means (K, d) and covariances (K, d, d), and return self."""
        inverse = torch.linalg.inv(torch.linalg.cholesky(covariances.double()))
        self.factors.copy_(inverse.tril(-1) + torch.diag_embed(inverse.diagonal(dim1=1, dim2=2).log()))
        self.mean.copy_(means)
        self.weight_logits.copy_(weights.double().log())
        return self

    @property
    def precision_factors(self) -> Tensor:
        """The matrices P_k, shape (K, d, d)."""
        return self.factors.tril(-1) + torch.diag_embed(self._log_diagonal.exp())

    @property
    def _log_diagonal(self) -> Tensor:
        return self.factors.diagonal(dim1=1, dim2=2)

    def joint(self, z: Tensor) -> Tensor:
        z = z.flatten(-len(self.shape))
        u: Tensor = torch.einsum("kij,...kj->...ki", self.precision_factors, z.unsqueeze(-2) - self.mean)
        constant = self._log_diagonal.sum(-1) - 0.5 * z.shape[-1] * math.log(2 * math.pi)
        return constant - 0.5 * u.square().sum(-1) + self.weight_logits.log_softmax(0)

    def _draw(self, k: Tensor, noise: Tensor) -> Tensor:
        u = noise.flatten(1).unsqueeze(-1)
        z: Tensor = torch.linalg.solve_triangular(self.precision_factors[k], u, upper=False)
        return (self.mean[k] + z.squeeze(-1)).reshape(noise.shape)


class Posterior(nn.Module):
    """A head without its own weights: the logits are ln p(z, y) of a mixture with one component per class.

    The class probabilities follow from the density by Bayes' rule, p(y | z) = p(z, y) / p(z).
    """

    def __init__(self, base: Mixture) -> None:
        super().__init__()
        self.base = base

    def forward(self, z: Tensor) -> Tensor:
        return self.base.joint(z)
