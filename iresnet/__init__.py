"""Invertible residual networks with a guarantee.

The order of the files is the order of the paper: `spectral`, `fixed_point`, `logdet`, `lipschitz`, `transform`,
`residual`, `inverse`, `chain`, `certificate`, `model`, `flow`, `classifier`, `hybrid`; docs/explanation/design.md lists
all.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from . import early, fixed_point, lipschitz, logdet, spectral  # noqa: F401 (early comes first)
from .base import DiagonalNormal, FullMixture, NormalMixture, Posterior
from .bijector import Bijector
from .certificate import Certificate, certify, tighten_
from .chain import Chain
from .classifier import Classifier
from .fixed_point import Anderson, Banach, ChainSolution, ConvergenceError, Newton, Solution
from .flow import Flow, LogProb
from .hybrid import Hybrid
from .lipschitz import (
    Conditioned,
    GramIteration,
    LipschitzConv2d,
    LipschitzLinear,
    LipSwish,
    MaxMin,
    PowerIteration,
    Sine,
    constrain_,
)
from .logdet import (
    AdaptiveRoulette,
    CertifiedSeries,
    Exact,
    PowerSeries,
    RussianRoulette,
    terms_needed,
    truncation_bound,
)
from .models import contractive_convnet, contractive_mlp, mlp_flow
from .multiscale import Multiscale
from .residual import ResidualBlock
from .spectral import NoBoundKnown
from .transform import Transform
from .transforms.elementary import ActNorm, Flatten, InjectivePad, Squeeze
from .transforms.mixing import InvertibleConv1x1
from .transforms.preprocess import Logit, Standardise, dequantise
from .version import __version__

if TYPE_CHECKING:
    from .run import load, shipped

__all__ = [
    "ActNorm",
    "AdaptiveRoulette",
    "Anderson",
    "Banach",
    "Bijector",
    "Certificate",
    "CertifiedSeries",
    "Chain",
    "ChainSolution",
    "Classifier",
    "Conditioned",
    "ConvergenceError",
    "DiagonalNormal",
    "Exact",
    "Flatten",
    "Flow",
    "FullMixture",
    "GramIteration",
    "Hybrid",
    "InjectivePad",
    "InvertibleConv1x1",
    "LipSwish",
    "LipschitzConv2d",
    "LipschitzLinear",
    "LogProb",
    "Logit",
    "MaxMin",
    "Multiscale",
    "Newton",
    "NoBoundKnown",
    "NormalMixture",
    "Posterior",
    "PowerIteration",
    "PowerSeries",
    "ResidualBlock",
    "RussianRoulette",
    "Sine",
    "Solution",
    "Squeeze",
    "Standardise",
    "Transform",
    "__version__",
    "certify",
    "constrain_",
    "contractive_convnet",
    "contractive_mlp",
    "dequantise",
    "fixed_point",
    "lipschitz",
    "load",
    "logdet",
    "mlp_flow",
    "shipped",
    "spectral",
    "terms_needed",
    "tighten_",
    "truncation_bound",
]


def __getattr__(name: str) -> Any:
    """Import lazily: `load`, `shipped` and the subpackages for training, data and evaluation."""
    if name in ("load", "shipped"):
        return getattr(import_module(".run", __name__), name)
    if name.startswith("_") or find_spec(f".{name}", __name__) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return __all__
