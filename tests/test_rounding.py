"""What rounding in float64 can do, against arithmetic with fifty digits: no bound of a proof may ignore large numbers
that cancel on the way."""

import math
from dataclasses import replace

import mpmath  # type: ignore[import-untyped]
import pytest
import torch
from torch import nn

from iresnet import (
    ActNorm,
    Anderson,
    LipSwish,
    Logit,
    MaxMin,
    ResidualBlock,
    Sine,
    Squeeze,
    Standardise,
    constrain_,
    contractive_convnet,
    contractive_mlp,
    residual,
)
from iresnet.branch import lipschitz_bound, parse, try_parse, unconstrained_copy
from iresnet.branch.rounding import LinearBound, TrackedState, rounding_bound, state_errors
from iresnet.fixed_point import default_tolerance, solve
from iresnet.float64 import Rounding
from iresnet.inverse import Decoder
from iresnet.inverse.arithmetic import Arithmetic
from iresnet.inverse.inverter import Inverter
from iresnet.lipschitz import Concatenated, Conditioned, Potential, leaves
from iresnet.lipschitz.activations import lipswish_beta
from iresnet.spectral import Geometry, NoBoundKnown, dense_matrix
from iresnet.transforms.elementary import Flatten
from iresnet.transforms.mixing import InvertibleConv1x1, PrincipalAxes, Reverse
from tests.zoo import ACTIVATIONS, DOUBLE, linear_block, normal, rouse_

pytestmark = pytest.mark.no_cover

mp = mpmath.mp.clone()
mp.dps = 50

SMOOTH = {
    nn.ELU: lambda a, t: t if t > 0 else a.alpha * mp.expm1(t),
    nn.CELU: lambda a, t: t if t > 0 else a.alpha * mp.expm1(t / mp.mpf(a.alpha)),
    nn.LeakyReLU: lambda a, t: t if t > 0 else mp.mpf(a.negative_slope) * t,
    nn.Softplus: lambda a, t: mp.log1p(mp.exp(mp.mpf(a.beta) * t)) / mp.mpf(a.beta),
    nn.Tanh: lambda a, t: mp.tanh(t),
    nn.ReLU: lambda a, t: max(t, mp.mpf(0)),
    nn.Hardtanh: lambda a, t: min(max(t, mp.mpf(a.min_val)), mp.mpf(a.max_val)),
    nn.Softsign: lambda a, t: t / (1 + abs(t)),
    nn.LogSigmoid: lambda a, t: -mp.log1p(mp.exp(-t)),
    nn.Sigmoid: lambda a, t: 1 / (1 + mp.exp(-t)),
    nn.SiLU: lambda a, t: t / (1 + mp.exp(-t)),
    nn.GELU: lambda a, t: _gelu(a, t),
    nn.Identity: lambda a, t: t,
    Sine: lambda a, t: mp.sin(mp.mpf(a.frequency) * t) / mp.mpf(a.frequency),
    LipSwish: lambda a, t: t / (1 + mp.exp(-mp.log1p(mp.exp(mp.mpf(a.raw_beta.item()))) * t)) / mp.mpf(1.1),
}


def _gelu(a, t):
    if a.approximate == "none":
        return t * mp.erfc(-t / mp.sqrt(2)) / 2
    # The constants are those of torch, numbers of float64.
    return t / 2 * (1 + mp.tanh(mp.sqrt(2 / mp.pi) * (t + mp.mpf(0.044715) * t**3)))


def exact(g, x, shift=None):
    """g(x) of one sample as mpmath sees it: (numbers, shape)."""
    values, shape = [mp.mpf(float(t)) for t in x.flatten()], tuple(x.shape)
    if type(g) is Conditioned:
        values, shape = _through(g.first, values, shape)
        per = shift.reshape(*shift.shape, *(1,) * (len(shape) - shift.dim())).expand(shape).flatten()
        return _through(g.rest, [v + mp.mpf(float(s)) for v, s in zip(values, per, strict=True)], shape)[0]
    return _through(g, values, shape)[0]


