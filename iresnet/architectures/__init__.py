"""Named networks: functions that return ordinary modules, contractive by construction, and networks as settings.

In reading order: `branches` (g, and a density made of blocks), `network` (a network as settings), `readout` (heads),
`rivals` (the maps of other families), `build` (the model that an objective needs, for rows of a given `Schema`:
preprocessing, scales of residual blocks, and a base, a head, or both).
"""

from .branches import Activation, contractive_convnet, contractive_mlp, mlp_flow
from .build import build
from .network import (
    ACTIVATIONS,
    BRANCHES,
    ESTIMATORS,
    FAMILIES,
    INVERSES,
    NORMALISATIONS,
    PREPROCESSING,
    READOUTS,
    Network,
)
from .readout import NormalisedReadout, Readout
from .rivals import ORIGINS

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "BRANCHES",
    "ESTIMATORS",
    "FAMILIES",
    "INVERSES",
    "NORMALISATIONS",
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
