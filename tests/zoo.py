"""Small transforms of every kind: `tests/test_laws.py` holds each of them to the same laws.

A new transform earns every law by one line in `ZOO`.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn

from iresnet import (
    ActNorm,
    Chain,
    Conditioned,
    GramIteration,
    LipSwish,
    Logit,
    MaxMin,
    Multiscale,
    ResidualBlock,
    Sine,
    Squeeze,
    Standardise,
    Transform,
    constrain_,
    contractive_convnet,
    contractive_mlp,
)
from iresnet.lipschitz import Concatenated, Potential, cap_of, refresh_
from iresnet.models.glow import additive_glow, glow, i_revnet, nice, real_nvp
from iresnet.transforms import AdditiveCoupling, AffineCoupling, Alternate, Checkerboard, Halves, Split, made, maf
from iresnet.transforms.columns import ColumnTransform
from iresnet.transforms.conditioner import ResidualConvolutions, convnet, mlp
from iresnet.transforms.elementary import Flatten
from iresnet.transforms.mixing import InvertibleConv1x1, PrincipalAxes, Reverse
from iresnet.transforms.spline import ColumnSpline

DOUBLE = torch.float64


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rouse_(module: nn.Module, seed: int = 0, weight: float = 4.0) -> nn.Module:
    """Weights large enough for every constraint to bite, and biases, scales and shifts away from their start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=DOUBLE).to(p)
            if name.endswith("original"):
                p.mul_(weight)
            elif (
                name.endswith(("bias", "shift", "log_scale", "factors", "angle")) or not p.any()
            ):  # or it starts at zero
                p.add_(0.3 * noise)
    refresh_(module, settle=True)
    return module


def roused(module: nn.Module, seed: int = 0) -> nn.Module:
    """All weights moved a little: away from zero, where they start there."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=generator, dtype=DOUBLE).to(p))
    return module


def linear_block(matrix: Tensor, *, lipschitz: float | None = None) -> ResidualBlock:
    """x + A x, the block whose inverse and determinant are linear algebra."""
    d = len(matrix)
    layer = nn.Linear(d, d, bias=False, dtype=matrix.dtype)
    with torch.no_grad():
        layer.weight.copy_(matrix)
    return ResidualBlock(nn.Sequential(layer), lipschitz=lipschitz).eval()


def contraction(d: int, norm: float, seed: int = 0, dtype: torch.dtype = DOUBLE) -> Tensor:
    """A random matrix of this spectral norm."""
    a = normal(d, d, seed=seed)
    return (a * (norm / torch.linalg.matrix_norm(a, 2))).to(dtype)


def dense_jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The Jacobians of a batched function, (batch, outputs, inputs), row by row, of all samples at once.

    That no sample depends on another is a law of its own.
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = function(x).flatten(1).sum(0)
        rows = [torch.autograd.grad(value, x, retain_graph=True)[0].flatten(1) for value in y]
    return torch.stack(rows, dim=1)


class UserNet(nn.Module):
    """A network with a skip, a reused layer and an unknown function: nobody can read its constant (it is below 0.7)."""

    def __init__(self, d: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(d, d)
        with torch.no_grad():
            self.layer.weight.mul_(0.5 / torch.linalg.matrix_norm(self.layer.weight, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        return 0.4 * self.layer(h) + 0.3 * torch.sin(x) + 0.2 * h


def _sequence(*layers: nn.Module, lipschitz: float = 0.9) -> ResidualBlock:
    return ResidualBlock(constrain_(nn.Sequential(*layers), lipschitz=lipschitz))


def _conditional_image() -> ResidualBlock:
    g = contractive_convnet(2, hidden=3, kernels=(3, 3), lipschitz=0.8)
    return ResidualBlock(Conditioned(g[:1], nn.Linear(3, 3), g[1:]))


def _conv_block(**options: object) -> ResidualBlock:
    return ResidualBlock(contractive_convnet(2, hidden=3, **options))  # type: ignore[arg-type]


def _mlp_block(d: int = 4, **options: object) -> ResidualBlock:
    return ResidualBlock(contractive_mlp(d, **{"hidden": (6,), **options}))  # type: ignore[arg-type]


def _potential(layer: nn.Module, activation: nn.Module | None = None, lipschitz: float = 0.9) -> ResidualBlock:
    return _sequence(Potential(layer, activation or nn.ELU()), lipschitz=lipschitz)  # type: ignore[arg-type]


def _dense() -> nn.Sequential:
    """Two layers that keep what they are given, one inside of the other as well, and one back."""
    inner = nn.Sequential(Concatenated(nn.Sequential(nn.Linear(4, 3), nn.ELU())), nn.Linear(7, 3), nn.Tanh())
    return nn.Sequential(Concatenated(inner), Concatenated(nn.Sequential(nn.Linear(7, 2), nn.ELU())), nn.Linear(9, 4))


def _multiscale() -> Multiscale:
    first = Chain(Squeeze(), ActNorm(4), ResidualBlock(contractive_convnet(4, hidden=3, kernels=(3, 1))))
    second = Chain(ResidualBlock(contractive_convnet(2, hidden=2, kernels=(1, 3))), ActNorm(2))
    return Multiscale([first, second], input_shape=(1, 4, 4))


def _net(inputs: int, outputs: int) -> nn.Sequential:
    return mlp(inputs, outputs, (6, 5), nn.ELU)


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    return convnet(inputs, outputs, 4, activation=nn.ELU)


def _residual(inputs: int, outputs: int) -> nn.Module:
    return ResidualConvolutions(inputs, outputs, 3, 1, nn.ELU)


def _affine(channels: int, split: Split, net: Callable[[int, int], nn.Module] = _net) -> AffineCoupling:
    kept, moved = split.sizes(channels)
    return AffineCoupling(net(kept, 2 * moved), split)


def _additive(channels: int, split: Split, net: Callable[[int, int], nn.Module] = _net) -> AdditiveCoupling:
    return AdditiveCoupling(net(*split.sizes(channels)), split)


def _image_glow() -> Multiscale:
    first = Chain(Squeeze(), *glow((4, 2, 2), 1, _convolutions, Halves(swapped=True)))
    return Multiscale([first, Chain(*glow((2, 2, 2), 1, _convolutions), ActNorm(2))], input_shape=(1, 4, 4))


def _image_real_nvp() -> Chain:
    board = real_nvp((1, 4, 4), 2, _residual, Checkerboard)
    return Chain(*board, Squeeze(), *real_nvp((4, 2, 2), 2, _residual))


def _i_revnet() -> Chain:
    later = i_revnet((64, 1, 1), 2, nn.ELU, squeezed=True, before=3)
    return Chain(*i_revnet((16, 2, 2), 3, nn.ELU, first=True), Squeeze(), *later)


class Told(nn.Module):
    """A conditioner with a context."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net(5, 4)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.net(torch.cat([x, context], dim=1))


