"""What the paper compares an i-ResNet with: the same network without its constraint, an ordinary ResNet, other flows.

In reading order: `free` (x + g(x) for any g: "vanilla" and BatchNorm nets), `resnet` (the ResNet-164), `split` (what
stays and what is moved), `coupling` (affine and additive), `conditioner` (the networks inside), `flows` (Glow, Real
NVP, NICE and i-RevNet, made of couplings), `imported` (MADE, MAF and FFJORD, which are zuko's).
"""

from .coupling import AdditiveCoupling, AffineCoupling, Coupling, preserves_volume
from .flows import additive_glow, glow, i_revnet, mlp_glow, nice, real_nvp
from .free import FreeBlock
from .imported import Imported, ffjord, made, maf
from .resnet import PlainResNet, PreActResNet
from .split import Alternate, Checkerboard, Halves, Split

__all__ = [
    "AdditiveCoupling",
    "AffineCoupling",
    "Alternate",
    "Checkerboard",
    "Coupling",
    "FreeBlock",
    "Halves",
    "Imported",
    "PlainResNet",
    "PreActResNet",
    "Split",
    "additive_glow",
    "ffjord",
    "glow",
    "i_revnet",
    "made",
    "maf",
    "mlp_glow",
    "nice",
    "preserves_volume",
    "real_nvp",
]
