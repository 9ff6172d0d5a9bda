"""Splits, couplings and conditioners, against formulas; the laws of all transforms are in test_laws.py."""

import copy
import math
import threading
from dataclasses import dataclass
from decimal import Decimal, localcontext

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from iresnet import Chain, DiagonalNormal, Flow, ResidualBlock, Squeeze, certify, constrain_, contractive_mlp
from iresnet.transform import UNKNOWN
from iresnet.transforms import AdditiveCoupling, AffineCoupling, Alternate, Checkerboard, Halves, preserves_volume
from iresnet.transforms.conditioner import NormalisedConv2d, ResidualConvolutions, bottleneck, convnet, mlp
from iresnet.transforms.mixing import Reverse
from iresnet.transforms.per_sample import why_no_function
from tests.zoo import DOUBLE, dense_jacobian, normal, roused


class Says(nn.Module):
    """A conditioner that says the same whatever it is given."""

    def __init__(self, *values):
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values, dtype=DOUBLE))

    def forward(self, x):
        return self.values.expand(len(x), -1)


def overwrite(module, inputs):
    inputs[0].mul_(2)


def linear(weight, bias=0.0):
    layer = nn.Linear(len(weight[0]), len(weight), dtype=DOUBLE)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight, dtype=DOUBLE))
        layer.bias.fill_(bias)
    return layer


class TestSplits:
    @pytest.mark.parametrize(
        ("split", "kept", "moved"),
        [
            (Halves(), [1, 2, 3], [4, 5]),
            (Halves(swapped=True), [4, 5], [1, 2, 3]),
            (Alternate(), [1, 3, 5], [2, 4]),
            (Alternate(swapped=True), [2, 4], [1, 3, 5]),
        ],
        ids=str,
    )
    def test_channels(self, split, kept, moved):
        x = torch.tensor([[1, 2, 3, 4, 5]])
        assert [part[0].tolist() for part in split.separate(x)] == [kept, moved]
        assert split.sizes(5) == (len(kept), len(moved))
        assert split.count_transformed((5, 2, 3)) == 6 * len(moved)
        assert torch.equal(split.join(*split.separate(x)), x)

    @pytest.mark.parametrize("swapped", [False, True])
    def test_a_checkerboard(self, swapped):
        split, x = Checkerboard(swapped), normal(2, 3, 3, 5)
        kept, moved = split.separate(x)
        board = torch.tensor([[(i + j) % 2 for j in range(5)] for i in range(3)]) == int(not swapped)
        assert torch.equal(moved, x * board)
        assert torch.equal(kept, x * ~board)
        assert split.count_transformed((3, 3, 5)) == 3 * int(board.sum())
        assert torch.equal(split.join(kept, moved), x)

    def test_a_sample_that_cannot_be_split_is_refused(self):
        with pytest.raises(ValueError, match=r"needs at least two channels, .* got samples of shape \(1,\)"):
            AdditiveCoupling(nn.Linear(1, 1))(torch.zeros(3, 1))
        with pytest.raises(ValueError, match=r"Checkerboard takes images .* got \(4,\)"):
            AdditiveCoupling(nn.Linear(4, 4), Checkerboard())(torch.zeros(3, 4))
        with pytest.raises(ValueError, match=r"Checkerboard takes images .* got \(2, 1, 1\)"):
            AdditiveCoupling(nn.Identity(), Checkerboard()).output_shape((2, 1, 1))


