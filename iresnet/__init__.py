"""Invertible residual networks with a guarantee.

The order of the files is the order of the paper: `spectral`, `fixed_point`, `logdet`, `lipschitz`, `transform`,
`residual`, `certificate`, `flow`, `classifier`, `hybrid`; docs/design.md lists all.
"""

from . import early, fixed_point, lipschitz, logdet, spectral  # noqa: F401 (early comes first)
from .architectures import contractive_convnet, contractive_mlp, mlp_flow
from .base import DiagonalNormal, NormalMixture, Posterior
from .certificate import Certificate, certify, tighten_
from .classifier import Classifier
from .elementary import ActNorm, InjectivePad, Squeeze
from .fixed_point import Anderson, Banach, ConvergenceError, Solution
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
from .logdet import CertifiedSeries, Exact, PowerSeries, RussianRoulette, terms_needed, truncation_bound
from .mixing import InvertibleConv1x1
from .multiscale import Flatten, Multiscale
from .preprocess import Logit, Standardise, dequantise
from .residual import ResidualBlock
from .run import load, shipped
from .spectral import NoBoundKnown
from .transform import Chain, ChainSolution, Transform
from .version import __version__

__all__ = [
    "ActNorm",
    "Anderson",
    "Banach",
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