def _through(g, values, shape):
    for _, leaf in leaves(g):
        like = torch.empty(1, *shape, dtype=DOUBLE)
        if type(leaf) is Concatenated:
            t = mp.mpf(leaf.angle.item())
            values = [mp.cos(t) * v for v in values] + [mp.sin(t) * v for v in _through(leaf.f, values, shape)[0]]
        elif type(leaf) is Potential:
            matrix, bias = _affine(leaf.layer, shape)
            inner = [SMOOTH[type(leaf.activation)](leaf.activation, t) for t in _times(matrix, values, bias)]
            values = [-v for v in _times(matrix.T, inner, None)]
        elif type(leaf) is MaxMin:
            a, b = torch.arange(len(values)).reshape(shape).reshape(shape[0] // 2, 2, -1).unbind(1)
            a, b = a.flatten().tolist(), b.flatten().tolist()
            values = list(values)
            for i, j in zip(a, b, strict=True):
                values[i], values[j] = max(values[i], values[j]), min(values[i], values[j])
        elif type(leaf) in SMOOTH:
            values = [SMOOTH[type(leaf)](leaf, t) for t in values]
        elif not isinstance(leaf, nn.Flatten | nn.Unflatten):
            values = _times(*_split(leaf, shape, values))
        shape = tuple(leaf(like).shape[1:])
    return values, shape


def _split(layer, shape, values):
    matrix, bias = _affine(layer, shape)
    return matrix, values, bias


def _affine(layer, shape):
    """(matrix, bias) of a layer on one sample; every entry of the matrix is one weight or zero."""
    if isinstance(layer, nn.Linear):
        rows = math.prod(shape[:-1])
        matrix = torch.block_diag(*[layer.weight] * rows)
        return matrix, None if layer.bias is None else layer.bias.repeat(rows)
    matrix = dense_matrix(layer.weight.detach(), Geometry.of(layer), shape[1:])
    bias = None if layer.bias is None else layer.bias.repeat_interleave(len(matrix) // len(layer.bias))
    return matrix, bias


def _times(matrix, values, bias):
    sums = []
    for i, row in enumerate(matrix.tolist()):
        total = mp.fdot((mp.mpf(w), v) for w, v in zip(row, values, strict=True) if w)
        sums.append(total if bias is None else total + mp.mpf(bias[i].item()))
    return sums


def distance(computed, expected):
    return float(
        mp.sqrt(mp.fsum((mp.mpf(float(a)) - b) ** 2 for a, b in zip(computed.flatten(), expected, strict=True)))
    )


def at(size, x):
    return size.slope * x.norm().item() + size.fixed


CONV = nn.Conv2d
NETWORKS = {
    **{name: (lambda make=make: nn.Sequential(nn.Linear(4, 6), make(), nn.Linear(6, 4)), (4,))
       for name, make in ACTIVATIONS.items()},
    "silu": (lambda: nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 4)), (4,)),
    "gelu": (lambda: nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)), (4,)),
    "gelu-tanh": (lambda: nn.Sequential(nn.Linear(4, 6), nn.GELU("tanh"), nn.Linear(6, 4)), (4,)),
    "activation alone": (nn.ELU, (4,)),
    "nested": (lambda: nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 3)), (3,)),
    "sequence": (lambda: nn.Sequential(nn.Linear(2, 5), nn.ELU(), nn.Linear(5, 2)), (3, 2)),
    "flattened": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(8, 8), nn.Unflatten(1, (2, 2, 2))), (2, 2, 2)),
    "conv": (lambda: nn.Sequential(CONV(2, 3, 3, padding=1), nn.ELU(), CONV(3, 2, 1)), (2, 3, 4)),
    "stride": (lambda: nn.Sequential(CONV(2, 8, 2, stride=2), nn.ELU(), CONV(8, 2, 3, padding=1)), (2, 4, 4)),
    "dilation, groups": (lambda: nn.Sequential(CONV(2, 4, 3, padding=2, dilation=2, groups=2), nn.Tanh()), (2, 4, 3)),
    "circular": (lambda: nn.Sequential(CONV(2, 2, 3, padding=1, padding_mode="circular"), nn.ELU()), (2, 4, 3)),
    "circular and wide": (lambda: nn.Sequential(CONV(1, 2, 1, padding=2, padding_mode="circular")), (1, 4, 3)),
    "same": (lambda: nn.Sequential(nn.Conv1d(2, 2, 4, padding="same")), (2, 5)),
    "volume": (lambda: nn.Sequential(nn.Conv3d(1, 2, 2, padding=1)), (1, 2, 2, 3)),
    "potential": (lambda: Potential(nn.Linear(4, 6), nn.Softplus(2.0, 40.0)), (4,)),
    "potential conv": (lambda: nn.Sequential(Potential(CONV(2, 4, 3, padding=1, groups=2), nn.ELU())), (2, 3, 3)),
    "dense": (lambda: nn.Sequential(Concatenated(nn.Sequential(nn.Linear(3, 4), nn.ELU())), nn.Linear(7, 3)), (3,)),
}  # fmt: skip


