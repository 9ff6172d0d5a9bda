"""Which networks suit which purpose: the kind of objective, "density", "classification" or one of the hybrids."""

from __future__ import annotations

from ..data import Schema
from ..spelling import listed
from . import families
from .network import Network
from .resnet import RESNETS

#: The most columns of a base with full covariances.
FULL_COLUMNS = 1_000


def check_purpose(network: Network, schema: Schema, purpose: str) -> None:
    """Refuse a network that cannot be built for this purpose and these samples."""
    if schema.targets and (purpose != "density" or families.is_other_flow(network)):
        what = purpose if purpose != "density" else f"the family {network.family}"
        raise ValueError(
            f"a conditional density, of {listed(schema.targets)} given the other columns, needs the objective "
            f'"density" and family = "iresnet"; got {what}.'
        )
    if families.is_other_flow(network):
        families.check_family(network, schema, purpose)
    if purpose != "density" and len(schema.classes) < 2:
        raise ValueError(
            f"{purpose} needs at least two classes; got {len(schema.classes)}. "
            f"{_where_classes_are(schema)}, or use the objective 'density'."
        )
    if network.family in RESNETS and not (schema.is_image and purpose == "classification"):
        what = purpose if schema.is_image else "a table"
        raise ValueError(
            f'the family {network.family} classifies images and has no inverse; got {what}. Use family = "iresnet".'
        )
    if network.dequantiser and not (schema.is_image and schema.levels is not None and purpose == "density"):
        what = purpose if schema.is_image and schema.levels is not None else "data that are not images of integers"
        raise ValueError(
            "dequantiser must be 0 except for densities of images of integers; "
            f"got {network.dequantiser} for {what}. Set it to 0."
        )
    if purpose == "classification":
        return
    if network.covariance == "full" and schema.is_image:
        raise ValueError('covariance = "full" is for tables; got images. Use covariance = "diagonal".')
    if network.covariance == "full" and schema.dimension > FULL_COLUMNS:
        raise ValueError(
            f'covariance = "full" is for at most {FULL_COLUMNS:,} columns; got {schema.dimension:,}. '
            'Use covariance = "diagonal" with components = 1 (--set covariance=diagonal --set components=1), or fewer '
            "columns."
        )
    if network.padding:
        raise ValueError(
            f"padding must be 0 for a density, which is unbounded on constant channels; got {network.padding}."
        )
    if not network.constrained:
        raise ValueError(
            f"constrained must be true for a density, whose determinant needs a contraction; got false for {purpose}. "
            "Use the objective 'classification'."
        )


def _where_classes_are(schema: Schema) -> str:
    if schema.is_image:
        return "Put the images of every class in a sub-folder of their own"
    return "Name the label column (--label COLUMN, the setting data.label)"
