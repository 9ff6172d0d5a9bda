"""Elementary transforms in closed form: ActNorm, Squeeze, Flatten and InjectivePad.

They come between the residual blocks (App. C.2 and C.3 of the paper):

    ActNorm        z = (x + shift) exp(log_scale) per channel       ln det = (height * width) sum(log_scale)
    Squeeze        space to depth, (C, H, W) -> (4C, H/2, W/2)      ln det = 0, an isometry
    Flatten        all elements in one vector                       ln det = 0, an isometry
    InjectivePad   z = (x, 0)                                       no determinant: the dimension grows

ActNorm has data-dependent initialisation: its output has mean 0 and variance 1 per channel on the first batch.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..batch import Shape, check_batch, check_finite, dimension
from ..float64 import ELEMENTARY, Rounding
from ..spelling import at_least
from ..transform import Stretch
from .closed_form import ClosedForm, Rearrangement, check_channels
from .first_batch import DataInitialised


class ActNorm(DataInitialised):
    """A learned shift and scale per channel, z = (x + shift) exp(log_scale), for x of shape (batch, channels, ...).

    The first training batch initialises both so that z has mean 0 and variance 1 in each channel (`first_batch`).

    >>> ActNorm(2).initialise_(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))(torch.tensor([[3.0, 6.0]])).tolist()
    [[1.0, 1.0]]
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        at_least(1, "Give the size of dimension 1 of the input.", channels=channels)
        self.channels = channels
        self.shift = nn.Parameter(torch.zeros(channels))
        self.log_scale = nn.Parameter(torch.zeros(channels))

    def value(self, x: Tensor) -> Tensor:
        check_channels(x, "x", "ActNorm", self.channels)
        self._initialise_if_first(x)
        shift, log_scale = self._affine(x)
        return (x + shift) * log_scale.exp()

    def logdet(self, x: Tensor) -> Tensor:
        _, log_scale = self._affine(x)
        positions = dimension(x) // self.channels
        return (positions * log_scale.sum()).expand(len(x))

    def undo(self, z: Tensor) -> Tensor:
        check_channels(z, "z", "ActNorm", self.channels)
        shift, log_scale = self._affine(z)
        return z * (-log_scale).exp() - shift

    @torch.no_grad()
    def initialise_(self, x: Tensor) -> ActNorm:
        """Normalise this batch to mean 0 and variance 1 per channel; a constant channel is only shifted."""
        check_channels(x, "x", "ActNorm", self.channels)
        check_finite(x, "x")
        channels = x.double().transpose(0, 1).flatten(1)
        std = channels.std(dim=1, correction=0)
        # A deviation no larger than rounding counts as constant: 1 / std would amplify noise, or be infinite.
        rounding = torch.finfo(x.dtype).eps * channels.abs().amax(dim=1) + torch.finfo(x.dtype).tiny
        std = torch.where(std > rounding, std, torch.ones_like(std))
        self.shift.copy_(-channels.mean(dim=1))
        self.log_scale.copy_(-std.log())
        self._mark_initialised()
        return self

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        """Return exact bounds; without a shape ln det, which grows with the number of positions, has no bound."""
        log_scale = self.log_scale.detach().double()
        logdet = (-math.inf, math.inf)
        if input_shape is not None:
            logdet = (math.prod(input_shape[1:]) * float(log_scale.sum()),) * 2
        return Stretch(float(log_scale.max().exp()), float((-log_scale.min()).exp()), logdet)

    def rounding(self, input_shape: Shape) -> Rounding:
        """Bound the rounding of a sum, an exponential and a product, each relative to the result."""
        return Rounding.of(0.0, 0.0, math.prod(input_shape), result=2 * ELEMENTARY)

    def extra_repr(self) -> str:
        return f"{self.channels}"

    def _affine(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # In the wider of both dtypes, so that a float64 input gets a float64 exponential.
        dtype = torch.promote_types(x.dtype, self.log_scale.dtype)
        shape = (self.channels,) + (1,) * (x.dim() - 2)
        return self.shift.to(dtype).view(shape), self.log_scale.to(dtype).view(shape)


class Squeeze(Rearrangement):
    """Space to depth: turns each factor x factor patch of an image into factor^2 channels, permuting the elements.

    >>> Squeeze()(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 12, 16, 16])
    """

    def __init__(self, factor: int = 2) -> None:
        super().__init__()
        at_least(2, "Leave Squeeze out to keep the resolution.", factor=factor)
        self.factor = factor

    def value(self, x: Tensor) -> Tensor:
        check_batch(x)
        self.output_shape(tuple(x.shape[1:]))
        return F.pixel_unshuffle(x, self.factor)

    def undo(self, z: Tensor) -> Tensor:
        check_batch(z, "z")
        if z.dim() != 4 or z.shape[1] % self.factor**2:
            raise ValueError(
                f"z must have shape (batch, {self.factor**2} C, height, width) to undo Squeeze({self.factor}); "
                f"got {tuple(z.shape)}. Pass an output of Squeeze."
            )
        return F.pixel_shuffle(z, self.factor)

    def output_shape(self, input_shape: Shape) -> Shape:
        if len(input_shape) != 3 or input_shape[1] % self.factor or input_shape[2] % self.factor:
            raise ValueError(
                f"Squeeze({self.factor}) needs images (channels, height, width) whose height and width are multiples "
                f"of {self.factor}; got {tuple(input_shape)}. Pad or crop the images, or squeeze fewer times."
            )
        channels, height, width = input_shape
        return channels * self.factor**2, height // self.factor, width // self.factor

    def data_shape(self, code_shape: Shape) -> Shape:
        channels, height, width = code_shape
        return channels // self.factor**2, height * self.factor, width * self.factor

    def extra_repr(self) -> str:
        return f"{self.factor}"


class Flatten(Rearrangement):
    """Flattens a sample of this shape into a vector, for fully connected blocks after convolutions.

    >>> Flatten((3, 4, 4))(torch.zeros(1, 3, 4, 4)).shape
    torch.Size([1, 48])
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape: Shape = tuple(shape)
        if not shape or any(n < 1 for n in shape):
            raise ValueError(f"shape must list positive sizes; got {self.shape}. Give the shape of one sample.")

    def value(self, x: Tensor) -> Tensor:
        check_batch(x, shape=self.shape)
        return x.flatten(1)

    def undo(self, z: Tensor) -> Tensor:
        check_batch(z, "z", (math.prod(self.shape),))
        return z.reshape(-1, *self.shape)

    def output_shape(self, input_shape: Shape) -> Shape:
        if tuple(input_shape) != self.shape:
            raise ValueError(f"input_shape must be {self.shape} for this Flatten; got {tuple(input_shape)}.")
        return (math.prod(self.shape),)

    def data_shape(self, code_shape: Shape) -> Shape:
        return self.shape

    def extra_repr(self) -> str:
        return f"{self.shape}"


class InjectivePad(ClosedForm):
    """Appends channels of zeros, so that a classifier can use more channels than its data have (App. C.2).

    The map is injective, not bijective: `inverse` drops the added channels, which inverts every code in the image of
    the map and projects any other code onto it. There is no log-determinant, so a likelihood is refused.

    >>> InjectivePad(13)(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 16, 32, 32])
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        at_least(1, "Leave InjectivePad out to add none.", channels=channels)
        self.channels = channels

    def value(self, x: Tensor) -> Tensor:
        check_batch(x)
        zeros = torch.zeros(len(x), self.channels, *x.shape[2:], dtype=x.dtype, device=x.device)
        return torch.cat([x, zeros], dim=1)

    def logdet(self, x: Tensor) -> Tensor:
        raise ValueError(
            "a model with a likelihood must not contain InjectivePad, because a density on constant channels is "
            f"unbounded; got InjectivePad({self.channels}). Leave it out of a flow; a Classifier may have it."
        )

    def undo(self, z: Tensor) -> Tensor:
        check_batch(z, "z")
        if z.shape[1] <= self.channels:
            raise ValueError(
                f"z must have more than {self.channels} channels to undo InjectivePad({self.channels}); "
                f"got {tuple(z.shape)}. Pass an output of InjectivePad."
            )
        return z[:, : z.shape[1] - self.channels]

    def stretch(self, input_shape: Shape | None = None) -> Stretch:
        return Stretch(forward=1.0, inverse=1.0, logdet=None)

    def inverse_error_bound(self, x: Tensor, z: Tensor, context: Tensor | None = None) -> Tensor:
        """Return zero: dropping channels is exact, and so is projecting a code outside the image of the map."""
        return torch.zeros(len(z), dtype=torch.float64, device=z.device)

    def output_shape(self, input_shape: Shape) -> Shape:
        return (input_shape[0] + self.channels, *input_shape[1:])

    def data_shape(self, code_shape: Shape) -> Shape:
        return (code_shape[0] - self.channels, *code_shape[1:])

    def extra_repr(self) -> str:
        return f"{self.channels}"
