"""What the paper compares an i-ResNet with: the same network without its constraint, and an ordinary ResNet.

In reading order: `free` (x + g(x) for any g: "vanilla" and BatchNorm nets), `resnet` (the ResNet-164).
"""

from .free import FreeBlock
from .resnet import PreActResNet

__all__ = ["FreeBlock", "PreActResNet"]