def _autoregressive(make: Callable[..., list[Transform]]) -> Chain:
    pytest.importorskip("zuko", reason="MADE and MAF are zuko's: pip install 'iresnet[flows]'")
    return Chain(*make(4 if make is made else 3, hidden=(6, 6), activation=nn.ELU))


def _spline() -> ColumnSpline:
    knots = torch.tensor([[-1.0, 0.5, 1.0], [0.0, 2.0, 2.5]])
    codes, slopes = torch.tensor([[-2.0, 0.0, 3.0], [-1.0, 0.0, 0.1]]), torch.tensor([[2.0, 1.0, 6.0], [1.0, 0.3, 0.2]])
    return ColumnSpline(2, 2).set_(knots, codes, slopes)


def _uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def _columns() -> ColumnTransform:
    """A column of every interval; the logarithm of the last one is linear from 1/2 on."""
    lower, upper, margin = [None, -0.1, None, -0.2, -0.1], [None, None, 1.1, 1.2, None], [0.0, 0.1, 0.1, 0.2, 0.1]
    made = ColumnTransform(lower, upper, margin)
    made.mean.copy_(torch.arange(5) - 2.0)
    made.std.copy_(torch.tensor([2.0, 0.5, 1.5, 0.7, 3.0]))
    made.reach[4] = 0.5
    return made


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], Transform]
    shape: tuple[int, ...]
    context: int | None = None
    data: Callable[..., Tensor] = normal
    proven: bool = True  # whether the error of an inverse is bounded

    def build(self, seed: int = 0, dtype: torch.dtype = DOUBLE) -> Transform:
        return copy.deepcopy(_prototype(self, seed)).to(dtype)

    def x(self, batch: int, seed: int = 1, dtype: torch.dtype = DOUBLE) -> Tensor:
        return self.data(batch, *self.shape, seed=seed).to(dtype)

    def c(self, batch: int, seed: int = 2, dtype: torch.dtype = DOUBLE) -> Tensor | None:
        return None if self.context is None else normal(batch, self.context, seed=seed).to(dtype)


