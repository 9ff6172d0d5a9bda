"""Named networks: functions that return ordinary modules, contractive by construction.

`Network` is a network as settings, and `build` makes the model that an objective needs from it, for rows of a given
`Schema`: preprocessing, scales of residual blocks, and a base, a head, or both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from .base import Base, DiagonalNormal, NormalMixture, Posterior
from .classifier import Classifier
from .data import Schema
from .elementary import ActNorm, InjectivePad, Squeeze
from .flow import Flow
from .hybrid import Hybrid
from .lipschitz import Conditioned, LipSwish, MaxMin, NormRule, Sine, check_contractive, constrain_
from .logdet import Estimator, Exact, PowerSeries, RussianRoulette
from .multiscale import Multiscale
from .preprocess import Logit, Standardise
from .residual import ResidualBlock
from .transform import Chain, Shape, Transform

Activation = Callable[[], nn.Module]

ACTIVATIONS = ("elu", "lipswish", "maxmin", "sine")
ESTIMATORS = ("auto", "series", "roulette", "exact")

#: Images that the scaling is fitted on; up to this dimension the exact determinant costs no more than a series.
FITTED, FEW = 10_000, 8
PREPROCESSING = ("logit", "standardise")


def _constrain(
    g: nn.Sequential, coefficient: float | None, lipschitz: float | None, norm: NormRule | None
) -> nn.Sequential:
    if coefficient is None and lipschitz is None:
        lipschitz = 0.9
    constrain_(g, coefficient, lipschitz=lipschitz, norm=norm)
    return g


def contractive_mlp(
    dimension: int,
    hidden: Sequence[int] = (64, 64),
    *,
    coefficient: float | None = None,
    lipschitz: float | None = None,
    activation: Activation = nn.ELU,
    context: int | None = None,
    norm: NormRule | None = None,
) -> nn.Module:
    """A contraction of R^dimension: linear layers with activations between them.

    Give `coefficient` per layer or `lipschitz` for the whole (default 0.9). With `context`, a network of that many
    numbers shifts the first hidden layer, freely: the map stays a contraction in x for every context.

    >>> contractive_mlp(2, hidden=(8,))(__import__("torch").zeros(5, 2)).shape
    torch.Size([5, 2])
    """
    if dimension < 1 or any(h < 1 for h in hidden) or not hidden:
        raise ValueError(f"dimension and hidden widths must be positive; got {dimension} and {tuple(hidden)}.")
    check_contractive(activation())
    widths = [dimension, *hidden, dimension]
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        layers += [nn.Linear(a, b)] if i == 0 else [activation(), nn.Linear(a, b)]
    g = _constrain(nn.Sequential(*layers), coefficient, lipschitz, norm)
    if context is None:
        return g
    embed = nn.Sequential(nn.Linear(context, 64), nn.SiLU(), nn.Linear(64, hidden[0]))
    return Conditioned(g[:1], embed, g[1:])


def contractive_convnet(
    channels: int,
    hidden: int = 64,
    *,
    kernels: Sequence[int] = (3, 1, 3),
    coefficient: float | None = None,
    lipschitz: float | None = None,
    activation: Activation = nn.ELU,
    preactivation: bool = False,
    norm: NormRule | None = None,
) -> nn.Sequential:
    """The paper's convolutional branch (3x3, 1x1, 3x3 by default), keeping channels and size; contractive as above.

    `preactivation` puts an activation before the first layer as well, as the paper's classifiers do.
    """
    if channels < 1 or hidden < 1:
        raise ValueError(f"channels and hidden must be positive; got {channels} and {hidden}.")
    if not kernels or any(k < 1 or k % 2 == 0 for k in kernels):
        raise ValueError(f"kernels must be odd, so that the size is kept; got {tuple(kernels)}.")
    check_contractive(activation())
    widths = [channels, *[hidden] * (len(kernels) - 1), channels]
    layers: list[nn.Module] = [activation()] if preactivation else []
    for i, (a, b, k) in enumerate(zip(widths, widths[1:], kernels, strict=False)):
        layers += [activation()] if i else []
        layers.append(nn.Conv2d(a, b, k, padding=k // 2))
    return _constrain(nn.Sequential(*layers), coefficient, lipschitz, norm)


def mlp_flow(
    dimension: int,
    blocks: int = 16,
    hidden: Sequence[int] = (64, 64, 64),
    *,
    coefficient: float | None = None,
    lipschitz: float | None = None,
    activation: Activation = nn.ELU,
    context: int | None = None,
    norm: NormRule | None = None,
    estimator: Estimator | None = None,
) -> Flow:
    """A density on R^dimension: residual blocks of `contractive_mlp`, an ActNorm first and after each (App. C.3)."""
    if blocks < 1:
        raise ValueError(f"blocks must be at least 1; got {blocks}.")
    chain: list[Transform] = [ActNorm(dimension)]
    for _ in range(blocks):
        g = contractive_mlp(
            dimension,
            hidden,
            coefficient=coefficient,
            lipschitz=lipschitz,
            activation=activation,
            context=context,
            norm=norm,
        )
        chain += [ResidualBlock(g), ActNorm(dimension)]
    return Flow(Chain(*chain), DiagonalNormal(dimension), estimator=estimator, event_shape=(dimension,))


@dataclass(frozen=True)
class Network:
    """A network as settings.

    `blocks` counts residual blocks, one entry a scale: an image is squeezed before each scale, a table has one. g has
    `kernels` convolutions (images) or `depth` hidden layers (tables) of `width` channels or units, and Lip(g) stays
    below `lipschitz`. `factor_out` sends half of the channels straight to the code after each scale. The base is a
    mixture of so many `components`. With `bayes` a hybrid's base has one component a class, whose posterior classifies;
    otherwise `head` lists the hidden widths of its head, none for a linear one, and `pool` averages the code over
    positions before it. `estimator` and `terms` make the log-determinant in training.
    """

    blocks: tuple[int, ...] = (4, 4)
    width: int = 64
    kernels: tuple[int, ...] = (3, 1, 3)
    depth: int = 2
    lipschitz: float = 0.9
    activation: str = "elu"
    frequency: float = 2.0
    preprocessing: str = "logit"
    alpha: float = 0.05
    padding: int = 0
    factor_out: bool = False
    components: int = 1
    learned_base: bool = True
    bayes: bool = False
    head: tuple[int, ...] = ()
    dropout: float = 0.0
    pool: bool = False
    estimator: str = "auto"
    terms: int = 6

    def __post_init__(self) -> None:
        if not self.blocks or any(b < 1 for b in self.blocks):
            raise ValueError(f"blocks must list at least one block for every scale; got {list(self.blocks)}.")
        for name in ("width", "depth", "terms", "components"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
        if not 0 < self.lipschitz < 1:
            raise ValueError(f"lipschitz must lie in (0, 1); got {self.lipschitz}. A block with 1 has no inverse.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1); got {self.dropout}.")
        if self.padding < 0:
            raise ValueError(f"padding must not be negative; got {self.padding}.")
        if any(h < 1 for h in self.head):
            raise ValueError(f"head must list widths of at least 1; got {list(self.head)}.")
        for name, known in (
            ("activation", ACTIVATIONS), ("estimator", ESTIMATORS), ("preprocessing", PREPROCESSING)
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}.")


def build(network: Network, schema: Schema, purpose: str, data: Tensor | None = None) -> Flow | Classifier | Hybrid:
    """A model for rows of this schema: a Flow for "density", a Classifier for "classification", else a Hybrid.

    `data` (rows as the schema has them) fits the scaling where there is one; a model that is about to be loaded
    from a file needs none.
    """
    if purpose != "density" and len(schema.classes) < 2:
        raise ValueError(
            f"{purpose} needs at least two classes; these data have {len(schema.classes)}. "
            "Name the label column (data.label), or use the objective 'density'."
        )
    if network.padding and purpose != "classification":
        raise ValueError(
            f"padding must be 0 for a density, which constant channels make unbounded; got {network.padding}."
        )
    transform = _scales(network, schema, _preprocessing(network, schema, data))
    base = _base(network, transform.output_shape(schema.shape))
    if purpose == "density":
        return Flow(transform, base, estimator=_estimator(network, schema), event_shape=schema.shape)
    head: nn.Module = Readout(_code_shapes(transform, schema.shape), len(schema.classes), network)
    if purpose == "classification":
        return Classifier(transform, head)
    if network.bayes:
        base = NormalMixture(transform.output_shape(schema.shape), len(schema.classes))
        head = Posterior(base)
    return Hybrid(transform, base, head, estimator=_estimator(network, schema), event_shape=schema.shape)


class Readout(nn.Module):
    """A head: the code of every scale, averaged over positions if asked, side by side, then linear layers with ELU."""

    def __init__(self, shapes: Sequence[Shape], classes: int, network: Network) -> None:
        super().__init__()
        self.shapes, self.pool = [tuple(s) for s in shapes], network.pool
        widths = [sum(s[0] if self.pool else math.prod(s) for s in self.shapes), *network.head, classes]
        layers: list[nn.Module] = [nn.Linear(widths[0], widths[1])]
        for a, b in pairwise(widths[1:]):
            layers += [nn.ELU(), nn.Dropout(network.dropout), nn.Linear(a, b)]
        self.layers = nn.Sequential(*layers)

    def forward(self, z: Tensor) -> Tensor:
        flat = z.flatten(1)
        if self.pool:
            parts = torch.split(flat, [math.prod(s) for s in self.shapes], dim=1)
            flat = torch.cat(
                [p.reshape(len(p), s[0], -1).mean(dim=2) for p, s in zip(parts, self.shapes, strict=True)], 1
            )
        logits: Tensor = self.layers(flat)
        return logits


def _preprocessing(network: Network, schema: Schema, data: Tensor | None) -> Transform:
    if schema.levels is not None and network.preprocessing == "logit":
        return Logit(schema.levels, network.alpha)
    if data is None:
        return Standardise(torch.zeros(schema.shape[0]), torch.ones(schema.shape[0]))
    if len(data) > FITTED and schema.is_image:  # any rows will do, but not the first: they may be of one class
        data = data[torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:FITTED].to(data.device)]
    # Dequantisation moves the mean by half a level; it adds 1/12 to the variance, which is left to ActNorm.
    return Standardise.fit(data.float() + (0.0 if schema.levels is None else 0.5))


def _scales(network: Network, schema: Schema, first: Transform) -> Transform:
    """Preprocessing, then for every scale [squeeze,] blocks of ActNorm and x + g(x), and a last ActNorm."""
    shape, stages = schema.shape, []
    for scale, blocks in enumerate(network.blocks):
        stage: list[Transform] = [first] if scale == 0 else []
        if scale == 0 and network.padding:
            stage.append(InjectivePad(network.padding))
        if schema.is_image:
            stage.append(Squeeze())
        elif scale:
            raise ValueError(f"blocks has one entry for a table, which has one scale; got {list(network.blocks)}.")
        for t in stage:
            shape = _next_shape(t, shape, schema)
        for _ in range(blocks):
            stage += [ActNorm(shape[0]), ResidualBlock(_branch(network, shape))]
        last = scale == len(network.blocks) - 1
        stages.append([*stage, ActNorm(shape[0])] if last else stage)
        if network.factor_out and not last:
            shape = (shape[0] // 2, *shape[1:])
    if network.factor_out and len(stages) > 1:
        return Multiscale([Chain(*stage) for stage in stages], schema.shape)
    return Chain(*(t for stage in stages for t in stage))


def _next_shape(t: Transform, shape: Shape, schema: Schema) -> Shape:
    if isinstance(t, Squeeze) and any(n % 2 for n in shape[1:]):
        raise ValueError(
            f"every entry of blocks halves the image; {schema.shape[1]} x {schema.shape[2]} comes to "
            f"{shape[1]} x {shape[2]}, which cannot be halved. Give blocks fewer entries."
        )
    return t.output_shape(shape)


def _branch(network: Network, shape: Shape) -> nn.Module:
    kinds: dict[str, Activation] = {
        "elu": nn.ELU, "lipswish": LipSwish, "maxmin": MaxMin, "sine": lambda: Sine(network.frequency)
    }  # fmt: skip
    activation, lipschitz = kinds[network.activation], network.lipschitz
    if len(shape) == 1:
        return contractive_mlp(shape[0], (network.width,) * network.depth, lipschitz=lipschitz, activation=activation)
    return contractive_convnet(
        shape[0], network.width, kernels=network.kernels, lipschitz=lipschitz, activation=activation
    )


def _base(network: Network, shape: Shape) -> Base:
    if network.components > 1:
        return NormalMixture(shape, network.components)
    return DiagonalNormal(shape, learned=network.learned_base)


def _estimator(network: Network, schema: Schema) -> Estimator | None:
    if network.estimator == "exact" or (network.estimator == "auto" and math.prod(schema.shape) <= FEW):
        return Exact()
    if network.estimator == "roulette":
        return RussianRoulette(terms=network.terms)
    return PowerSeries(terms=network.terms)


def _code_shapes(transform: Transform, shape: Shape) -> Sequence[Shape]:
    return transform.code_shapes if isinstance(transform, Multiscale) else [transform.output_shape(shape)]