def network(name, size, seed=0):
    """A network in float64 with biases and weights of this size."""
    torch.manual_seed(seed)
    make, shape = NETWORKS[name]
    g = make().double().requires_grad_(False).eval()
    for p in g.parameters():
        p.mul_(size if p.dim() == 1 else 1.0)
    return g, shape


def errors_of(g, shape, shift=None):
    """The errors of all states in g."""
    found, rows = try_parse(g), 1 if shift is None else len(shift)
    return state_errors(found.program, found.tensors(shift), lipschitz_bound(g, shape).constants, shape, rows)


class TestEvaluation:
    @pytest.mark.parametrize("size", [1.0, 1e8])
    @pytest.mark.parametrize("name", NETWORKS)
    def test_no_evaluation_is_further_off_than_its_bound(self, name, size):
        g, shape = network(name, size)
        found = errors_of(g, shape)[-1]
        for scale in (0.0, 1e-8, 1.0, 1e6):
            x = scale * normal(1, *shape, seed=1)
            off = distance(g(x.clone()), exact(g, x[0]))
            assert off <= at(found, x)
            if size > 1 and off > 0 and scale <= 1:
                assert at(found, x) < 1e5 * off  # nor is it a wild guess

    def test_a_context_loosens_the_proof_of_its_own_sample_only(self):
        """Trap: one sample with a large context, and no other inverse of the batch was proven."""
        torch.manual_seed(0)
        block = rouse_(ResidualBlock(contractive_mlp(3, (32,), context=2))).eval()
        z, c = normal(4, 3).float(), normal(4, 2).float()
        alone = block.solve(z, c)
        c[3] = 1e12
        found = block.solve(z, c)
        assert alone.converged.all()
        assert torch.equal(found.error_bound[:3], alone.error_bound[:3])
        c[3, 0] = torch.nan
        with pytest.raises(ValueError, match="context must be finite; sample 3 of 4"):
            block.solve(z, c)

    @pytest.mark.parametrize("shape", [(4,), (2, 3, 3)], ids=["rows", "images"])
    def test_a_shift_counts(self, shape):
        torch.manual_seed(0)
        first, rest = (nn.Linear(4, 6), nn.Linear(6, 4)) if shape == (4,) else (CONV(2, 6, 3, padding=1), CONV(6, 2, 1))
        g = Conditioned(first, nn.Linear(3, 6), nn.Sequential(nn.Tanh(), rest)).double().requires_grad_(False)
        context = torch.tensor([[1e8, 0.0, 1.0], [1.0, 2.0, 3.0]], dtype=DOUBLE)
        shift, x = g.embed(context), normal(2, *shape, seed=1)
        found = errors_of(g, shape, shift)[-1]
        y = g(x, context)
        for i in range(2):  # each by its own bound: a large context does not loosen that of others
            alone = replace(found, fixed=float(found.fixed[i]))
            assert distance(y[i], exact(g, x[i], shift[i])) <= at(alone, x[i])
        assert found.fixed[1] < 1e-6 * found.fixed[0]
        assert found.fixed[0] > 1e6 * errors_of(g, shape, shift[1:])[-1].fixed

    def test_weights_that_cancel_count(self):
        """(1e8, -1e8) x is zero where both are equal, and its products are not."""
        g = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double().requires_grad_(False)
        g[1].weight.copy_(torch.tensor([[1e8, -1e8]]))
        found = errors_of(g, (2,))[-1]
        for seed in range(10):
            x = normal(1, 2, seed=seed)
            assert distance(g(x), exact(g, x[0])) <= at(found, x) < 1e-6

    def test_of_an_ordinary_network_it_is_small_and_made_once(self):
        torch.manual_seed(0)
        g = contractive_convnet(12, 64, lipschitz=0.9).eval()
        block, shape = ResidualBlock(g).double(), (12, 4, 4)
        found = block.rounding(shape)
        assert found.relative < 2e-12
        assert found.absolute < 1e-11
        assert block.rounding(shape) is found

    def test_what_is_not_readable_has_no_bound(self):
        a, b, c = (nn.Linear(2, 2).double() for _ in range(3))
        with pytest.raises(NoBoundKnown, match="PReLU"):
            parse(nn.Sequential(a, nn.PReLU()))
        with pytest.raises(ValueError, match="conditional; pass context"):
            ResidualBlock(constrain_(Conditioned(a, b, c), 0.9)).rounding((2,))
        with pytest.raises(NoBoundKnown, match="jumps at its threshold"):
            rounding_bound(try_parse(nn.Softplus()).program, [], [0.5], (2,))

    def test_a_step_without_a_constant_has_an_infinite_error(self):
        found = try_parse(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).double())
        assert math.isinf(rounding_bound(found.program, found.tensors(), [0.5, math.inf], (2,)).relative)

    def test_an_asserted_constant_comes_with_an_assumed_rounding(self):
        block = ResidualBlock(nn.Linear(2, 2), lipschitz=0.9)
        assert block.rounding((2,)) == Rounding.assumed()

    def test_sizes_add_and_scale(self):
        assert LinearBound(1, 2) + 2 * LinearBound(3, 4) == LinearBound(7, 10)
        assert 0.0 * LinearBound(math.inf, 1) == LinearBound()
        assert LinearBound(3, 6).concatenated(LinearBound(4, 8)) == LinearBound(5, 10)


