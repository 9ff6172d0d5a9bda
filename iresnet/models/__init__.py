"""Named networks: functions that return ordinary modules, contractive by construction, and networks as settings.

In reading order: `branches` (g, and a density made of blocks), `network` (a network as settings), `readout` (heads),
`free` (x + g(x) for any g: "vanilla" and BatchNorm nets), `resnet` (the ResNet-164), `glow` (Glow, Real NVP, NICE and
i-RevNet, made of couplings), `families` (those and others as settings), `build` (the model that an objective needs, for
rows of a given `Schema`: preprocessing, scales of residual blocks, and a base, a head, or both).
"""

from .branches import Activation, contractive_convnet, contractive_mlp, mlp_flow
from .build import build
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
    "contractive_convnet",
    "contractive_mlp",
    "mlp_flow",
]
