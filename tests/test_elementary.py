"""ActNorm, Squeeze, InjectivePad and Multiscale against dense Jacobians and exact inverses; what they refuse."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from iresnet.chain import Chain
from iresnet.fixed_point import ConvergenceError, Solution
from iresnet.multiscale import Multiscale
from iresnet.transform import Stretch, Transform
from iresnet.transforms.elementary import ActNorm, Flatten, InjectivePad, Squeeze

DOUBLE = torch.float64


def normal(*shape, seed=0, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def dense_logdet(transform, x):
    """ln |det| of the dense Jacobian, sample by sample."""

    def one(sample):
        jacobian = torch.autograd.functional.jacobian(lambda y: transform(y[None])[0].flatten(), sample)
        return torch.linalg.slogdet(jacobian.reshape(sample.numel(), sample.numel())).logabsdet

    return torch.stack([one(sample) for sample in x])


def random_actnorm(channels, seed=0):
    norm = ActNorm(channels).double().eval()
    with torch.no_grad():
        norm.shift.copy_(normal(channels, seed=seed))
        norm.log_scale.copy_(0.5 * normal(channels, seed=seed + 1))
    return norm


def two_scales():
    stages = [Chain(Squeeze(), random_actnorm(4)), random_actnorm(2, seed=5), random_actnorm(1, seed=9)]
    return Multiscale(stages, input_shape=(1, 4, 4))


SHAPES = [(3,), (2, 4), (2, 4, 4), (2, 2, 2, 2)]


class TestActNorm:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_logdet_is_that_of_the_dense_jacobian(self, shape):
        norm, x = random_actnorm(shape[0]), normal(3, *shape)
        z, logdet = norm.forward_and_logdet(x)
        assert logdet.shape == (3,)
        torch.testing.assert_close(logdet, dense_logdet(norm, x))
        torch.testing.assert_close(z, norm(x))

    @pytest.mark.parametrize("shape", SHAPES)
    def test_inverse_undoes_the_map(self, shape):
        norm, x = random_actnorm(shape[0]), normal(3, *shape)
        torch.testing.assert_close(norm.inverse(norm(x)), x, atol=1e-14, rtol=1e-14)

    def test_a_tolerance_below_its_rounding_is_not_met(self):
        """Trap: every closed form had converged, whatever its error bound was."""
        actnorm = ActNorm(3).eval()
        with torch.no_grad():
            actnorm.log_scale.copy_(torch.tensor([-5.0, 0.0, 5.0]))
            actnorm.shift.copy_(torch.full((3,), 100.0))
        z = normal(4, 3).float()
        assert actnorm.solve(z).converged.all()
        assert actnorm.solve(z, tolerance=1.0).converged.all()
        assert not actnorm.solve(z, tolerance=1e-9).converged.any()

    def test_known_affine_map(self):
        norm = ActNorm(2).eval()
        with torch.no_grad():
            norm.shift.copy_(torch.tensor([1.0, -1.0]))
            norm.log_scale.copy_(torch.tensor([2.0, 4.0]).log())
        z, logdet = norm.forward_and_logdet(torch.tensor([[1.0, 2.0]]))
        torch.testing.assert_close(z, torch.tensor([[4.0, 4.0]]))
        torch.testing.assert_close(logdet, torch.tensor([math.log(8)]))

    @pytest.mark.parametrize("shape", SHAPES)
    def test_first_training_batch_gets_mean_zero_and_variance_one(self, shape):
        norm, x = ActNorm(shape[0]).double(), 5 + 3 * normal(50, *shape)
        rows = norm(x).transpose(0, 1).flatten(1)
        torch.testing.assert_close(rows.mean(1), torch.zeros(shape[0], dtype=DOUBLE), atol=1e-12, rtol=0)
        torch.testing.assert_close(rows.std(1, correction=0), torch.ones(shape[0], dtype=DOUBLE))

    def test_logdet_of_the_first_batch_is_that_of_the_initialised_map(self):
        norm, x = ActNorm(2).double(), 5 + 3 * normal(50, 2)
        _, logdet = norm.forward_and_logdet(x)
        torch.testing.assert_close(logdet, dense_logdet(norm, x))
        assert logdet[0] != 0

    def test_only_the_first_batch_counts(self):
        norm = ActNorm(2).double()
        norm(normal(50, 2))
        before = norm.shift.clone()
        norm(100 + normal(50, 2))
        assert torch.equal(norm.shift, before)

    @pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
    def test_no_initialisation_without_gradients(self, context):
        norm, x = ActNorm(2), 5 + normal(50, 2, dtype=torch.float32)
        with context():
            assert torch.equal(norm(x), x)
        assert not norm.initialised

    def test_no_initialisation_in_eval(self):
        norm, x = ActNorm(2).eval(), 5 + normal(50, 2, dtype=torch.float32)
        assert torch.equal(norm(x), x)
        assert not norm.initialised

    def test_explicit_initialisation_overwrites_and_returns_itself(self):
        norm = ActNorm(1).double()
        norm(normal(50, 1))
        assert norm.initialise_(7 + normal(50, 1)) is norm
        assert norm.shift.item() < -6

    def test_loading_never_initialises_again(self):
        trained = ActNorm(2).double()
        trained(5 + normal(50, 2))
        loaded = ActNorm(2).double().train()
        loaded.load_state_dict(trained.state_dict())
        loaded(normal(50, 2, seed=1))
        assert torch.equal(loaded.shift, trained.shift)
        assert torch.equal(loaded.log_scale, trained.log_scale)

    def test_loading_inside_a_chain_and_by_assignment(self):
        trained, loaded = (Chain(ActNorm(2), ActNorm(2)).double() for _ in range(2))
        trained(5 + normal(50, 2))
        loaded.load_state_dict(trained.state_dict(), assign=True)
        x = normal(50, 2, seed=1)
        assert torch.equal(loaded(x), trained(x))

    def test_loading_a_fresh_state_allows_initialisation(self):
        norm, fresh = ActNorm(2).double(), ActNorm(2).double()
        norm(5 + normal(50, 2))
        norm.load_state_dict(fresh.state_dict())
        assert abs(norm(5 + normal(50, 2)).mean().item()) < 1e-12

    def test_a_partial_state_leaves_the_flag_alone(self):
        norm = ActNorm(2).double()
        norm(5 + normal(50, 2))
        norm.load_state_dict({"shift": torch.zeros(2)}, strict=False)
        norm(5 + normal(50, 2))
        assert torch.equal(norm.shift, torch.zeros(2, dtype=DOUBLE))

    def test_a_copy_does_not_initialise_again(self):
        norm = ActNorm(2).double()
        norm(5 + normal(50, 2))
        twin = copy.deepcopy(norm)
        twin(normal(50, 2, seed=1))
        assert torch.equal(twin.shift, norm.shift)
        assert twin.shift is not norm.shift

    def test_an_average_made_before_the_first_batch_does_not_initialise_again(self):
        norm = ActNorm(2).double()
        average = torch.optim.swa_utils.AveragedModel(norm)
        norm(5 + normal(50, 2))
        average.update_parameters(norm)
        average.train()(normal(50, 2, seed=1))
        assert torch.equal(average.module.shift, norm.shift)

    @pytest.mark.parametrize("x", [torch.full((1, 2), 3.0), torch.full((8, 2, 3, 3), 0.1), torch.full((4, 2), 1e-44)])
    def test_a_batch_of_one_and_constant_channels_are_only_shifted(self, x):
        norm = ActNorm(2)
        z = norm(x)
        torch.testing.assert_close(z, torch.zeros_like(x))
        assert torch.equal(norm.log_scale, torch.zeros(2))

    def test_variation_within_rounding_counts_as_constant(self):
        x = torch.tensor([[1000.0, 1.0], [1000.0001, 2.0], [1000.0, 3.0]])
        norm = ActNorm(2).initialise_(x)
        assert norm.log_scale[0] == 0
        assert norm.log_scale[1] != 0

    def test_small_scales_are_normalised_too(self):
        torch.testing.assert_close(ActNorm(1).double()(1e-9 * normal(50, 1)).std(correction=0).item(), 1.0)

    def test_gradients_reach_both_parameters_and_the_input(self):
        norm, x = random_actnorm(2), normal(3, 2).requires_grad_()
        assert torch.autograd.gradcheck(lambda y, *_: norm.forward_and_logdet(y), (x, norm.shift, norm.log_scale))
        assert torch.autograd.gradcheck(lambda y, *_: norm.inverse(y), (x, norm.shift, norm.log_scale))

    def test_reference_is_in_float64_with_the_stored_weights(self):
        norm, x = random_actnorm(2).float(), normal(3, 2, dtype=torch.float32)
        expected = (x.double() + norm.shift.double()) * norm.log_scale.double().exp()
        assert torch.equal(norm.reference(x), expected)

    def test_stretch_is_exact(self):
        norm = random_actnorm(2)
        s, scale = norm.stretch((2, 3, 3)), norm.log_scale.exp()
        assert s.forward == pytest.approx(scale.max().item())
        assert s.inverse == pytest.approx(1 / scale.min().item())
        assert s.logdet == pytest.approx((9 * norm.log_scale.sum().item(),) * 2)
        assert norm.stretch().logdet == (-math.inf, math.inf)

    def test_compiles_to_one_graph_once_initialised(self):
        norm, x = ActNorm(2), normal(8, 2, dtype=torch.float32)
        norm(x)
        compiled = torch.compile(norm.forward_and_logdet, backend="eager", fullgraph=True)
        for got, expected in zip(compiled(x), norm.forward_and_logdet(x), strict=True):
            torch.testing.assert_close(got, expected)

    def test_compiled_before_the_first_batch_it_still_initialises_once(self):
        torch._dynamo.reset()
        norm = ActNorm(1).double()
        compiled = torch.compile(norm, backend="eager")
        assert abs(compiled(5 + normal(50, 1)).mean().item()) < 1e-12
        assert compiled(8 + normal(50, 1)).mean().item() > 1

    @pytest.mark.parametrize(
        ("x", "sentence"),
        [
            (torch.zeros(4, 3), r"x must have shape \(batch, 2, ...\) for ActNorm\(2\); got \(4, 3\). Build ActNorm"),
            (torch.zeros(2), "x must have a batch dimension"),
            (torch.zeros(0, 2), "x must hold at least one sample"),
            (torch.zeros(4, 2, dtype=torch.int64), "x must be a floating-point tensor"),
            (torch.tensor([[0.0, 1.0], [math.nan, 1.0]]), "x must be finite; sample 1 of 2"),
        ],
    )
    def test_bad_input_is_refused(self, x, sentence):
        with pytest.raises(ValueError, match=sentence):
            ActNorm(2)(x)

    def test_a_bad_code_and_a_bad_size_are_refused(self):
        with pytest.raises(ValueError, match=r"z must have shape \(batch, 2, ...\)"):
            ActNorm(2).inverse(torch.zeros(4, 3))
        with pytest.raises(ValueError, match="channels must be at least 1; got 0"):
            ActNorm(0)

    def test_a_bad_first_batch_does_not_change_the_state(self):
        norm = ActNorm(1)
        with pytest.raises(ValueError, match="finite"):
            norm(torch.tensor([[math.inf], [0.0]]))
        assert not norm.initialised
        assert norm(torch.tensor([[1.0], [3.0]])).tolist() == [[-1.0], [1.0]]


class TestSqueeze:
    def test_patches_become_channels(self):
        x = torch.arange(16.0).view(1, 1, 4, 4)
        assert Squeeze()(x)[0, :, 0, 0].tolist() == [0, 1, 4, 5]

    @given(factor=st.integers(2, 4), channels=st.integers(1, 3), height=st.integers(1, 3), width=st.integers(1, 3))
    @settings(max_examples=30, deadline=None)
    def test_the_inverse_is_exact_and_the_shape_is_output_shape(self, factor, channels, height, width):
        squeeze, x = Squeeze(factor), normal(2, channels, height * factor, width * factor)
        z = squeeze(x)
        assert tuple(z.shape[1:]) == squeeze.output_shape(tuple(x.shape[1:]))
        assert torch.equal(squeeze.inverse(z), x)

    def test_logdet_is_zero_as_is_that_of_the_dense_jacobian(self):
        x = normal(2, 1, 4, 4)
        z, logdet = Squeeze().forward_and_logdet(x)
        assert torch.equal(logdet, torch.zeros(2, dtype=DOUBLE))
        assert torch.equal(dense_logdet(Squeeze(), x), logdet)
        torch.testing.assert_close(z.flatten(1).norm(dim=1), x.flatten(1).norm(dim=1))

    def test_is_an_isometry_with_nothing_to_save(self):
        assert Squeeze().stretch() == Stretch(1.0, 1.0, (0.0, 0.0))
        assert Squeeze().state_dict() == {}

    @pytest.mark.parametrize("shape", [(1, 3, 5, 4), (1, 3, 4, 5), (1, 4), (1, 2, 3, 4, 4)])
    def test_odd_sizes_and_other_ranks_are_refused(self, shape):
        with pytest.raises(ValueError, match=r"height and width are multiples of 2; got .*\. Pad or crop"):
            Squeeze()(torch.zeros(shape))

    @pytest.mark.parametrize("shape", [(1, 3, 4, 4), (1, 4)])
    def test_a_code_of_the_wrong_shape_is_refused(self, shape):
        with pytest.raises(ValueError, match=r"z must have shape \(batch, 4 C, height, width\)"):
            Squeeze().inverse(torch.zeros(shape))

    def test_a_factor_of_one_is_refused(self):
        with pytest.raises(ValueError, match="factor must be at least 2; got 1"):
            Squeeze(1)


class TestInjectivePad:
    def test_no_channels_are_dropped_where_none_are_added(self):
        pad, z = InjectivePad(1), normal(3, 4)
        pad.channels = 0
        assert torch.equal(pad.solve(z).x, z)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_adds_zeros_and_takes_them_away(self, shape):
        pad, x = InjectivePad(5), normal(2, *shape)
        z = pad(x)
        assert tuple(z.shape[1:]) == pad.output_shape(shape)
        assert torch.equal(z[:, shape[0] :], torch.zeros_like(z[:, shape[0] :]))
        assert torch.equal(pad.inverse(z), x)

    def test_inverse_projects(self):
        pad, z = InjectivePad(2), normal(3, 4)
        projected = pad(pad.inverse(z))
        assert torch.equal(projected, z * torch.tensor([1, 1, 0, 0]))

    def test_a_code_off_its_image_shows_in_the_code_residual(self):
        z = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 3.0]])
        assert Chain(InjectivePad(1)).solve(z).code_residual.tolist() == [0, 3]

    def test_a_likelihood_is_refused(self):
        chain = Chain(InjectivePad(1), ActNorm(3))
        with pytest.raises(ValueError, match="channels is unbounded; got InjectivePad.1.. Leave it out of a flow"):
            chain.forward_and_logdet(torch.zeros(4, 2))

    def test_stretch_has_no_determinant(self):
        assert InjectivePad(1).stretch() == Stretch(1.0, 1.0, None)
        assert Chain(InjectivePad(1), ActNorm(3)).stretch((2,)).logdet is None

    def test_bad_input_is_refused(self):
        with pytest.raises(ValueError, match="channels must be at least 1; got 0"):
            InjectivePad(0)
        with pytest.raises(ValueError, match="z must have more than 3 channels"):
            InjectivePad(3).inverse(torch.zeros(1, 3))
        with pytest.raises(ValueError, match="batch dimension"):
            InjectivePad(3)(torch.zeros(3))


class Witness(Transform):
    """Doubles its input, remembers what it was called with, and reports a solve with an error of its own."""

    takes_context = True

    def __init__(self, error=0.0, converged=True):
        super().__init__()
        self.error, self.converged, self.calls = error, converged, []

    def forward(self, x, context=None):
        self.calls.append(context)
        return 2 * x

    def forward_and_logdet(self, x, context=None, *, estimator=None, generator=None):
        self.calls.append((context, estimator, generator))
        return 2 * x, torch.full((len(x),), math.log(2) * x[0].numel(), dtype=x.dtype)

    def inverse(self, z, context=None, *, tolerance=None, solver=None):
        self.calls.append((context, tolerance, solver))
        return z / 2

    def solve(self, z, context=None, *, tolerance=None, solver=None):
        bound = torch.full((len(z),), self.error, dtype=DOUBLE)
        steps = torch.full((len(z),), 7)
        return Solution(self.inverse(z, context), steps, bound, torch.full((len(z),), self.converged))

    def stretch(self, input_shape=None):
        return Stretch(2.0, 0.5, (0.0, 1.0), proven=False)


class TestMultiscale:
    def test_known_code(self):
        model = Multiscale([Witness(), Witness()], input_shape=(4,))
        assert model(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).tolist() == [[2, 4, 12, 16]]

    def test_logdet_is_that_of_the_dense_jacobian(self):
        model, x = two_scales(), normal(3, 1, 4, 4)
        z, logdet = model.forward_and_logdet(x)
        assert z.shape == (3, 16)
        assert logdet.shape == (3,)
        torch.testing.assert_close(z, model(x))
        torch.testing.assert_close(logdet, dense_logdet(model, x))

    @pytest.mark.parametrize("batch", [1, 5])
    def test_inverse_undoes_the_map(self, batch):
        model, x = two_scales(), normal(batch, 1, 4, 4)
        torch.testing.assert_close(model.inverse(model(x)), x, atol=1e-13, rtol=0)

    def test_one_stage_is_the_stage_flattened(self):
        model, x = Multiscale([Squeeze()], input_shape=(1, 4, 4)), normal(2, 1, 4, 4)
        assert torch.equal(model(x), Squeeze()(x).flatten(1))
        assert torch.equal(model.inverse(model(x)), x)

    def test_code_comes_apart_and_together(self):
        model = two_scales()
        z = normal(3, 16)
        parts = model.unflatten(z)
        assert [tuple(part.shape) for part in parts] == [(3, 2, 2, 2), (3, 1, 2, 2), (3, 1, 2, 2)]
        assert model.stage_shapes == ((1, 4, 4), (2, 2, 2), (1, 2, 2))
        assert torch.equal(model.flatten(parts), z)

    def test_first_part_is_the_first_half_after_the_first_stage(self):
        model, x = two_scales(), normal(3, 1, 4, 4)
        assert torch.equal(model.unflatten(model(x))[0], model[0](x)[:, :2])

    def test_context_and_options_reach_the_stages(self):
        witnesses = [Witness(), Witness()]
        model, x, context, given_ = Multiscale(witnesses, (2,)), torch.ones(1, 2), torch.ones(1, 1), torch.Generator()
        estimator, solver = object(), object()
        model(x, context)
        model.forward_and_logdet(x, context, estimator=estimator, generator=given_)
        model.inverse(x, context, tolerance=0.5, solver=solver)
        for witness in witnesses:
            assert witness.calls == [context, (context, estimator, given_), (context, 0.5, solver)]

    def test_solve_reports_three_numbers_and_composes_the_bounds(self):
        model = Multiscale([Witness(0.1), Witness(0.3), Witness(0.2)], input_shape=(4,))
        z = torch.arange(8.0).view(2, 4)
        s = model.solve(z)
        assert torch.equal(s.x, model.inverse(z))
        assert s.iterations.tolist() == [21, 21]
        assert s.largest_block_bound.tolist() == [0.3, 0.3]
        assert s.code_residual.tolist() == [0, 0]
        # last stage 0.2, then 0.3 + 0.2 / 2, then 0.1 + 0.4 / 2
        assert s.composed_bound.tolist() == pytest.approx([0.3, 0.3])
        assert s.converged.all()

    def test_one_stage_that_fails_makes_the_whole_unproven(self):
        model = Multiscale([Witness(), Witness(converged=False)], input_shape=(2,))
        assert not model.solve(torch.ones(1, 2)).converged.any()

    def test_an_inverse_that_fails_names_its_stage(self):
        class Failing(Witness):
            def inverse(self, z, context=None, *, tolerance=None, solver=None):
                raise ConvergenceError(self.solve(z), tolerance=1e-6, lipschitz=0.9)

            def solve(self, z, context=None, *, tolerance=None, solver=None):
                return Solution(z, torch.tensor([9]), torch.tensor([0.5]), torch.tensor([False]))

        with pytest.raises(ConvergenceError, match="stage 1 of 3"):
            Multiscale([Witness(), Failing(), Witness()], input_shape=(4,)).inverse(torch.ones(1, 4))

    def test_reference_is_float64(self):
        model, x = two_scales().float(), normal(2, 1, 4, 4, dtype=torch.float32)
        assert model.reference(x).dtype == DOUBLE
        torch.testing.assert_close(model.reference(x).float(), model(x))

    def test_stretch_holds_the_identity_on_the_half_that_stops(self):
        model = Multiscale([Witness(), Witness()], input_shape=(2,))
        assert model.stretch() == Stretch(4.0, 0.5, (0.0, 2.0), proven=False)

    def test_stretch_bounds_the_dense_jacobian(self):
        model, x = two_scales(), normal(1, 1, 4, 4)
        s = model.stretch((1, 4, 4))
        jacobian = torch.autograd.functional.jacobian(lambda y: model(y[None])[0], x[0]).reshape(16, 16)
        sigma = torch.linalg.svdvals(jacobian)
        assert sigma[0] <= s.forward * (1 + 1e-12)
        assert 1 / sigma[-1] <= s.inverse * (1 + 1e-12)
        assert s.logdet == pytest.approx((sigma.log().sum().item(),) * 2)

    def test_state_and_copy_keep_the_map(self):
        model, other, x = two_scales(), two_scales(), normal(2, 1, 4, 4)
        with torch.no_grad():
            model[1].shift.add_(1.0)
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(x), model(x))
        assert torch.equal(copy.deepcopy(model)(x), model(x))

    def test_a_padded_stage_makes_a_longer_code_and_refuses_a_likelihood(self):
        model, x = Multiscale([InjectivePad(1), Witness()], input_shape=(3,)), normal(2, 3)
        assert model.output_shape((3,)) == (4,)
        assert torch.equal(model.inverse(model(x)), x)
        assert model.stretch().logdet is None
        with pytest.raises(ValueError, match="unbounded"):
            model.forward_and_logdet(x)

    def test_compiles_to_one_graph(self):
        model, x = two_scales(), normal(2, 1, 4, 4)
        compiled = torch.compile(model.forward_and_logdet, backend="eager", fullgraph=True)
        for got, expected in zip(compiled(x), model.forward_and_logdet(x), strict=True):
            torch.testing.assert_close(got, expected)

    def test_bad_stages_are_refused(self):
        with pytest.raises(ValueError, match=r"even number of channels.*stage 0 of 2 ends with shape \(3, 4, 4\)"):
            Multiscale([ActNorm(3), ActNorm(1)], input_shape=(3, 4, 4))
        with pytest.raises(ValueError, match="stages must have at least one entry; got none"):
            Multiscale([], input_shape=(3,))
        with pytest.raises(ValueError, match="every stage must be a Transform; got Linear"):
            Multiscale([nn.Linear(2, 2)], input_shape=(2,))

    def test_bad_input_is_refused(self):
        model = two_scales()
        with pytest.raises(ValueError, match=r"x must have shape \(batch, 1, 4, 4\); got \(2, 1, 8, 8\)"):
            model(normal(2, 1, 8, 8))
        with pytest.raises(ValueError, match=r"z must have shape \(batch, 16\); got \(2, 12\)"):
            model.inverse(normal(2, 12))
        with pytest.raises(ValueError, match=r"input_shape must be \(1, 4, 4\) for this Multiscale; got \(3, 4, 4\)"):
            model.stretch((3, 4, 4))
        with pytest.raises(ValueError, match="parts must have the shapes.*one tensor per scale"):
            model.flatten(model.unflatten(normal(2, 16))[:2])


def test_representations_show_the_settings():
    assert [repr(t) for t in (ActNorm(2), Squeeze(3), InjectivePad(4))] == [
        "ActNorm(2)",
        "Squeeze(3)",
        "InjectivePad(4)",
    ]


def test_a_report_does_not_change_with_the_codes():
    """Trap: the inverse of a rearrangement was a view of the codes, and no error was proven of it."""
    z = torch.arange(8.0).reshape(2, 4)
    found = Flatten((2, 2)).solve(z)
    before = found.x.clone()
    z.zero_()
    assert torch.equal(found.x, before)
