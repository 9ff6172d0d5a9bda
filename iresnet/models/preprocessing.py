"""What comes before a network, fitted to data before training and fixed then: preprocessing, and a table's splines."""

from __future__ import annotations

import torch
from torch import Tensor

from ..chain import Chain
from ..data import Schema
from ..data.units import bin_centres
from ..transform import Transform
from ..transforms.columns import ColumnTransform
from ..transforms.preprocess import Logit, Standardise
from .mixture import column_splines, random_samples
from .network import Network

#: The number of images that the standardisation is fitted on.
FIT_IMAGES = 10_000


def fixed_transform(
    network: Network, schema: Schema, purpose: str, data: Tensor | None, validation: Tensor | None
) -> Transform:
    """Build what comes before the network and is fixed before training: preprocessing, and the splines of a table."""
    first = preprocessing(network, schema, purpose, data)
    if network.spline_bins and not schema.is_image:
        return Chain(first, column_splines(network, schema, first, data, validation))
    return first


def preprocessing(network: Network, schema: Schema, purpose: str, data: Tensor | None) -> Transform:
    """Build what brings samples to the scale of a network, fitted to data if there are some."""
    if schema.kinds and purpose != "classification":  # the kinds of columns are about densities and samples
        return _column_transform(schema, data)
    if schema.levels is not None and network.preprocessing == "logit":
        return Logit(schema.levels, network.alpha)
    if schema.levels is not None and network.preprocessing == "centre":  # x / levels - 1/2
        return Standardise([schema.levels / 2] * schema.shape[0], [float(schema.levels)] * schema.shape[0])
    if data is None:
        return Standardise(torch.zeros(schema.shape[0]), torch.ones(schema.shape[0]))
    data = random_samples(data, FIT_IMAGES) if schema.is_image else data
    # Dequantisation moves the mean by half a level; it adds 1/12 to the variance, which is left to ActNorm.
    return Standardise.fit(bin_centres(data, schema.levels).float())


def _column_transform(schema: Schema, data: Tensor | None) -> ColumnTransform:
    lower, upper, margin = zip(*(kind.interval for kind in schema.kinds), strict=True)
    made = ColumnTransform(lower, upper, margin, [kind.step for kind in schema.kinds])
    return made if data is None else made.to(data.device).fit(data)


def context_scale(columns: int, data: Tensor | None) -> Standardise:
    """Standardise the given columns; one that is constant keeps its scale."""
    if data is None:
        return Standardise(torch.zeros(columns), torch.ones(columns))
    std, mean = torch.std_mean(data.double(), dim=0, correction=0)
    varies = std > torch.finfo(data.dtype).eps * data.double().abs().amax(dim=0)
    return Standardise(mean.to(data.dtype), torch.where(varies, std, 1.0).to(data.dtype))


def with_noise(schema: Schema, data: Tensor) -> Tensor:
    """Add noise to the discrete columns of a table, so that everything is fitted to what the density sees of them."""
    columns = zip(schema.kinds, schema.modelled, strict=True) if schema.kinds else ()
    step = torch.tensor([kind.step or 0.0 if modelled else 0.0 for kind, modelled in columns])
    if not step.any():
        return data
    u = torch.rand(data.shape, generator=torch.Generator().manual_seed(0))
    return data + ((u - 0.5) * step).to(data)