def cancelling(activation, size, d=3, hidden=8, seed=0):
    """x -> W2 s(W1 x + b1) + b2 with biases of this size that cancel: g(0) is small."""
    torch.manual_seed(seed)
    g = nn.Sequential(nn.Linear(d, hidden), activation, nn.Linear(hidden, d)).double().requires_grad_(False)
    for layer in (g[0], g[2]):
        layer.weight.mul_(0.7 / torch.linalg.matrix_norm(layer.weight, 2))
    g[0].bias.copy_(size * torch.rand(hidden))
    g[2].bias.copy_(-g[2](g[1](g[0].bias[None]))[0] + g[2].bias)
    return g


def inverse(g, z, x):
    """The x* with x + g(x) = z in fifty digits, for a constant of 1/2, from a start close by."""
    goal, values, shape = [mp.mpf(float(t)) for t in z], [mp.mpf(float(t)) for t in x], (len(z),)
    for _ in range(30):
        values = [t - v for t, v in zip(goal, _through(g, values, shape)[0], strict=True)]
    return values


class TestInverse:
    @pytest.mark.parametrize("size", [1.0, 1e4, 1e8])
    @pytest.mark.parametrize("activation", [nn.Identity(), nn.ReLU(), nn.ELU(), nn.Tanh(), Sine(2.0)], ids=str)
    def test_biases_that_cancel_do_not_fool_it(self, activation, size):
        """Trap: an allowance of ||x|| + ||g(x)|| + ||z|| knows nothing of 1e8 - 1e8."""
        g = cancelling(activation, size)
        block, z = ResidualBlock(g), normal(8, 3, seed=1)
        found = block.solve(z)
        assert found.converged.all()
        for i in range(len(z)):
            error = distance(found.x[i], inverse(g, z[i], found.x[i]))
            assert error <= found.error_bound[i]
            assert found.error_bound[i] <= 1e-10 * max(1, size / 10)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize(("kind", "lipschitz"), [("mlp", 0.5), ("mlp", 0.97), ("conv", 0.9), ("biased", 0.9)])
    def test_every_precision_meets_its_default(self, kind, lipschitz, dtype):
        torch.manual_seed(0)
        g, shape = contractive_mlp(4, (16, 16), lipschitz=lipschitz), (4,)
        if kind == "conv":
            g, shape = contractive_convnet(1, 4, lipschitz=lipschitz), (1, 4, 4)
        block = rouse_(ResidualBlock(g)).eval().to(dtype)
        if kind == "biased":
            with torch.no_grad():
                block.g[-1].bias.fill_(300.0)
        z = (3 * normal(10, *shape, seed=1)).to(dtype)
        found = block.solve(z)
        assert found.converged.all()
        g, constant = unconstrained_copy(block.g).double(), block.bound(shape).value
        alone = lambda x, rows: g(x)  # noqa: E731
        truth = solve(alone, z.double(), lipschitz=constant, tolerance=1e-9, solver=Anderson(), reference=alone)
        error = (found.x.double() - truth.x).flatten(1).norm(dim=1)
        assert (error <= found.error_bound + truth.error_bound).all()
        if kind != "biased":
            assert (found.error_bound <= default_tolerance(z, constant)).all()

    def test_what_underflows_is_not_called_exact(self):
        """Trap: the squares of 1e-170 are zero, and so would be every norm and every error."""
        block = linear_block(0.5 * torch.linalg.qr(normal(3, 3))[0])
        z = 1e-170 * normal(4, 3, seed=1)
        found = block.solve(z, tolerance=1e-100)
        truth = torch.linalg.solve(torch.eye(3, dtype=DOUBLE) + block.g[0].weight, 1e170 * z.T).T
        error = (1e170 * found.x - truth).norm(dim=1)
        assert (1e170 * found.error_bound >= error).all()
        assert (found.error_bound > 0).all()

    def test_a_slope_that_underflows_is_rounded_up(self):
        """Later layers may be large."""
        assert 1e200 * (1e-200 * LinearBound(1e-200)) != LinearBound()
        state = TrackedState(torch.zeros(1, 1), LinearBound(1e-200), LinearBound(1e-200))
        assert state.then(torch.zeros(1, 1), 1e-200, LinearBound()).size.slope > 0

    def test_what_overflows_is_not_called_proven(self):
        g = nn.Sequential(nn.Linear(2, 2))
        with torch.no_grad():
            g[0].bias.fill_(3e38)
            g[0].weight.mul_(0.1)
        found = ResidualBlock(constrain_(g, 0.5)).eval().solve(torch.full((1, 2), -3e38))
        assert not found.x.isfinite().all()
        assert not found.converged.any()

    def test_a_context_counts(self):
        """The embedding of 1e8 goes through a ReLU and is taken away again by the bias behind it."""
        torch.manual_seed(0)
        first, rest, embed = nn.Linear(3, 8), nn.Linear(8, 3), nn.Linear(1, 8, bias=False)
        g = Conditioned(first, embed, nn.Sequential(nn.ReLU(), rest)).double().requires_grad_(False)
        for layer in (first, rest):
            layer.weight.mul_(0.7 / torch.linalg.matrix_norm(layer.weight, 2))
        embed.weight.abs_()
        context, z = torch.full((8, 1), 1e8, dtype=DOUBLE), normal(8, 3, seed=1)
        rest.bias.copy_(-(embed(context[:1]) @ rest.weight.T)[0])
        found = ResidualBlock(g).solve(z, context)
        assert found.converged.all()
        plain = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), rest).double().requires_grad_(False)
        for i in range(len(z)):
            x, shift = [mp.mpf(float(t)) for t in found.x[i]], embed(context[i])
            for _ in range(30):
                h = [v + mp.mpf(float(s)) for v, s in zip(_times(first.weight, x, first.bias), shift, strict=True)]
                y = _through(nn.Sequential(*list(plain)[1:]), h, (8,))[0]
                x = [mp.mpf(float(t)) - v for t, v in zip(z[i], y, strict=True)]
            assert distance(found.x[i], x) <= found.error_bound[i] <= 1e-4


