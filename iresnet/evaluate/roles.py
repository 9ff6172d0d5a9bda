"""What a model can be evaluated as: a density, a classifier, an invertible map."""

from __future__ import annotations

from ..chain import Chain
from ..classifier import Classifier
from ..flow import Flow
from ..hybrid import Hybrid
from ..model import Model
from ..transform import Transform
from ..transforms.columns import ColumnTransform
from ..transforms.preprocess import Logit, Standardise


def has_density(model: Model) -> bool:
    """Whether the model is a density."""
    return isinstance(model, Flow | Hybrid)


def as_flow(model: Model, wish: str = "a likelihood") -> Flow:
    """Return the flow of a model; raise a `ValueError` if it has none."""
    if isinstance(model, Hybrid):
        return model.flow
    if isinstance(model, Flow):
        return model
    raise ValueError(
        f"{wish} needs a density; this model only classifies. Train with objective.kind=hybrid or density."
    )


def has_head(model: Model) -> bool:
    """Whether the model is a classifier."""
    return isinstance(model, Classifier | Hybrid)


def as_classifier(model: Model, wish: str = "classes need a head") -> Classifier:
    """Return the classifier of a model; raise a `ValueError` if it has none."""
    if isinstance(model, Hybrid):
        return model.classifier
    if isinstance(model, Classifier):
        return model
    raise ValueError(f"{wish}; this model only has a density. Train with objective.kind=hybrid.")


def has_inverse(model: Model) -> bool:
    """Whether codes alone can be inverted: there are invertible blocks, and they take no context.

    The code of an ordinary ResNet is only its scaled input.
    """
    parts = [part for part in model.transform.modules() if isinstance(part, Transform)]
    return (
        any(not isinstance(part, Chain | ColumnTransform | Logit | Standardise) for part in parts)
        and not model.transform.takes_context
    )