@cache
def _prototype(case: Case, seed: int) -> Transform:
    torch.manual_seed(seed)
    transform = case.make()
    rouse_(transform, seed)
    return transform.eval()


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "elu": nn.ELU,
    "elu-half": partial(nn.ELU, alpha=0.5),
    "softplus": partial(nn.Softplus, threshold=40.0),
    "softplus-sharp": partial(nn.Softplus, beta=3.0, threshold=60.0),
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "lipswish": LipSwish,
    "lipswish-sharp": partial(LipSwish, beta=5.0),
    "sine": Sine,
    "sine-fast": partial(Sine, frequency=3.0),
    "maxmin": MaxMin,
    "leaky": nn.LeakyReLU,
    "celu": partial(nn.CELU, alpha=2.0),
    "sigmoid": nn.Sigmoid,
    "softsign": nn.Softsign,
    "logsigmoid": nn.LogSigmoid,
    "hardtanh": nn.Hardtanh,
    "identity": nn.Identity,
}

ZOO = [
    *(Case(f"mlp-{name}", partial(_mlp_block, activation=make), (4,)) for name, make in ACTIVATIONS.items()),
    Case("mlp-one-dimension", partial(_mlp_block, d=1), (1,)),
    Case("mlp-deep", partial(_mlp_block, hidden=(6, 5, 7)), (4,)),
    Case("mlp-nearly-expanding", partial(_mlp_block, lipschitz=0.99), (4,)),
    Case("mlp-per-layer", partial(_mlp_block, coefficient=0.7), (4,)),
    Case("mlp-strict", partial(_mlp_block, norm=GramIteration()), (4,)),
    Case("mlp-conditional", partial(_mlp_block, context=3), (4,), context=3),
    Case("mlp-on-sequences", partial(_mlp_block, d=2), (3, 2)),
    Case("mlp-on-images", lambda: _sequence(nn.Flatten(), nn.Linear(8, 8), nn.Unflatten(1, (2, 2, 2))), (2, 2, 2)),
    Case("conv", _conv_block, (2, 4, 3)),
    Case("conv-preactivated", partial(_conv_block, preactivation=True), (2, 4, 3)),
    Case("conv-smaller-than-its-kernel", partial(_conv_block, kernels=(5, 3)), (2, 2, 1)),
    Case("conv-strict", partial(_conv_block, norm=GramIteration()), (2, 4, 3)),
    Case("conv-conditional", _conditional_image, (2, 3, 3), context=3),
    Case(
        "conv-circular",
        lambda: _sequence(
            nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
            nn.ELU(),
            nn.Conv2d(3, 2, (1, 3), padding=(0, 1), padding_mode="circular"),
        ),
        (2, 4, 3),
    ),
    Case(
        "conv-even-same",
        lambda: _sequence(nn.Conv2d(2, 3, (2, 4), padding="same"), nn.Tanh(), nn.Conv2d(3, 2, 2, padding="same")),
        (2, 4, 3),
    ),
    Case(
        "conv-dilated-grouped",
        lambda: _sequence(
            nn.Conv2d(2, 4, 3, padding=2, dilation=2, groups=2), nn.ELU(), nn.Conv2d(4, 2, 3, padding=1, groups=2)
        ),
        (2, 4, 3),
    ),
    Case(
        "conv-strided-and-back",
        lambda: _sequence(
            nn.Conv2d(1, 4, 3, stride=2, padding=1),
            nn.ELU(),
            nn.Flatten(),
            nn.Linear(16, 16),
            nn.Unflatten(1, (1, 4, 4)),
        ),
        (1, 4, 4),
    ),
    Case("conv-1d", lambda: _sequence(nn.Conv1d(3, 3, 3, padding=1), nn.ELU(), nn.Conv1d(3, 3, 1)), (3, 5)),
    Case("conv-3d", lambda: _sequence(nn.Conv3d(1, 2, 3, padding=1), nn.ELU(), nn.Conv3d(2, 1, 1)), (1, 2, 3, 2)),
    Case("potential", lambda: _potential(nn.Linear(4, 7)), (4,)),
    Case("potential-conv", lambda: _potential(nn.Conv2d(2, 5, 3, padding=1), nn.Softplus(threshold=40)), (2, 4, 3)),
    Case("potential-chain", lambda: Chain(_potential(nn.Linear(4, 7)), ActNorm(4), _potential(nn.Linear(4, 3))), (4,)),
    Case("dense", lambda: ResidualBlock(constrain_(_dense(), lipschitz=0.9)), (4,)),
    Case(
        "dense-conv",
        lambda: _sequence(
            Concatenated(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), LipSwish())), nn.Conv2d(5, 2, 3, padding=1)
        ),
        (2, 4, 3),
    ),
    Case("asserted", lambda: ResidualBlock(UserNet(), lipschitz=0.7), (4,)),
    Case("actnorm", lambda: ActNorm(4), (4,)),
    Case("actnorm-image", lambda: ActNorm(2), (2, 3, 3)),
    Case("squeeze", Squeeze, (1, 4, 4)),
    Case("mixing", lambda: InvertibleConv1x1(4), (4,)),
    Case("mixing-image", lambda: InvertibleConv1x1(3), (3, 2, 2)),
    Case("principal-axes", lambda: PrincipalAxes(3), (3, 2, 2)),
    Case("flatten", lambda: Flatten((2, 3, 2)), (2, 3, 2)),
    Case("spline", _spline, (2,)),
    Case("standardise", lambda: Standardise([1.0, -2.0], [0.5, 3.0]), (2, 3)),
    Case("logit", lambda: Logit(levels=1), (2, 3), data=_uniform),
    Case("columns", _columns, (5,), data=_uniform),
    Case("columns-positive", lambda: ColumnTransform([0.0, None], [None, 2.0], [0.0, 1.0]), (2,), data=_uniform),
    Case("chain-of-nothing", Chain, (3,)),
    Case("chain", lambda: Chain(ActNorm(4), _mlp_block(), Chain(_mlp_block(lipschitz=0.5), ActNorm(4))), (4,)),
    Case("chain-shared-block", lambda: Chain(*[_mlp_block(lipschitz=0.6)] * 2), (4,)),
    Case("chain-conditional", lambda: Chain(_mlp_block(context=3), _mlp_block(), ActNorm(4)), (4,), context=3),
    Case(
        "chain-image",
        lambda: Chain(_conv_block(), Squeeze(), ActNorm(8), ResidualBlock(contractive_convnet(8, 3, kernels=(1, 3)))),
        (2, 4, 2),
    ),
    Case(
        "chain-of-data", lambda: Chain(Logit(levels=1), Standardise([0.1], [2.0]), _mlp_block(1)), (1,), data=_uniform
    ),
    Case("multiscale", _multiscale, (1, 4, 4)),
    Case("reverse", Reverse, (3, 2, 2)),
    Case("affine", lambda: _affine(4, Halves()), (4,)),
    Case("affine-odd", lambda: _affine(5, Halves(swapped=True)), (5,)),
    Case("affine-alternate", lambda: _affine(5, Alternate()), (5,)),
    Case("affine-conditional", lambda: AffineCoupling(Told()), (4,), context=3),
    Case("affine-image", lambda: _affine(4, Halves(), _convolutions), (4, 3, 2)),
    Case("affine-checkerboard", lambda: _affine(2, Checkerboard(), _convolutions), (2, 3, 3)),
    Case("affine-checkerboard-swapped", lambda: _affine(1, Checkerboard(swapped=True), _residual), (1, 3, 2)),
    Case("additive", lambda: _additive(4, Halves(swapped=True)), (4,)),
    Case("additive-alternate", lambda: _additive(5, Alternate(swapped=True)), (5,)),
    Case("additive-image", lambda: _additive(2, Halves(), lambda a, b: nn.Conv2d(a, b, 3, padding=1)), (2, 4, 3)),
    Case("additive-checkerboard", lambda: _additive(1, Checkerboard(), _convolutions), (1, 4, 3)),
    Case("glow", lambda: Chain(*glow((3,), 2, _net)), (3,)),
    Case("glow-additive", lambda: Chain(*additive_glow((3,), 2, _net)), (3,)),
    Case("glow-image", _image_glow, (1, 4, 4)),
    Case("real-nvp", lambda: Chain(*real_nvp((3,), 3, _net)), (3,)),
    Case("real-nvp-image", _image_real_nvp, (1, 4, 4)),
    Case("nice", lambda: Chain(*nice((5,), 3, _net)), (5,)),
    Case("i-revnet", _i_revnet, (16, 2, 2)),
    Case("made", partial(_autoregressive, made), (4,), proven=False),
    Case("maf", partial(_autoregressive, partial(maf, blocks=2)), (3,), proven=False),
]


def constrained_layers(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if cap_of(m) is not None]