class TestCouplings:
    def test_an_affine_coupling_computes_its_formula(self):
        """s = 2 tanh(r / 2): e^s and t for each of two numbers."""
        coupling, x = AffineCoupling(Says(0.3, -1.0, 5.0, 7.0)), normal(6, 4)
        s = 2 * torch.tanh(torch.tensor([0.3, -1.0], dtype=DOUBLE) / 2)
        z, logdet = coupling.forward_and_logdet(x)
        expected = torch.cat([x[:, :2], x[:, 2:] * s.exp() + torch.tensor([5.0, 7.0], dtype=DOUBLE)], dim=1)
        torch.testing.assert_close(z, expected)
        torch.testing.assert_close(logdet, s.sum().expand(6))

    def test_an_additive_coupling_computes_its_formula_with_zero_logdet(self):
        coupling, x = AdditiveCoupling(linear([[2.0, 1.0]]), Halves()), normal(6, 3)
        z, logdet = coupling.forward_and_logdet(x)
        torch.testing.assert_close(z[:, 2], x[:, 2] + 2 * x[:, 0] + x[:, 1])
        assert torch.equal(z[:, :2], x[:, :2])
        assert logdet.tolist() == [0.0] * 6
        assert coupling.stretch((3,)).logdet == (0.0, 0.0)

    @pytest.mark.parametrize("norm", [0.0, 0.5, 1.0, 10.0])
    def test_the_lipschitz_constant_of_an_additive_coupling_is_exact(self, norm):
        """[[1, 0], [L, 1]] has the singular values (sqrt(L^2 + 4) +- L) / 2, one the inverse of the other."""
        coupling = AdditiveCoupling(linear([[norm]]))
        sigma = torch.linalg.svdvals(torch.tensor([[1.0, 0.0], [norm, 1.0]], dtype=DOUBLE))
        s = coupling.stretch((2,))
        assert s.forward == pytest.approx(float(sigma.max()), rel=1e-5)
        assert s.inverse == pytest.approx(1 / float(sigma.min()), rel=1e-5)
        assert s.forward >= float(sigma.max()) * (1 - 1e-12)

    def test_an_affine_coupling_has_no_lipschitz_constant(self):
        """dz2/dx1 grows with x2, so no constant that is stated could hold."""
        coupling = AffineCoupling(linear([[1.0], [0.0]]))
        slopes = [
            float(torch.linalg.matrix_norm(dense_jacobian(coupling, torch.tensor([[0.0, x2]], dtype=DOUBLE))[0], 2))
            for x2 in (1.0, 1e3, 1e6)
        ]
        assert slopes[0] < slopes[1] < slopes[2]
        assert slopes[2] > 1e5
        assert coupling.stretch((2,)).forward == coupling.stretch((2,)).inverse == math.inf

    @pytest.mark.parametrize("size", [1e3, -1e3])
    def test_the_scale_is_bounded_for_any_conditioner_output(self, size):
        coupling = AffineCoupling(Says(size, 0.0), max_log_scale=1.5)
        _, logdet = coupling.forward_and_logdet(normal(3, 2))
        assert logdet.tolist() == pytest.approx([math.copysign(1.5, size)] * 3)
        assert coupling.stretch((2,)).logdet == (-1.5, 1.5)

    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
    @pytest.mark.parametrize("kind", [AffineCoupling, AdditiveCoupling])
    def test_solve_reports_a_tight_error_bound(self, kind, dtype):
        """Against the solution in float64 for the same stored weights; the bound is no more than a few times it."""
        torch.manual_seed(0)
        coupling = roused(kind(mlp(2, 2 * kind.outputs, (16,)))).to(dtype)
        z = 50 * normal(200, 4).to(dtype)
        found, exact = coupling.solve(z), copy.deepcopy(coupling).double().inverse(z.double())
        error = (found.x.double() - exact.detach()).norm(dim=1)
        assert (error <= found.error_bound).all()
        assert found.converged.all()
        assert found.iterations.tolist() == [0] * 200
        if dtype == torch.float32:
            assert float(error.max()) > 1e-7
            assert float(found.error_bound.max()) < 2 * float(error.max())

    def test_the_error_bound_reveals_a_wrong_inverse(self):
        """The residual is that of the float64 reference: a solution that is off has an error bound that says so."""
        coupling = AffineCoupling(linear([[1.0], [0.5]]))
        right = coupling.invert_part
        coupling.invert_part = lambda transformed, h: right(transformed, h) + 1e-3
        assert float(coupling.solve(normal(5, 2)).error_bound.min()) >= 1e-3

    def test_an_infinite_code_has_an_infinite_error_bound(self):
        solution = AdditiveCoupling(linear([[1.0]])).solve(torch.tensor([[math.inf, 1.0]], dtype=DOUBLE))
        assert solution.error_bound.tolist() == [math.inf]
        assert solution.converged.tolist() == [False]

    def test_a_conditioner_is_never_inverted(self):
        """It may be anything: one that forgets most of what it is given."""
        coupling, x = AffineCoupling(nn.Sequential(nn.Linear(3, 1), nn.ReLU(), nn.Linear(1, 4))), normal(9, 5).float()
        torch.testing.assert_close(coupling.inverse(coupling(x)), x, atol=1e-5, rtol=1e-5)

    def test_a_context_reaches_a_conditioner_that_takes_one(self):
        class Told(nn.Module):
            def forward(self, x, context):
                return context

        z = AdditiveCoupling(Told())(torch.zeros(2, 2), torch.tensor([[1.0], [2.0]]))
        assert z.tolist() == [[0.0, 1.0], [0.0, 2.0]]

    def test_the_inverse_uses_batchnorm_in_eval_mode_and_does_not_change_it(self):
        torch.manual_seed(0)
        coupling = AdditiveCoupling(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))).train()
        x = 3 + normal(50, 4).float()
        coupling(x)
        before = coupling.conditioner[0].running_mean.clone()
        found = coupling.solve(normal(4, 4).float())
        assert torch.equal(coupling.conditioner[0].running_mean, before)
        assert coupling.conditioner.training
        assert coupling.conditioner[0].training
        torch.testing.assert_close(coupling.eval()(found.x), normal(4, 4).float(), atol=1e-5, rtol=0)

    def test_autocast_rounds_only_the_conditioner_output(self):
        """s in the map and in ln det are the same number, and the part that stays is not touched."""
        torch.manual_seed(0)
        coupling, x = AffineCoupling(nn.Linear(2, 4)), normal(5, 4).float()
        with torch.autocast("cpu", torch.bfloat16):
            z, logdet = coupling.forward_and_logdet(x)
        assert z.dtype == logdet.dtype == torch.float32
        assert torch.equal(z[:, :2], x[:, :2])
        h = coupling.conditioner.to(torch.bfloat16)(x[:, :2].to(torch.bfloat16)).float()
        torch.testing.assert_close(logdet, (2 * torch.tanh(h[:, :2] / 2)).sum(1))

    def test_the_layout_of_convolutions_is_kept(self):
        torch.manual_seed(0)
        coupling = roused(AffineCoupling(convnet(2, 4, 8))).eval()
        x = normal(3, 4, 4, 4).float()
        expected = coupling(x)
        z = coupling.to(memory_format=torch.channels_last)(x)
        assert z.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(z, expected)

    @pytest.mark.parametrize(
        ("kind", "sentence"),
        [
            (
                AffineCoupling,
                r"of this AffineCoupling must return shape \(5, 4\), 2 for each .* got \(5, 3\)",
            ),
            (AdditiveCoupling, r"of this AdditiveCoupling must return shape \(5, 2\), 1 for .* 2 outputs"),
        ],
    )
    def test_a_conditioner_with_the_wrong_output_size_is_refused(self, kind, sentence):
        with pytest.raises(ValueError, match=sentence):
            kind(nn.Linear(2, 3))(torch.zeros(5, 4))

    @pytest.mark.parametrize("largest", [0.0, -1.0, math.inf])
    def test_a_max_log_scale_that_is_not_positive_and_finite_is_refused(self, largest):
        with pytest.raises(ValueError, match="max_log_scale must be positive and finite; got"):
            AffineCoupling(nn.Linear(1, 2), max_log_scale=largest)


