"""Builds a model from settings, for samples of a given schema."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from torch import Tensor

from ..base import Base, DiagonalNormal, NormalMixture, Posterior
from ..batch import Shape
from ..chain import Chain
from ..classifier import Classifier
from ..data import Schema
from ..flow import Flow
from ..hybrid import Hybrid
from ..logdet import Estimator, Exact, PowerSeries, RussianRoulette
from ..multiscale import Multiscale
from ..residual import ResidualBlock
from ..transform import Transform
from ..transforms.dequantisation import LearnedNoise
from ..transforms.elementary import ActNorm, Flatten, InjectivePad, Squeeze
from ..transforms.given import Given
from ..transforms.mixing import InvertibleConv1x1, PrincipalAxes
from . import families
from .block import block
from .branches import conditioned
from .mixture import full_mixture
from .network import Network
from .preprocessing import context_scale, fixed_transform, with_noise
from .purpose import check_purpose
from .readout import head as make_head
from .resnet import RESNET_WIDTH, RESNETS

#: The dimension up to which the exact determinant costs no more than a series.
EXACT_DIMENSIONS = 8


def build(
    network: Network, schema: Schema, purpose: str, data: Tensor | None = None, validation: Tensor | None = None
) -> Flow | Classifier | Hybrid:
    """Build a model for samples of this schema: a Flow for "density", a Classifier for "classification", else a Hybrid.

    `data`, a batch of samples, is used to fit the standardisation and a base with full covariances, whose number of
    components is chosen on the `validation` samples if the settings leave it open. A model whose weights are loaded
    from a file needs neither.
    """
    check_purpose(network, schema, purpose)
    if schema.is_image:
        network.check_size(*schema.shape[1:])
    if purpose != "classification":
        data, validation = (None if x is None else with_noise(schema, x) for x in (data, validation))
    if schema.targets:
        return _conditional_flow(network, schema, data, validation)
    first = fixed_transform(network, schema, purpose, data, validation)
    if network.family in RESNETS:
        width = network.width or RESNET_WIDTH
        return Classifier(first, RESNETS[network.family](schema.shape[0], len(schema.classes), network.blocks, width))
    make = families.build_transform if families.is_other_flow(network) else _residual_transform
    transform = make(network, schema, first, _ends_with_actnorm(network, purpose))
    shape, samples = transform.output_shape(schema.shape), (data, validation)
    if purpose == "density":
        base = _base(network, shape, transform, *samples)
        estimator, noise = training_estimator(network, schema), _learned_noise(network, schema)
        return Flow(transform, base, estimator=estimator, event_shape=schema.shape, dequantiser=noise)
    head = make_head(network, _scale_shapes(transform, schema.shape), len(schema.classes))
    if purpose == "classification":
        return Classifier(transform, head)
    base = NormalMixture(shape, len(schema.classes)) if network.bayes else _base(network, shape, transform, *samples)
    head = Posterior(base) if isinstance(base, NormalMixture) and network.bayes else head
    return Hybrid(transform, base, head, estimator=training_estimator(network, schema), event_shape=schema.shape)


def _conditional_flow(network: Network, schema: Schema, data: Tensor | None, validation: Tensor | None) -> Flow:
    """Build the density of the target columns of a row, given the other columns, as a flow of whole rows."""
    targets = [schema.columns.index(name) for name in schema.targets]
    others = [i for i in range(schema.dimension) if i not in targets]
    inner = schema.select(schema.targets)
    first = fixed_transform(
        network, inner, "density", *(None if x is None else x[:, targets] for x in (data, validation))
    )
    counts = [len(schema.kinds[i].categories) if schema.columns[i] in schema.one_hot else 0 for i in others]
    inputs = sum(n or 1 for n in counts)
    chain = cast(Chain, _residual_transform(network, inner, first, True))
    parts = [
        ResidualBlock(conditioned(t.g, inner.dimension, inputs)) if isinstance(t, ResidualBlock) else t for t in chain
    ]
    scale = context_scale(len(others), None if data is None else data[:, others])
    transform = Given(Chain(*parts), scale, targets, counts)
    base = _base(network, transform.output_shape(schema.shape), transform, data, validation)
    return Flow(transform, base, estimator=training_estimator(network, inner), event_shape=schema.shape)


def _learned_noise(network: Network, schema: Schema) -> LearnedNoise | None:
    if not network.dequantiser or schema.levels is None:
        return None
    return LearnedNoise(schema.shape, schema.levels, network.dequantiser)


def _ends_with_actnorm(network: Network, purpose: str) -> bool:
    """Whether the transform ends with an ActNorm; not if a head follows that begins with BatchNorm."""
    return not (purpose == "classification" and network.readout == "batchnorm")


def _residual_transform(network: Network, schema: Schema, first: Transform, normalised: bool) -> Transform:
    """Chain preprocessing, scales of [squeeze, mixing,] and blocks of [ActNorm and] x + g(x), last ActNorm and tail."""
    shape, stages = schema.shape, list[list[Transform]]()
    for scale, blocks in enumerate(network.blocks):
        stage = _scale_entry(network, schema, scale, first)
        for t in stage:
            shape = t.output_shape(shape)
        mixing = PrincipalAxes if network.principal else InvertibleConv1x1
        stage += [mixing(shape[0])] if network.mixing else []
        for _ in range(blocks):
            stage += [*_norm(network, shape), block(network, shape, scale)]
        stages.append(stage)
        if network.factor_out and scale < len(network.blocks) - 1:
            shape = _halved(shape)
    return _assemble(network, stages, shape, schema, normalised)


def _halved(shape: Shape) -> Shape:
    if shape[0] % 2:
        raise ValueError(
            f"factor_out needs an even number of channels in every scale but the last; got {shape[0]} at "
            f"{' x '.join(map(str, shape[1:]))}. Use squeeze_first = true, or factor_out = false."
        )
    return (shape[0] // 2, *shape[1:])


def _assemble(
    network: Network, stages: list[list[Transform]], shape: Shape, schema: Schema, normalised: bool
) -> Transform:
    """Join the stages, and add the last ActNorm and the tail; `shape` is the output shape of the last stage."""
    stages[-1] += _norm(network, shape) if normalised else []
    if not (network.factor_out and len(stages) > 1):
        return Chain(*(t for stage in stages for t in stage), *_tail_blocks(network, shape))
    split = Multiscale([Chain(*stage) for stage in stages], schema.shape)
    tail = _tail_blocks(network, split.output_shape(schema.shape))
    return Chain(split, *tail) if tail else split


def _tail_blocks(network: Network, shape: Shape) -> list[Transform]:
    """Build fully connected blocks on a flattened code of this shape.

    They have no ActNorms, which would scale every number of the code by its spread in the first batch. A pixel that is
    blank there has none, and the first image in which it is not blank would get a likelihood near zero.
    """
    if not network.tail:
        return []
    steps: list[Transform] = [Flatten(shape)] if len(shape) > 1 else []
    # A dense branch ends with a layer from all its channels: on a whole code, a matrix as large as the code squared.
    branch = "chain" if network.branch == "dense" else network.branch
    flat, wide = (math.prod(shape),), replace(network, width=network.tail_width, branch=branch)
    return [*steps, *(block(wide, flat, 0) for _ in range(network.tail))]


def _scale_entry(network: Network, schema: Schema, scale: int, first: Transform) -> list[Transform]:
    """Build what comes before the blocks of a scale."""
    if scale and not schema.is_image:
        raise ValueError(f"blocks must have one entry for a table, which has one scale; got {list(network.blocks)}.")
    stage: list[Transform] = [] if scale else [first]
    if scale == 0 and network.padding:
        stage.append(InjectivePad(network.padding))
    if schema.is_image and (scale or network.squeeze_first):
        stage.append(Squeeze())
    return stage


def _norm(network: Network, shape: Shape) -> list[Transform]:
    return [ActNorm(shape[0])] if network.normalisation == "actnorm" else []


def _base(network: Network, shape: Shape, transform: Transform, data: Tensor | None, validation: Tensor | None) -> Base:
    if network.covariance == "full":
        return full_mixture(network, shape, transform, data, validation)
    if network.components > 1:
        return NormalMixture(shape, network.components)
    return DiagonalNormal(shape, learned=network.learned_base)


def training_estimator(network: Network, schema: Schema) -> Estimator | None:
    """Return the estimator of log-determinants in training; None for a family that computes its own."""
    if families.is_other_flow(network):
        return None
    if network.estimator == "exact" or (network.estimator == "auto" and math.prod(schema.shape) <= EXACT_DIMENSIONS):
        return Exact()
    if network.estimator == "roulette":
        return RussianRoulette(terms=network.terms, probe=network.probe)
    return PowerSeries(terms=network.terms, probe=network.probe)


def _scale_shapes(transform: Transform, shape: Shape) -> Sequence[Shape]:
    return transform.code_shapes if isinstance(transform, Multiscale) else [transform.output_shape(shape)]