class TestFastPaths:
    @pytest.mark.parametrize("size", [1.0, 1e8])
    @pytest.mark.parametrize("proof", ["forward", "residual"])
    @pytest.mark.parametrize("activation", [nn.ELU(), nn.Identity()], ids=str)
    def test_an_inverter_is_not_fooled_either(self, activation, proof, size):
        g = cancelling(activation, size)
        arithmetic = Arithmetic("float32", "native", graph=False, proof=proof)
        z = normal(6, 3, seed=1)
        inverter = Inverter(ResidualBlock(g), z, tolerance=None, arithmetic=arithmetic)
        assert not inverter.reason
        found = inverter.attempt(z, 1)
        assert found.converged.all()
        for i in range(len(z)):
            error = distance(found.x[i], inverse(g, z[i], found.x[i]))
            assert error <= found.largest_block_bound[i] <= 1e-10 * max(1, size / 10)
            assert error <= found.composed_bound[i]

    @pytest.mark.parametrize("size", [1.0, 1e8])
    def test_on_a_cpu_it_is_the_same_proof(self, size, monkeypatch):
        g, z, taken = cancelling(nn.ELU(), size), normal(6, 3, seed=1), []
        block = ResidualBlock(g)
        monkeypatch.setattr(residual, "solve_fixed_point", lambda *a, **k: taken.append(k) or solve(*a, **k))
        with torch.no_grad():
            x = Decoder()(block, z)
        assert taken[0]["rounding"] == block.rounding((3,))
        for i in range(len(z)):
            assert distance(x[i], inverse(g, z[i], x[i])) <= 1e-10 * max(1, size / 10)