@dataclass(frozen=True)
class Twice(Halves):
    """A user's split, whose two parts do not make up the whole."""

    def join(self, kept, transformed):
        return super().join(2 * kept, transformed)


def shadowed():
    split = Halves()
    object.__setattr__(split, "join", Twice().join)
    return split


class Overwriting(nn.Linear):
    def forward(self, x):
        return super().forward(x.zero_())


def overwritten(*sizes):
    layer = nn.Linear(*sizes)
    layer.register_forward_pre_hook(lambda m, inputs: (inputs[0].zero_(),))
    return layer


class TestInPlace:
    """Trap: a conditioner that begins in place changed the part that is kept, and so the map, without a determinant."""

    @pytest.mark.parametrize("kind", [AdditiveCoupling, AffineCoupling])
    @pytest.mark.parametrize("split", [Halves(), Checkerboard()], ids=str)
    def test_the_kept_part_stays_as_it_is(self, kind, split):
        kept = split.sizes(2)[0]
        inside = nn.Sequential(nn.ELU(inplace=True), nn.Conv2d(kept, kind.outputs * kept, 1))
        coupling, x = kind(inside, split).double().eval(), normal(3, 2, 2, 2)
        before = x.clone()
        with torch.no_grad():
            z, logdet = coupling.forward_and_logdet(x)
        assert torch.equal(x, before)
        assert torch.equal(split.separate(z)[0], split.separate(x)[0])
        found = coupling.solve(z)
        assert bool(((found.x - x).flatten(1).norm(dim=1) <= found.error_bound).all())
        jacobian = dense_jacobian(coupling, x)
        torch.testing.assert_close(logdet, torch.linalg.slogdet(jacobian).logabsdet)

    @pytest.mark.parametrize("conditioner", [Overwriting, overwritten])
    def test_the_kept_part_of_a_users_own_conditioner_stays_as_it_is(self, conditioner):
        coupling, x = AdditiveCoupling(conditioner(1, 1)).eval(), normal(3, 2).float()
        z = coupling(x.clone()).detach()
        assert torch.equal(z[:, 0], x[:, 0])
        assert torch.equal(coupling.inverse(z)[:, 0], x[:, 0])

    def test_a_context_stays_as_it_is(self):
        g = contractive_mlp(2, (8,), context=3)
        g.embed = nn.Sequential(nn.ELU(inplace=True), nn.Linear(3, 8))
        block, x, c = ResidualBlock(g).double().eval(), normal(5, 2), normal(5, 3, seed=1)
        before = c.clone()
        with torch.no_grad():
            found = block.solve(block(x, c), c)
        assert torch.equal(c, before)
        assert bool(((found.x - x).norm(dim=1) <= found.error_bound).all())


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.rand_like(x)


