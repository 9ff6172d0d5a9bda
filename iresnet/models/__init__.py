"""Networks: functions that return ordinary modules, contractive by construction, and models built from settings.

In reading order: `branches` (g, and a flow made of blocks), `network` (the settings of a network), `readout` (heads),
`unconstrained` (x + g(x) for any g: the paper's "vanilla" networks), `resnet` (the ResNet-164), `glow` (Glow, Real NVP,
NICE and i-RevNet, made of couplings), `families` (these and others from settings), `build` (the model for an objective
and samples of a given `Schema`: preprocessing, scales of residual blocks, and a base, a head, or both).
"""

from .branches import Activation, contractive_convnet, contractive_mlp, mlp_flow
from .build import build, training_estimator
from .families import ORIGINS
from .network import ACTIVATIONS, FAMILIES, INVERSES, PREPROCESSING, READOUTS, Network
from .readout import NormalisedReadout, Readout

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "FAMILIES",
    "INVERSES",
    "Network",
    "NormalisedReadout",
    "ORIGINS",
    "PREPROCESSING",
    "READOUTS",
    "Readout",
    "build",
    "training_estimator",
    "contractive_convnet",
    "contractive_mlp",
    "mlp_flow",
]
