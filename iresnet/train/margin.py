"""How far a perturbation can move the logits of a network: what the margin loss and certified radii are made of.

With logits w_j . z + b_j of the code z = F(x), moving x by r moves the logit of class j relative to that of class y by
at most r Lip(F) ||w_y - w_j|| (Tsuzuku, Sato and Sugiyama, 2018).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .. import lipschitz as lip
from ..branch import requested_bound
from ..models import Readout
from ..multiscale import Multiscale
from ..residual import ResidualBlock
from ..transform import Transform
from ..transforms.elementary import ActNorm
from ..transforms.preprocess import Standardise
from ..trust import NoBoundKnown, why_untrusted


def class_vectors(head: nn.Module) -> Tensor:
    """Return one vector v_j per class (a matrix row), as far apart as the w_j of a head with logits w_j . z + b_j.

    Average pooling over P positions has norm 1 / sqrt(P), so its columns are scaled by that. Raises `NoBoundKnown`,
    with the reason, for a head that is not linear.

    >>> class_vectors(nn.Sequential(nn.Flatten(), nn.Linear(4, 3))).shape
    torch.Size([3, 4])
    """
    if isinstance(head, Readout) and (reason := why_untrusted(head)):
        raise NoBoundKnown(f"A margin needs a linear head; {reason}")
    layers = head.layers if isinstance(head, Readout) else head
    v: Tensor | None = None
    for name, layer in lip.leaves(layers):
        where = f"{type(layer).__name__} ({name})" if name else type(layer).__name__
        if isinstance(layer, nn.Linear) and not why_untrusted(layer):
            v = _pooled(layer.weight, head) if v is None else layer.weight @ v
        elif not isinstance(layer, nn.Flatten | nn.Identity) or lip.lipschitz_constant(layer) is None:
            raise NoBoundKnown(f"A margin needs a linear head; this one has {where}. {why_untrusted(layer)}".rstrip())
    if v is None:
        raise NoBoundKnown(f"A margin needs a linear head; {type(head).__name__} has no linear layer.")
    return v


def _pooled(weight: Tensor, head: nn.Module) -> Tensor:
    """Return the weight of the head's first layer, its columns scaled if the head pools over positions."""
    if not (isinstance(head, Readout) and head.pool):
        return weight
    return weight * torch.cat([weight.new_full((s[0],), math.prod(s[1:]) ** -0.5) for s in head.shapes])


def pairwise_distances(v: Tensor) -> Tensor:
    """Return ||v_i - v_j|| for all rows i and j, without materialising all differences."""
    others = 1 - torch.eye(len(v), dtype=v.dtype, device=v.device)
    with torch.autocast(v.device.type, enabled=False):  # half precision cancels a difference of squares
        squares = v.square().sum(dim=1)
        return (squares[:, None] + squares - 2 * v @ v.T).clamp_min(torch.finfo(v.dtype).tiny).sqrt() * others


def requested_lipschitz(transform: Transform) -> Tensor | float:
    """Return Lip(F) for the requested coefficients: cheap, differentiable in the scales, no GPU synchronisation."""
    if isinstance(transform, ResidualBlock):
        return requested_bound(transform.g).block_lipschitz if transform.asserted is None else 1 + transform.asserted
    if isinstance(transform, ActNorm):
        return transform.log_scale.max().exp()
    if isinstance(transform, Standardise):
        return 1 / transform.std.min()
    parts = transform.parts()
    if not parts:
        own = transform.stretch().forward
        if math.isinf(own):
            raise NoBoundKnown(f"No Lipschitz constant is known for {type(transform).__name__}.")
        return own
    total: Tensor | float = 1.0
    for position, (_, part, _) in enumerate(parts):
        factor = requested_lipschitz(part)
        # Channels that leave at an earlier scale are not contracted by later scales.
        if position and isinstance(transform, Multiscale):
            factor = torch.as_tensor(factor).clamp_min(1.0)
        total = total * factor
    return total