class TestUsersOwn:
    """Trap: a split is no module, so that nothing verified its class."""

    @pytest.mark.parametrize(
        "make", [lambda s: AdditiveCoupling(linear([[0.5]]), s), lambda s: AffineCoupling(mlp(1, 2, (4,)).double(), s)]
    )
    @pytest.mark.parametrize("split", [Twice, shadowed])
    def test_nothing_is_proven_with_a_users_split(self, make, split):
        coupling, z = make(split()), normal(3, 2)
        chain = Chain(coupling, ResidualBlock(contractive_mlp(2, (4,))).double())
        reason = f"{type(coupling.split).__name__} is not a split of this library"
        assert torch.equal(coupling.forward_and_logdet(z)[0][:, :1], 2 * z[:, :1])
        for found in (coupling.solve(z), chain.solve(z)):
            assert not found.proven
            assert reason in found.reason
            assert torch.isinf(found.error_bound).all()
        certificate = certify(chain)
        assert not certificate.passed
        assert reason in certificate.summary()
        assert Flow(chain, DiagonalNormal(2)).proof_status((2,)) == (False, False)
        assert not preserves_volume(coupling)
        assert coupling.stretch((2,)) == UNKNOWN

    @pytest.mark.parametrize(
        ("conditioner", "reason"),
        [
            (lambda: torch.fx.symbolic_trace(Noisy(2, 2)), "Noisy is a user's own layer"),
            (lambda: constrain_(nn.Sequential(Noisy(2, 2)), 0.5), "Noisy is a user's own layer"),
            (lambda: nn.FractionalMaxPool2d(1, output_size=2), "FractionalMaxPool2d is a different function"),
        ],
    )
    def test_code_of_a_users_own_in_a_class_of_torch_proves_nothing(self, conditioner, reason):
        coupling = AdditiveCoupling(conditioner()).eval()
        found = coupling.solve(normal(3, 4, 2, 2).float())
        assert not found.proven
        assert reason in found.reason

    @pytest.mark.parametrize(
        ("layer", "reason"),
        [
            (lambda: nn.BatchNorm1d(8, track_running_stats=False), "may mix the samples of a batch"),
            (lambda: nn.Softmax(dim=0), "may mix the samples of a batch"),
            (lambda: nn.ConstantPad2d((0, 0, 1, -1), 0.0), "may mix the samples of a batch"),
            (lambda: nn.Flatten(0), "may mix the samples of a batch"),
            (lambda: nn.GLU(dim=0), "may mix the samples of a batch"),
            (lambda: nn.LayerNorm((6, 8)), "may mix the samples of a batch"),
            (lambda: nn.TransformerEncoderLayer(8, 2, 16), "is not a layer that is known"),
            (lambda: nn.RNN(8, 8), "is not a layer that is known"),
        ],
    )
    def test_layers_of_torch_that_mix_the_samples_of_a_batch_prove_nothing(self, layer, reason):
        """Such a likelihood changed by up to a nat with the other rows, and was reported as proven, without a bias."""
        coupling = AffineCoupling(nn.Sequential(nn.Linear(2, 8), layer(), nn.Linear(8, 4))).eval()
        assert reason in why_no_function(coupling.conditioner)
        flow = Flow(Chain(coupling), DiagonalNormal(4)).eval()
        assert flow.proof_status((4,)) == (False, False)
        assert reason in certify(Chain(coupling, ResidualBlock(contractive_mlp(4, (4,))))).summary()

    @pytest.mark.parametrize(
        "lead",
        [
            [],
            [nn.Linear(3, 3), nn.ReLU()],
            [nn.GroupNorm(1, 3), nn.PReLU(), nn.MaxPool1d(1)],
            [nn.Unflatten(1, (3, 1)), nn.Conv1d(3, 3, 1), nn.Flatten()],
            [nn.Sequential(nn.Linear(3, 3))],
        ],
        ids=["first", "later", "pooled", "flattened", "nested"],
    )
    @pytest.mark.parametrize("wrap", [nn.Sequential, AveragedModel], ids=["plain", "average"])
    def test_a_convolution_that_would_take_the_batch_for_channels_is_refused(self, lead, wrap):
        """Torch takes four vectors for one sample of four channels."""
        coupling = AdditiveCoupling(wrap(nn.Sequential(*lead, nn.Conv1d(4, 4, 3, padding=1))))
        with pytest.raises(ValueError, match=r"Conv1d needs 3 axes.*got \(4, 3\).* take the batch for channels"):
            coupling(torch.zeros(4, 6))
        unflattened = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 1, 3, padding=1), nn.Flatten())
        assert AdditiveCoupling(unflattened)(torch.zeros(4, 6)).shape == (4, 6)

    def test_nor_may_an_embedding_take_the_contexts_for_channels(self):
        g = contractive_mlp(2, (4,), context=3)
        g.embed = nn.Sequential(nn.Conv1d(5, 5, 3, padding=1), nn.Linear(3, 4))
        flow = Flow(Chain(ResidualBlock(g)), DiagonalNormal(2)).eval()
        with pytest.raises(ValueError, match=r"Conv1d needs 3 axes.*got \(5, 3\).* take the batch for channels"):
            flow(torch.zeros(5, 2), torch.zeros(5, 3))

    @pytest.mark.parametrize(
        "layers",
        [[nn.PixelShuffle(2), nn.Linear(6, 6), nn.PixelUnshuffle(2)], [nn.InstanceNorm2d(4, affine=True)]],
        ids=["pixels", "norm"],
    )
    def test_nor_may_other_layers_of_channels(self, layers):
        coupling = AdditiveCoupling(nn.Sequential(*layers))
        with pytest.raises(ValueError, match=r"needs 4 axes.*got \(4, 2, 3\).* take the batch for channels"):
            coupling(torch.zeros(4, 4, 3))
        image = AdditiveCoupling(
            nn.Sequential(nn.InstanceNorm2d(4, affine=True), nn.PixelShuffle(2), nn.PixelUnshuffle(2))
        )
        assert image(torch.zeros(2, 8, 4, 4)).shape == (2, 8, 4, 4)

    def test_a_sequence_with_its_own_forward_may_have_any_axes_inside(self):
        class OneChannel(nn.Sequential):
            def forward(self, x):
                return super().forward(x[:, None])[:, 0]

        coupling = AdditiveCoupling(nn.Sequential(OneChannel(nn.Conv1d(1, 1, 3, padding=1)), nn.Linear(3, 3)))
        assert coupling(torch.zeros(4, 6)).shape == (4, 6)

    def test_an_embedding_that_mixes_contexts_proves_nothing(self):
        g = contractive_mlp(2, (4,), context=3)
        flow = Flow(Chain(ResidualBlock(g)), DiagonalNormal(2)).eval()
        assert flow.proof_status((2,)) == (True, True)
        g.embed = nn.Sequential(g.embed, nn.BatchNorm1d(4, track_running_stats=False)).eval()
        assert flow.proof_status((2,)) == (False, False)

    @pytest.mark.parametrize(
        "conditioner",
        [
            lambda: nn.Sequential(
                nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Softmax(-1), nn.LayerNorm(4), nn.ZeroPad1d(1), nn.Linear(6, 1)
            ),
            lambda: constrain_(nn.Sequential(nn.Linear(1, 4), nn.ReLU(inplace=True), nn.Linear(4, 1)), 0.5),
            lambda: nn.Sequential(nn.Linear(1, 4), nn.Dropout(), nn.GLU(), nn.Flatten(), nn.Linear(2, 1)),
        ],
    )
    def test_layers_that_treat_every_sample_alone_are_known(self, conditioner):
        assert AdditiveCoupling(conditioner()).eval().solve(normal(3, 2).float()).proven

    @pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
    def test_a_conditioner_that_overwrites_its_input_does_not_change_what_is_kept(self, compiled):
        """Compiled code took the overwritten part, without a word."""
        hooked = nn.Linear(1, 1).double()
        hooked.register_forward_pre_hook(overwrite)
        for conditioner in (Overwriting(1, 1).double(), hooked):
            coupling, x = AdditiveCoupling(conditioner).eval(), normal(3, 2)
            forward = torch.compile(coupling.forward, backend="eager") if compiled else coupling.forward
            assert torch.equal(forward(x.clone())[:, 0], x[:, 0])

    @pytest.mark.parametrize("split", [Halves(), Halves(swapped=True), Alternate(), Checkerboard()], ids=str)
    def test_the_splits_of_this_library_are_known(self, split):
        coupling = AdditiveCoupling(
            nn.Conv2d(2, 2, 1) if isinstance(split, Checkerboard) else nn.Conv2d(1, 1, 1), split
        )
        assert coupling.solve(normal(2, 2, 2, 2).float()).proven
        assert preserves_volume(coupling)

    @pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
    def test_a_conditioner_may_hold_a_lock(self, training):
        conditioner = mlp(1, 2, (4,))
        conditioner.lock = threading.Lock()
        coupling, x = AffineCoupling(conditioner).train(training), normal(3, 2).float()
        found = coupling.solve(coupling(x).detach())
        assert found.proven
        torch.testing.assert_close(found.x, x)

    def test_the_rounding_of_a_large_scale_counts(self):
        """Trap: exp(s) has an error of |s| units, and s may be far from 0 if max_log_scale is large."""
        worst = Decimal(0)
        for r in torch.linspace(-700, 700, 200, dtype=DOUBLE).tolist():
            coupling = AffineCoupling(linear([[0.0], [0.0]]), max_log_scale=1000).eval()
            with torch.no_grad():
                coupling.conditioner.bias[0] = r
            found = coupling.solve(torch.tensor([[0.3, 1.7e6]], dtype=DOUBLE))
            assert found.proven
            with localcontext() as context:
                context.prec = 60
                e = (Decimal(r) / 500).exp()
                exact = Decimal("1.7e6") * (1000 * (1 - e) / (1 + e)).exp()  # exp(-s), s = 1000 tanh(r / 1000)
                error = abs(Decimal(found.x[0, 1].item()) - exact)
                worst = max(worst, error / Decimal(found.error_bound.item()))
        assert worst < 1

    def test_a_scale_that_is_not_positive_has_no_bound(self):
        coupling = AffineCoupling(mlp(1, 2, (4,)).double())
        coupling.max_log_scale = -1.0
        found = coupling.solve(normal(3, 2))
        assert (found.proven, found.reason) == (False, "max_log_scale must be positive; got -1.0.")
        assert coupling.stretch((2,)) == UNKNOWN