CLOSED = {
    "actnorm": lambda: actnorm([1e8, -1e8, 3.0], [0.0, 1.0, -1.0]),
    "actnorm of all sizes": lambda: actnorm([1e4, 0.0, -1e-4], [18.0, -18.0, 0.0]),
    "standardise": lambda: Standardise(torch.tensor([1e8, 0.3], dtype=DOUBLE), torch.tensor([1e-6, 1.0], dtype=DOUBLE)),
    "mixing": lambda: mixing(InvertibleConv1x1(5), 3.0),
    "mixing far from a rotation": lambda: mixing(InvertibleConv1x1(5), 20.0),
    "principal axes": lambda: mixing(PrincipalAxes(3), 2.0),
    "logit": lambda: Logit(256, 0.05),
    "logit with narrow ends": lambda: Logit(1.0, 1e-9),
}


def actnorm(shift, log_scale):
    layer = ActNorm(3).double().requires_grad_(False).eval()
    layer.shift.copy_(torch.tensor(shift, dtype=DOUBLE))
    layer.log_scale.copy_(torch.tensor(log_scale, dtype=DOUBLE))
    return layer


def mixing(layer, size):
    torch.manual_seed(0)
    layer = layer.double().requires_grad_(False).eval()
    layer.factors.copy_(size * torch.randn(layer.channels, layer.channels))
    layer.factors.diagonal().copy_(torch.linspace(-2, 2, layer.channels))
    return layer


def solution_of(t, z):
    """The x with F(x) = z, in fifty digits, for z of shape (channels,)."""
    z = [mp.mpf(float(v)) for v in z]
    match t:
        case ActNorm():
            return [
                v * mp.exp(-mp.mpf(s.item())) - mp.mpf(b.item())
                for v, s, b in zip(z, t.log_scale, t.shift, strict=True)
            ]
        case Standardise():
            return [v * mp.mpf(s.item()) + mp.mpf(m.item()) for v, s, m in zip(z, t.std, t.mean, strict=True)]
        case Logit():
            alpha, levels = mp.mpf(t.alpha), mp.mpf(t.levels)
            return [(1 / (1 + mp.exp(-v)) - alpha) / ((1 - 2 * alpha) / levels) for v in z]
    n, factors = t.channels, [[mp.mpf(v) for v in row] for row in t.factors.tolist()]
    lower = mp.matrix(n, n)
    upper = mp.matrix(n, n)
    for i in range(n):
        for j in range(n):
            lower[i, j] = mp.mpf(i == j) if j >= i else factors[i][j]
            upper[i, j] = factors[i][j] if j > i else mp.mpf(0)
        upper[i, i] = mp.mpf(t.sign[i].item()) * mp.exp(factors[i][i])
    product = lower * upper
    weight = mp.matrix([[product[i, j] for j in range(n)] for i in t.permutation.tolist()])
    return list(mp.lu_solve(weight, mp.matrix(z)))


class TestClosedForms:
    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
    @pytest.mark.parametrize("size", [1e-6, 1.0, 30.0])
    @pytest.mark.parametrize("name", CLOSED)
    def test_no_inverse_is_further_off_than_its_bound(self, name, size, dtype):
        """Trap: (x + 1e8) - 1e8, or a matrix whose factors are large, with an allowance of a part of z."""
        t = CLOSED[name]()
        channels = t.channels if hasattr(t, "channels") else len(t.mean) if isinstance(t, Standardise) else 4
        z = (size * normal(6, channels, seed=1)).to(dtype)
        found = t.solve(z)
        proven = torch.isfinite(found.error_bound)
        assert proven.all() or name == "mixing far from a rotation"
        for i in range(len(z)):
            assert distance(found.x[i], solution_of(t, z[i])) <= found.error_bound[i]

    def test_factors_that_cancel_count(self):
        """W is far smaller than L and U here; an evaluation is off by nearly as much as its bound."""
        t, worst = mixing(InvertibleConv1x1(3), 9.0), 0.0
        error = t.rounding((3, 2, 2))
        for seed in range(20):
            x = 0.01 * normal(1, 3, 2, 2, seed=seed)
            y = t.reference(x)[0].flatten(1)
            expected = [column(t, x[0].flatten(1)[:, i]) for i in range(4)]
            off = distance(y.T, [v for values in expected for v in values])
            assert off <= error.relative * x.norm() + error.absolute
            worst = max(worst, off / float(error.relative * x.norm() + error.absolute))
        assert worst > 1e-3

    def test_what_only_moves_numbers_is_exact(self):
        for t, shape in ((Squeeze(), (4, 2, 2)), (Reverse(), (3,)), (Flatten((2, 2)), (4,))):
            assert t.solve(normal(2, *shape)).error_bound.tolist() == [0, 0]

    def test_a_logit_beyond_its_ends_is_proven_in_float32_too(self):
        found = Logit(256).solve(torch.tensor([[0.0, 60.0], [-300.0, 5.0]]))
        assert found.converged.all()
        assert found.error_bound.max() < 1e-3


def column(t, x):
    """F(x) of one position in fifty digits."""
    values = [mp.mpf(v.item()) for v in x]
    lower, upper = t.factors.tril(-1) + torch.eye(3), t.factors.triu(1)
    inner = _times(upper, values, None)
    inner = [
        v + mp.mpf(s.item()) * mp.exp(mp.mpf(f.item())) * x
        for v, s, f, x in zip(inner, t.sign, t.factors.diagonal(), values, strict=True)
    ]
    outer = _times(lower, inner, None)
    return [outer[i] for i in t.permutation.tolist()]


def test_the_beta_of_a_lipswish_has_no_jump():
    """Beyond 20 torch's softplus returns its input, 2e-9 off: more than an inverse's bound allows."""
    raw = torch.tensor([19.9, 20.1, 24.8], dtype=torch.float64)
    exact = torch.tensor([float(mp.log1p(mp.exp(mp.mpf(v)))) for v in raw.tolist()], dtype=torch.float64)
    torch.testing.assert_close(lipswish_beta(raw), exact, rtol=1e-15, atol=0)