class TestConditioners:
    def test_conditioners_have_the_expected_number_of_parameters(self):
        """A residual block 2-64-64-64-2 has 8,642 parameters, the conditioner of a coupling of two numbers 64 fewer."""
        assert sum(p.numel() for p in mlp(1, 2).parameters()) == 8642 - 64
        c, width = 12, 512
        weights = 9 * (c // 2) * width + width * width + 9 * width * c
        assert sum(p.numel() for p in convnet(6, 12).parameters()) == weights + 4 * width + c

    @pytest.mark.parametrize(
        ("net", "shape"),
        [(mlp(2, 6), ()), (convnet(2, 6, 4), (4, 4)), (ResidualConvolutions(2, 6, 4, 2), (4, 4))],
        ids=["mlp", "conv", "residual"],
    )
    def test_conditioners_start_at_zero(self, net, shape):
        x = normal(3, 2, *shape).float()
        assert not net.eval()(x).any()
        assert roused(net)(x).any()

    def test_every_residual_block_is_connected_to_the_output_by_its_own_convolution(self):
        """Real NVP adds up 1x1 convolutions of the states before, between and after the blocks."""
        torch.manual_seed(0)
        net, x = ResidualConvolutions(2, 2, 4, blocks=2).eval(), normal(3, 2, 4, 4).float()
        states = [net.first(x)]
        for block in net.blocks:
            states.append(states[-1] + block(states[-1]))
        roused(net.last)
        expected = net.last(sum(skip(y) for skip, y in zip(net.skips, states, strict=True)))
        torch.testing.assert_close(net(x), expected)
        assert len(net.skips) == 3

    def test_a_normalised_convolution_is_a_convolution_and_an_actnorm(self):
        torch.manual_seed(0)
        layer, x = NormalisedConv2d(2, 3, 3), normal(40, 2, 5, 5).float()
        first = layer(x).detach()  # sets the ActNorm by this batch
        assert float(first.transpose(0, 1).flatten(1).std(dim=1).sub(1).abs().max()) < 1e-3
        roused(layer)
        torch.testing.assert_close(layer(x), layer.norm(layer.conv(x)), atol=1e-5, rtol=1e-5)

    def test_a_strided_bottleneck_undoes_the_squeeze(self):
        """i-RevNet's branch with stride 2 is a function of the image before it was squeezed."""
        torch.manual_seed(0)
        net, image = bottleneck(3, 12, stride=2).eval(), normal(2, 3, 8, 8).float()
        assert torch.equal(net(Squeeze()(image)), net[1:](image))
        assert net(Squeeze()(image)).shape == (2, 12, 4, 4)

    @pytest.mark.parametrize(
        ("make", "sentence"),
        [
            (lambda: mlp(1, 1, 64), r"hidden must list the widths of the hidden layers; got 64. Use hidden=\(64,\)."),  # type: ignore[arg-type]
            (lambda: mlp(0, 1), "inputs must be at least 1; got 0"),
            (lambda: mlp(1, 1, (3, 0)), r"hidden\[1\] must be at least 1; got 0"),
            (lambda: convnet(1, 1, 0), "width must be at least 1; got 0"),
            (lambda: convnet(1, 1, 4, (2,)), r"kernels must be odd, to keep the size of the image; got \(2,\)"),
            (lambda: ResidualConvolutions(1, 1, 4, 0), "blocks must be at least 1; got 0"),
            (lambda: bottleneck(1, 1, stride=3), "stride must be 1 or 2; got 3"),
        ],
    )
    def test_invalid_sizes_are_refused(self, make, sentence):
        with pytest.raises(ValueError, match=sentence):
            make()


class TestReverse:
    def test_it_reverses_the_channels_and_is_its_own_inverse(self):
        x = normal(2, 3, 4, 4)
        z, logdet = Reverse().forward_and_logdet(x)
        assert torch.equal(z, x[:, [2, 1, 0]])
        assert torch.equal(Reverse().inverse(z), x)
        assert logdet.tolist() == [0.0, 0.0]
