"""Judging a model: against closed forms, integrals and counts; and every number with the error it has."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import iresnet
from iresnet import (
    ActNorm,
    Banach,
    Chain,
    Classifier,
    DiagonalNormal,
    Exact,
    Flow,
    Hybrid,
    Logit,
    Multiscale,
    ResidualBlock,
    Squeeze,
    Standardise,
    contractive_convnet,
    contractive_mlp,
    tighten_,
)
from iresnet.data import Dataset, Schema, subsample
from iresnet.data.corruptions import CORRUPTIONS
from iresnet.evaluate import (
    Tolerance,
    anomaly,
    auroc,
    confusion,
    corruption_detection,
    density,
    error,
    error_from_counts,
    evaluate,
    interpolate,
    inverse,
    log_likelihood,
    protocol,
    reconstruct,
    robustness,
)
from tests.zoo import DOUBLE, contraction, linear_block, normal, rouse_

FLOAT = torch.float32


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def table(rows, d, seed=0, classes=()):
    y = torch.arange(rows) % len(classes) if classes else None
    return Dataset(normal(rows, d, seed=seed, dtype=FLOAT), y, Schema((d,), classes=classes))


def images(rows=8, shape=(1, 4, 4), levels=5, classes=("a", "b", "c"), seed=0):
    x = torch.randint(levels, (rows, *shape), generator=seeded(seed)).to(torch.uint8)
    return Dataset(x, torch.arange(rows) % len(classes), Schema(shape, levels, classes=classes))


def image_hybrid(shape=(1, 4, 4), levels=5, classes=3):
    """Pixels, a squeeze, a block that bites, a head."""
    torch.manual_seed(0)
    code = Squeeze().output_shape(shape)
    block = ResidualBlock(contractive_convnet(code[0], 4, kernels=(3, 1), lipschitz=0.7))
    head = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))
    model = rouse_(Hybrid(Chain(Logit(levels), Squeeze(), block), DiagonalNormal(code), head)).eval()
    tighten_(model, shape)
    return model


def table_flow(d, blocks=2):
    torch.manual_seed(0)
    chain = Chain(
        *(t for _ in range(blocks) for t in (ActNorm(d), ResidualBlock(contractive_mlp(d, (8,), lipschitz=0.7))))
    )
    flow = rouse_(Flow(chain, DiagonalNormal(d), event_shape=(d,))).eval()
    tighten_(flow)
    return flow


@pytest.mark.parametrize("measure", [log_likelihood, density, error, inverse])
def test_a_tensor_is_no_dataset(measure):
    model = Hybrid(ActNorm(2), DiagonalNormal(2), nn.Linear(2, 3)).eval()
    with pytest.raises(ValueError, match=r"data must be a Dataset; got Tensor. .* data.Dataset\(x, None, data.Schema"):
        measure(model, torch.zeros(4, 2))


@pytest.mark.parametrize(
    "measure", [density, protocol, error, confusion, lambda model, data: robustness(model, data, 1.0)]
)
def test_means_that_would_leave_out_weights_are_refused(measure):
    data = images()
    with pytest.raises(ValueError, match="counts every sample once; the dataset has weights. Leave them out"):
        measure(image_hybrid(), replace(data, weights=torch.ones(len(data), dtype=torch.float64)))


class TestError:
    @pytest.mark.parametrize(
        ("wrong", "rows", "low", "high"),
        [
            (0, 10, 0.0, 27.7533),  # z^2 / (n + z^2)
            (10, 10, 72.2467, 100.0),
            (5, 10, 23.6593, 76.3407),
            (1, 20, 0.8881, 23.6131),
            (0, 1, 0.0, 79.3451),
        ],
    )
    def test_wilsons_interval(self, wrong, rows, low, high):
        e = error_from_counts(wrong, rows)
        assert (e.value, e.wrong, e.rows) == (100 * wrong / rows, wrong, rows)
        assert (e.low, e.high) == pytest.approx((low, high), abs=1e-3)

    @pytest.mark.parametrize(("wrong", "rows"), [(3, 360), (90, 200), (199, 200)])
    def test_its_ends_solve_the_score_equation(self, wrong, rows):
        """(p - e)^2 = z^2 e (1 - e) / n, and the error lies between them."""
        e = error_from_counts(wrong, rows)
        assert e.low < e.value < e.high
        for end in (e.low / 100, e.high / 100):
            assert (wrong / rows - end) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / rows, rel=1e-6)

    def known(self):
        """A classifier that says which column is largest."""
        data = Dataset(
            torch.eye(3)[[0, 1, 2, 0, 1, 2, 0]],
            torch.tensor([0, 1, 2, 1, 1, -1, -1]),
            Schema((3,), classes=tuple("abc")),
        )
        return Classifier(Chain(), nn.Identity()).eval(), data

    def test_rows_without_a_label_are_not_counted(self):
        e = error(*self.known())
        assert (e.wrong, e.rows, e.value) == (1, 5, 20.0)

    def test_the_confusion_has_true_classes_in_rows(self):
        assert confusion(*self.known()) == [[1, 0, 0], [1, 2, 0], [0, 0, 1]]

    def test_a_confusion_counts_every_labelled_row_once(self):
        model, data = image_hybrid(), images(40)
        counts, e = torch.tensor(confusion(model, data)), error(model, data)
        assert counts.sum() == e.rows == 40
        assert counts.trace() == 40 - e.wrong
        assert counts.sum(1).tolist() == torch.bincount(data.y).tolist()

    def test_logits_do_not_depend_on_the_chunks(self, monkeypatch):
        model, data = image_hybrid(), images(11)
        whole = iresnet.evaluate.logits(model, data)
        monkeypatch.setattr(iresnet.evaluate.classes, "CHUNK", 4)
        torch.testing.assert_close(iresnet.evaluate.logits(model, data), whole)
        torch.testing.assert_close(model.logits(data.x + 0.5).detach(), whole)

    def test_it_reads_as_a_sentence(self):
        assert str(error_from_counts(6, 360)) == "1.67 % (6 of 360; 95 % interval 0.77 to 3.59 %)"


def pixel_flow(levels=4, shape=(1, 1, 2)):
    """A density of two pixels that a numerical integral knows."""
    base = DiagonalNormal(shape)
    base.mean.fill_(0.3)
    base.log_scale.fill_(-0.2)
    return Flow(Logit(levels), base).eval()


def integral(flow, levels=4, points=20_001):
    """E ln p(x + u) for one pixel of each value, by the trapezoidal rule in float64."""
    x = torch.arange(levels, dtype=DOUBLE)[:, None] + torch.linspace(0, 1, points, dtype=DOUBLE)
    logit, base = flow.transform, flow.base
    z, logdet = logit.forward_and_logdet(x.reshape(-1, 1))
    mean, scale = float(base.mean.flatten()[0]), math.exp(float(base.log_scale.flatten()[0]))
    log_p = torch.distributions.Normal(mean, scale).log_prob(z[:, 0]) + logdet
    return torch.trapezoid(log_p.reshape(levels, points), dx=1 / (points - 1))


class TestDensity:
    def test_the_standard_normal_has_its_entropy(self):
        """d/2 ln(2 pi e) nats, within four standard errors, which are sqrt(d / 2n)."""
        n, d = 4000, 3
        got = density(Flow(Chain(), DiagonalNormal(d)).eval(), table(n, d))
        assert got.standard_error == pytest.approx(math.sqrt(d / 2 / n), rel=0.1)
        assert abs(got.value - d / 2 * math.log(2 * math.pi * math.e)) <= 4 * got.standard_error
        assert (got.unit, got.rows, got.draws, got.estimator_error, got.bias_bound) == ("nats", n, 1, 0.0, 0.0)

    def test_integers_have_the_integral_over_their_bins(self):
        flow = pixel_flow()
        data = images(300, (1, 1, 2), 4)
        truth = -integral(flow)[data.x.long()].sum((1, 2, 3)) / (2 * math.log(2))
        got = density(flow, data, draws=64)
        assert abs(got.value - float(truth.mean())) <= 4 * got.estimator_error
        assert got.standard_error == pytest.approx(float(truth.std()) / math.sqrt(300), rel=0.1)
        assert (got.unit, got.draws, got.bias_bound) == ("bits/dim", 64, 0.0)

    def test_the_estimators_error_shrinks_with_the_draws(self):
        flow, data = pixel_flow(), images(100, (1, 1, 2), 4)
        few, many = (density(flow, data, draws=k).estimator_error for k in (16, 256))
        assert many == pytest.approx(few / 4, rel=0.5)

    def test_the_estimators_error_is_a_standard_error(self):
        flow, data = pixel_flow(), images(50, (1, 1, 2), 4)
        runs = [density(flow, data, draws=20, seed=100 * s) for s in range(40)]
        spread = torch.tensor([r.value for r in runs]).std()
        assert float(spread) == pytest.approx(sum(r.estimator_error for r in runs) / 40, rel=0.4)

    def test_the_bound_is_below_the_probability(self):
        """E ln p(x + u) <= ln P(x), whose sum over all integers is at most one (Jensen)."""
        flow, values = pixel_flow(), torch.cartesian_prod(torch.arange(4), torch.arange(4)).to(torch.uint8)
        data = Dataset(values.reshape(16, 1, 1, 2), None, Schema((1, 1, 2), 4))
        assert float(log_likelihood(flow, data, draws=32).value.exp().sum()) < 1

    def test_beyond_64_dimensions_the_truth_lies_within_the_errors(self):
        flow, data = table_flow(70), table(6, 70)
        truth = -float(flow.log_prob(data.x, estimator=Exact()).detach().double().mean())
        got = density(flow, data, draws=24)
        assert got.bias_bound == 0
        assert 0 < got.estimator_error < 0.5
        assert abs(got.value - truth) <= 4 * got.estimator_error
        assert got.draws == 24

    def test_beyond_64_dimensions_nothing_is_truncated(self):
        """For J = -L I every probe gives the exact trace: a truncated series would always be off, and by the same."""
        blocks = [linear_block(-0.8 * torch.eye(70)) for _ in range(2)]
        flow, data = Flow(Chain(*blocks), DiagonalNormal(70)).eval(), table(20, 70)
        got = density(flow, data, draws=16)
        z = 0.04 * data.x.double()
        truth = -(torch.distributions.Normal(0, 1).log_prob(z).sum(1).mean() + 2 * 70 * math.log(0.2))
        assert 0 < got.estimator_error < 0.01
        assert abs(float(truth) - got.value) < 4 * got.estimator_error + 1e-4  # the last is float32

    def test_the_error_of_one_sample_is_unknown(self):
        with pytest.raises(
            ValueError,
            match="a mean with a standard error needs at least two samples; got 1. Give more, or score it alone.",
        ):
            density(pixel_flow(), images(1, (1, 1, 2), 4))

    def test_a_model_in_training_is_refused(self):
        with pytest.raises(ValueError, match=r"needs a model in eval mode; call model.eval\(\) first"):
            density(pixel_flow().train(), images(3, (1, 1, 2), 4))

    def test_it_reads_as_a_sentence(self):
        got = density(Flow(Chain(), DiagonalNormal(2)).eval(), table(50, 2))
        assert str(got) == f"{got.value:.3f} nats (± {got.standard_error:.3f} over 50 samples)"


LIKELIHOODS = {
    "table": lambda: (table_flow(3), table(9, 3)),
    "image": lambda: (image_hybrid(), images(9)),
    "wide table": lambda: (table_flow(70), table(9, 70)),
    "wide image": lambda: (image_hybrid((1, 8, 10)), images(9, (1, 8, 10))),
}


class Doubled(ActNorm):
    """Twice x, with a log-determinant that says once."""

    def __init__(self):
        super().__init__(2)

    def forward_and_logdet(self, x, context=None, **_):
        return 2 * x, x.new_zeros(len(x))


class TestLikelihood:
    @pytest.mark.parametrize("case", LIKELIHOODS)
    def test_a_row_has_its_number_whatever_the_rows_beside_it(self, case, monkeypatch):
        """Trap: noise drawn for a batch gives a row another likelihood in another place of the file."""
        model, data = LIKELIHOODS[case]()
        value = log_likelihood(model, data, draws=3).value
        order = [5, 0, 8, 5, 1]
        torch.testing.assert_close(
            log_likelihood(model, data.take(order), draws=3).value, value[order], atol=1e-4, rtol=0
        )
        torch.testing.assert_close(log_likelihood(model, data.take([7]), draws=3).value, value[[7]], atol=1e-4, rtol=0)
        monkeypatch.setattr(iresnet.evaluate.draws, "CHUNK", 4)
        torch.testing.assert_close(log_likelihood(model, data, draws=3).value, value, atol=1e-4, rtol=0)

    @pytest.mark.parametrize("case", LIKELIHOODS)
    def test_it_repeats_itself_and_the_seed_decides(self, case):
        model, data = LIKELIHOODS[case]()
        state = torch.get_rng_state()
        first, again, other = (log_likelihood(model, data, draws=2, seed=s).value for s in (0, 0, 9))
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(first, again)
        assert torch.equal(first, other) == (case == "table")

    def test_of_real_numbers_it_is_the_flows(self):
        model, data = LIKELIHOODS["table"]()
        got = log_likelihood(model, data)
        torch.testing.assert_close(got.value, model(data.x).detach().double())
        assert (got.standard_error.tolist(), got.bias_bound.tolist(), got.passes) == ([0.0] * 9, [0.0] * 9, 1)

    def test_of_integers_it_is_the_integral(self):
        flow = pixel_flow()
        values = torch.cartesian_prod(torch.arange(4), torch.arange(4))
        data = Dataset(values.to(torch.uint8).reshape(16, 1, 1, 2), None, Schema((1, 1, 2), 4))
        got = log_likelihood(flow, data, draws=64)
        assert ((got.value - integral(flow)[values].sum(1)).abs() <= 4 * got.standard_error).all()
        assert (got.dimension, got.passes) == (2, 64)

    @pytest.mark.parametrize("case", ["wide table", "wide image"])
    def test_beyond_64_dimensions_the_truth_lies_within_the_errors(self, case):
        model, data = LIKELIHOODS[case]()
        flow = iresnet.evaluate.as_flow(model)
        if data.schema.levels is None:
            points = [data.x]
        else:
            points = [data.x + torch.rand(data.x.shape, generator=seeded(100 + s)) for s in range(32)]
        with torch.no_grad():
            truths = torch.stack([flow.log_prob(p, estimator=Exact()).double() for p in points])
        own = truths.std(0) / math.sqrt(len(points)) if len(points) > 1 else 0.0
        got = log_likelihood(model, data, draws=16)
        assert got.bias_bound.tolist() == [0.0] * 9
        assert (got.standard_error > 0).all()
        assert ((got.value - truths.mean(0)).abs() <= 5 * (got.standard_error + own)).all()

    @pytest.mark.parametrize("kind", ["a user's own", "asserted"])
    def test_where_a_part_is_not_known_the_bias_has_no_bound(self, kind):
        d = 2 if kind == "a user's own" else 70
        asserted = ResidualBlock(nn.Linear(d, d, bias=False), lipschitz=0.5)
        nn.init.eye_(asserted.g.weight).data.mul_(-0.95)
        flow = Flow(Doubled() if d == 2 else asserted, DiagonalNormal(d), event_shape=(d,)).eval()
        data = Dataset(normal(5, d).float(), None, Schema((d,)))
        assert log_likelihood(flow, data, draws=2).bias_bound.isinf().all()
        assert density(flow, data, draws=2).bias_bound == math.inf

    def test_noise_and_probes_are_independent(self, monkeypatch):
        """Trap: one seed for both makes the probes a function of the noise."""
        model, data = LIKELIHOODS["wide image"]()
        seen = []
        flow = Flow(model.transform, model.base).eval()
        plain = flow.log_prob

        def log_prob(point, **options):
            state = options["generator"].get_state()
            seen.append((point - data.x, torch.rand(point.shape[1:], generator=options["generator"])))
            options["generator"].set_state(state)
            return plain(point, **options)

        monkeypatch.setattr(flow, "log_prob", log_prob)
        log_likelihood(flow, data, draws=2)
        for noise, probes in seen:
            torch.testing.assert_close(noise, noise[:1].expand_as(noise), atol=1e-5, rtol=0)  # one noise for all rows
            correlation = torch.corrcoef(torch.stack([noise[0].flatten(), probes.flatten()]))[0, 1]
            assert abs(float(correlation)) < 0.5

    @pytest.mark.parametrize("d", [1, 2, 3, 20])
    def test_a_row_that_overflows_float32_leaves_the_others(self, d):
        flow, data = table_flow(d), table(5, d)
        flow.transform = Chain(Standardise([0.0] * d, [0.01] * d), *flow.transform).eval()
        far = Dataset(data.x.clone(), None, data.schema)
        far.x[3] = 1e38
        expected, got = log_likelihood(flow, data).value, log_likelihood(flow, far).value
        torch.testing.assert_close(got[[0, 1, 2, 4]], expected[[0, 1, 2, 4]], atol=1e-4, rtol=1e-5)
        assert got[3] < -1e70  # in float64

    def test_too_few_draws(self):
        with pytest.raises(ValueError, match="draws must be at least 2, to estimate their error; got 1."):
            log_likelihood(table_flow(3), table(2, 3), draws=1)


def test_of_a_likelihood_that_is_not_finite_no_error_is_known():
    """Trap: NaN had a bias of 0, and the paper's limit was reached."""
    flow, data = table_flow(2), table(4, 2)
    flow.base.mean.fill_(math.nan)
    assert log_likelihood(flow, data).bias_bound.isinf().all()
    assert density(flow, data).bias_bound == math.inf
    found = protocol(flow, data)
    assert (found.bias_bound, found.reached) == (math.inf, False)


class TestTolerance:
    """A likelihood with as many draws as its standard error needs."""

    def test_every_sample_gets_the_draws_that_it_needs(self, monkeypatch):
        """Noise of known spread per sample: 4 draws for the small, 16 at most for the large."""
        drawn, made = torch.zeros(4), []

        def likelihoods(model, schema, device, seeds, *, shared, tolerance):
            def draws(data):
                made.extend([len(data)] * len(seeds))
                for row in data.x[:, 0].long().tolist():
                    drawn[row] += len(seeds)
                noise = torch.stack([normal(4, seed=s) for s in seeds])
                return (noise * torch.tensor([0.0, 1.0, 3.0, 100.0], dtype=DOUBLE))[:, data.x[:, 0].long()]

            return draws

        for module in (iresnet.evaluate.draws, iresnet.evaluate.likelihood):
            monkeypatch.setattr(module, "Likelihoods", likelihoods)
            monkeypatch.setattr(module, "has_errors", lambda *_: True)
        data = Dataset(torch.arange(4.0)[:, None].expand(4, 3).clone(), None, Schema((3,)))
        got = log_likelihood(table_flow(3), data, tolerance=1.0)
        assert drawn[0] == drawn[1] == 4
        assert 4 < drawn[2] < drawn[3] == 16
        assert made[:4] == [4] * 4
        assert set(made[4:]) == {1, 2}
        assert (got.standard_error[:3] <= 1.0).all()
        assert got.standard_error[3] > 10  # reported, where the limit is not reached
        values = torch.stack([normal(4, seed=s) for s in range(16)])
        spread = values[:4].std(0) * torch.tensor([0.0, 1.0, 3.0, 100.0])  # of the first draws alone
        torch.testing.assert_close(got.standard_error, spread / drawn.double().sqrt())
        assert float(got.value[3]) == pytest.approx(100 * float(values[:, 3].mean()))

    @pytest.mark.parametrize("case", ["wide table", "wide image"])
    def test_a_row_has_its_number_whatever_the_rows_beside_it(self, case):
        model, data = LIKELIHOODS[case]()
        tolerance = 0.7 * float(log_likelihood(model, data, draws=4).standard_error.median())
        whole = log_likelihood(model, data, tolerance=tolerance)
        some = log_likelihood(model, data.take([5, 0, 8]), tolerance=tolerance)
        torch.testing.assert_close(some.value, whole.value[[5, 0, 8]], atol=1e-4, rtol=0)
        torch.testing.assert_close(some.standard_error, whole.standard_error[[5, 0, 8]], atol=1e-4, rtol=0)
        assert 4 < whole.passes <= 16

    @pytest.mark.no_cover
    def test_errors_have_the_size_they_claim(self):
        """With four first draws, Student's t with three degrees of freedom: 86 % within two standard errors."""
        flow, data = table_flow(70), table(25, 70)
        truth = flow.log_prob(data.x, estimator=Exact()).detach().double()
        t = []
        for s in range(24):
            got = log_likelihood(flow, data, tolerance=0.05, seed=1000 * s)
            t.append((got.value - truth) / got.standard_error)
        within = float((torch.stack(t).abs() <= 2).double().mean())
        assert 0.80 < within < 0.92
        assert got.passes > 4

    def test_of_exact_likelihoods_it_changes_nothing(self):
        model, data = LIKELIHOODS["table"]()
        got = log_likelihood(model, data, tolerance=1e-9)
        assert torch.equal(got.value, log_likelihood(model, data).value)
        assert (got.passes, float(got.standard_error.max())) == (1, 0.0)

    def test_scores_need_a_share_of_the_spread(self):
        reference = torch.tensor([-30.0, -10.0, 10.0, 30.0])

        def tolerance(case, reference):
            model, data = LIKELIHOODS[case]()
            return iresnet.evaluate.score_tolerance(model, data.schema, reference)

        found = tolerance("wide image", reference + 7)
        values = torch.tensor([7.0, -10.0, 7.0 - 1000, 7.0 + 1000, -math.inf])
        spread = math.sqrt(500)
        assert found.at(values).tolist() == pytest.approx([0.025 * spread] * 2 + [25.0] * 2 + [math.inf])
        assert tolerance("image", reference) is None
        assert tolerance("wide image", torch.tensor([3.0])) is None

    def test_far_from_the_data_fewer_draws_are_enough(self):
        model, data = LIKELIHOODS["wide table"]()
        values = log_likelihood(model, data, draws=4)
        error = 0.2 * float(values.standard_error.min())
        assert log_likelihood(model, data, tolerance=Tolerance(error)).passes == 16
        far = Tolerance(error, share=1.0, centre=float(values.value.max()) + 1000)
        assert log_likelihood(model, data, tolerance=far).passes == 4

    @pytest.mark.parametrize("tolerance", [0.0, -1.0, math.nan])
    def test_a_tolerance_that_is_not_positive(self, tolerance):
        with pytest.raises(ValueError, match="tolerance must be positive, in nats; got"):
            log_likelihood(*LIKELIHOODS["wide table"](), tolerance=tolerance)


class TestInverse:
    def test_a_linear_block_is_solved_back(self):
        a, data = contraction(4, 0.6, dtype=FLOAT), table(7, 4)
        solution, x = reconstruct(Flow(Chain(linear_block(a)), DiagonalNormal(4)).eval(), data)
        assert x.dtype == solution.x.dtype == DOUBLE
        assert torch.equal(x, data.x.double())
        z = x + x @ a.double().T
        expected = torch.linalg.solve(torch.eye(4, dtype=DOUBLE) + a.double(), z.T).T
        torch.testing.assert_close(solution.x, expected, atol=1e-10, rtol=0)

    def test_its_figures_are_those_of_the_worst_row(self):
        a, data = contraction(4, 0.6, dtype=FLOAT), table(7, 4)
        flow = Flow(Chain(linear_block(a)), DiagonalNormal(4)).eval()
        solution, x = reconstruct(flow, data)
        got = inverse(flow, data)
        assert (got.rows, got.proven, got.precision) == (7, 7, "float64")
        distance = (solution.x - x).norm(dim=1)
        residual = (solution.x + solution.x @ a.double().T - (x + x @ a.double().T)).norm(dim=1)
        assert got.measured_error == pytest.approx(float(distance.max()), rel=1e-6)
        assert got.code_residual == pytest.approx(float(residual.max()), rel=0.1, abs=1e-15)
        assert got.measured_error <= got.composed_bound < 1e-8
        assert got.largest_block_bound == got.composed_bound == float(solution.error_bound.max())
        assert got.informative
        assert got.iterations == float(solution.iterations.double().mean()) >= 1

    def test_a_coarser_solve_has_larger_bounds_that_still_hold(self):
        flow, data = table_flow(3), table(9, 3)
        fine, coarse = inverse(flow, data), inverse(flow, data, tolerance=1e-2)
        assert fine.largest_block_bound < 1e-8 < coarse.largest_block_bound <= 1e-2
        assert coarse.iterations < fine.iterations
        for got in (fine, coarse):
            assert got.measured_error <= got.composed_bound

    def test_single_precision(self):
        got = inverse(table_flow(3), table(9, 3), precision=FLOAT)
        assert got.precision == "float32"
        assert got.proven == 9
        assert 1e-9 < got.measured_error < 1e-4

    def test_integers_are_judged_at_the_middle_of_their_bins(self):
        model, data = image_hybrid(), images()
        _, x = reconstruct(model, data)
        assert torch.equal(x, data.x.double() + 0.5)
        got = inverse(model, data)
        assert got.proven == 8
        assert got.measured_error < 1e-6

    def test_what_was_asserted_is_not_proven(self):
        chain = Chain(linear_block(contraction(4, 0.6, dtype=FLOAT), lipschitz=0.7))
        got = inverse(Flow(chain, DiagonalNormal(4)).eval(), table(7, 4))
        assert got.proven == 0
        assert got.measured_error < 1e-8

    def test_a_bound_larger_than_the_rows_is_not_informative(self):
        data = table(9, 3)
        got = inverse(table_flow(3), data, tolerance=3.0, solver=Banach())
        assert got.composed_bound > 0.1 * float(data.x.norm(dim=1).max())
        assert not got.informative
        assert str(got).endswith(f"composed bound {got.composed_bound:.1e} (not informative)")
        assert str(got).startswith("9 of 9 samples proven block by block, ")

    @pytest.mark.parametrize("kind", ["block", "multiscale", "classifier"])
    def test_every_transform_has_one(self, kind):
        torch.manual_seed(0)
        if kind == "block":
            model, data = Flow(linear_block(contraction(4, 0.6, dtype=FLOAT)), DiagonalNormal(4)).eval(), table(3, 4)
        elif kind == "classifier":
            model, data = Classifier(table_flow(3).transform, nn.Linear(3, 2)).eval(), table(3, 3)
        else:
            stages = [Squeeze(), ResidualBlock(contractive_convnet(2, 2, kernels=(1, 1)))]
            model, data = Flow(Multiscale(stages, (1, 4, 4)), DiagonalNormal(16)).eval(), images(3)
        got = inverse(model, data)
        assert got.proven == 3
        assert got.measured_error <= got.composed_bound < 1e-6

    def test_the_model_stays_as_it_is(self):
        model = table_flow(3)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        inverse(model, table(3, 3))
        after = model.state_dict()
        assert all(v.dtype == after[n].dtype and torch.equal(v, after[n]) for n, v in before.items())


class TestScores:
    def test_an_anomaly_is_the_share_of_more_likely_rows(self):
        reference = torch.tensor([3.0, 1.0, 2.0, 2.0])
        values = torch.tensor([1.0, 1.5, 2.0, 2.5, 3.0])
        assert anomaly(values, reference).tolist() == pytest.approx([0.8, 0.7, 0.6, 0.3, 0.2])

    def test_beyond_the_reference_the_rest_shrinks_with_the_logarithm_of_the_distance(self):
        reference, far = torch.tensor([0.0, 2.0]), math.e - 1  # of mean absolute deviation 1
        values = torch.tensor([2.0 + far, -far, -math.inf], dtype=torch.float64)
        assert anomaly(values, reference).tolist() == pytest.approx([1 / 6, 5 / 6, 1.0])
        assert anomaly(torch.tensor([5.0, 5.0 - far]), torch.tensor([5.0])).tolist() == pytest.approx([0.5, 0.75])
        assert anomaly(torch.tensor([math.nan]), reference).isnan().all()

    @pytest.mark.parametrize("n", [1, 26, 5000])
    def test_an_anomaly_ranks_rows_as_their_likelihood_does_however_far_out(self, n):
        reference = normal(n, seed=3).double() - 22.8
        near = torch.linspace(-40, -10, 20_001, dtype=torch.float64)
        for values in (near, -40 - torch.logspace(-3, 14, 20_001, dtype=torch.float64)):
            scores = anomaly(values.sort(descending=True).values, reference)
            assert bool((scores.diff() > 0).all())
            assert 0 < float(scores.min()) <= float(scores.max()) < 1

    def test_the_area_by_anomaly_is_that_by_likelihood_for_few_reference_rows(self):
        reference, inliers, outliers = normal(26), normal(200, seed=1), normal(50, seed=2) - 3
        by_score = auroc(-anomaly(inliers, reference), -anomaly(outliers, reference))
        assert by_score == auroc(inliers, outliers) > 0.9

    def test_an_anomaly_is_spread_evenly_over_rows_like_the_reference(self):
        scores = anomaly(normal(2000, seed=1), normal(2000, seed=2))
        assert abs(float(scores.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / 2000 * 2)
        assert float((scores < 0.1).double().mean()) == pytest.approx(0.1, abs=0.03)

    @pytest.mark.parametrize(
        ("likely", "strange", "area"),
        [
            ([2.0, 3.0], [0.0, 1.0], 1.0),
            ([0.0, 1.0], [2.0, 3.0], 0.0),
            ([1.0, 1.0], [1.0], 0.5),
            ([1.0, 2.0], [1.0, 2.0], 0.5),
            ([2.0, 3.0], [1.0, 2.0], 0.875),
            ([5.0], [1.0, 5.0, 9.0], 0.5),
        ],
    )
    def test_detection_counts_pairs_and_half_of_the_ties(self, likely, strange, area):
        assert auroc(torch.tensor(likely), torch.tensor(strange)) == area

    def test_detection_is_the_share_of_pairs(self):
        a, b = normal(30).mul(2).round(), normal(40, seed=1).mul(2).round() - 1
        pairs = [1.0 if x > y else 0.5 if x == y else 0.0 for x in a.tolist() for y in b.tolist()]
        assert auroc(a, b) == pytest.approx(sum(pairs) / len(pairs))

    def test_detection_of_many_rows_takes_no_table_of_pairs(self):
        """Trap: ten thousand test images against as many corrupted ones are 10^8 pairs."""
        n = 300_000
        assert auroc(torch.arange(n), torch.arange(n)) == pytest.approx(0.5)

    def test_one_entry_for_every_corruption(self):
        model, data = image_hybrid(), images(12)
        entries = corruption_detection(model, data, draws=2)
        assert [e["name"] for e in entries] == list(CORRUPTIONS)
        assert all(0 <= e["detection"] <= 1 and 0 <= e["median_anomaly"] <= 1 for e in entries)

    def test_some_rows_are_enough_and_not_the_first_ones(self):
        model, data = image_hybrid(), images(12)
        few = corruption_detection(model, data, rows=5)
        assert few == corruption_detection(model, subsample(data, 5)) != corruption_detection(model, data)
        assert few != corruption_detection(model, data.take(range(5)))

    def test_a_model_of_dark_images_sees_bright_ones_and_cannot_see_what_stays_dark(self):
        base = DiagonalNormal((1, 4, 4))
        base.mean.fill_(-3.0)
        base.log_scale.fill_(-1.0)
        dark = Dataset(torch.zeros(6, 1, 4, 4, dtype=torch.uint8), None, Schema((1, 4, 4), 16))
        entries = {e["name"]: e for e in corruption_detection(Flow(Logit(16), base).eval(), dark, draws=2)}
        assert entries["inverted"]["detection"] == 1.0
        assert entries["inverted"]["median_anomaly"] > 6 / 7  # of six reference rows
        for name in ("shuffled", "turned", "half missing", "blurred"):  # these leave a dark image as it is
            assert entries[name]["detection"] == 0.5

    def test_images_need_not_be_square(self):
        entries = corruption_detection(image_hybrid((1, 4, 6)), images(5, (1, 4, 6)), draws=2)
        assert len(entries) == len(CORRUPTIONS)

    def test_corruptions_are_for_images(self):
        with pytest.raises(ValueError, match="corruptions need images of integers; got rows of 3 numbers."):
            corruption_detection(table_flow(3), table(3, 3))


class TestEvaluate:
    def test_a_hybrid_is_judged_by_everything(self):
        model, data = image_hybrid(), images(20)
        got = evaluate(model, data, split="validation", draws=2, rows=7)
        assert (got["split"], got["rows"]) == ("validation", 20)
        assert set(got) == {"split", "rows", "error", "confusion", "density", "inverse"}
        assert got["inverse"]["rows"] == 7
        assert got["error"]["wrong"] == error(model, data).wrong
        assert got["density"]["value"] == density(model, data, draws=2).value
        assert json.loads(json.dumps(got)) == got

    @pytest.mark.parametrize(
        ("model", "labelled", "keys"),
        [
            ("flow", True, {"density"}),
            ("classifier", True, {"error", "confusion"}),
            ("hybrid", False, {"density"}),
            ("hybrid", None, {"density"}),
            ("classifier", False, set()),
        ],
    )
    def test_others_by_what_they_can_do_and_the_data_allow(self, model, labelled, keys):
        hybrid, data = image_hybrid(), images(6)
        if not labelled:
            data = Dataset(data.x, None if labelled is None else torch.full((6,), -1), data.schema)
        chosen = hybrid if model == "hybrid" else getattr(hybrid, model)
        assert set(evaluate(chosen, data, draws=2)) == {"split", "rows", "inverse"} | keys

    def test_what_a_model_has(self):
        hybrid = image_hybrid()
        models = (hybrid, hybrid.flow, hybrid.classifier)
        assert [iresnet.evaluate.has_density(m) for m in models] == [True, True, False]
        assert [iresnet.evaluate.has_head(m) for m in models] == [True, False, True]

    def test_what_a_model_lacks_gets_a_sentence(self):
        hybrid, data = image_hybrid(), images(6)
        sentence = (
            "a likelihood needs a density; this model only classifies. Train with objective.kind=hybrid or density."
        )
        for ask in (density, log_likelihood, corruption_detection):
            with pytest.raises(ValueError, match=sentence):
                ask(hybrid.classifier, data)
        with pytest.raises(ValueError, match="a sample needs a density; this model only classifies."):
            iresnet.evaluate.as_flow(hybrid.classifier, "a sample")
        for ask in (error, confusion):
            with pytest.raises(
                ValueError,
                match="classes need a head; this model only has a density. Train with objective.kind=hybrid.",
            ):
                ask(hybrid.flow, data)

    @pytest.mark.parametrize("y", [None, torch.full((6,), -1)], ids=["none", "all missing"])
    def test_data_without_labels_get_a_sentence(self, y):
        data = Dataset(images(6).x, y, images(6).schema)
        for ask in (error, confusion):
            with pytest.raises(
                ValueError,
                match="this metric needs labels; the dataset has none. Name the label column, or use `iresnet score`.",
            ):
                ask(image_hybrid(), data)


class TestInterpolation:
    def test_it_begins_and_ends_at_rows_of_two_classes(self):
        model, data = image_hybrid(), images(20)
        path = interpolate(model, data, pairs=4, steps=5)
        assert path.shape == (4, 5, 1, 4, 4)
        rows = data.x.flatten(1) + 0.5
        first, last = (torch.cdist(path[:, k].flatten(1), rows) for k in (0, -1))
        assert (first.min(1).values < 1e-3).all()
        assert (last.min(1).values < 1e-3).all()
        torch.testing.assert_close(path[:, 0].flatten(1), rows[first.argmin(1)], atol=1e-4, rtol=0)
        torch.testing.assert_close(path[:, -1].flatten(1), rows[last.argmin(1)], atol=1e-4, rtol=0)
        assert (data.y[first.argmin(1)] != data.y[last.argmin(1)]).all()
        used = [*first.argmin(1).tolist(), *last.argmin(1).tolist()]
        assert len(set(used)) == 8  # no row twice

    def test_codes_lie_on_a_straight_line(self):
        model, data = table_flow(3), table(10, 3)
        path = interpolate(model, data, pairs=2, steps=5)
        with torch.no_grad():
            z = model.transform(path.flatten(0, 1)).reshape(2, 5, 3)
        torch.testing.assert_close(z.diff(dim=1), (z[:, -1:] - z[:, :1]).expand(2, 4, 3) / 4, atol=1e-4, rtol=0)

    def test_a_linear_map_makes_straight_lines(self):
        flow = Flow(Chain(linear_block(contraction(3, 0.6, dtype=FLOAT))), DiagonalNormal(3)).eval()
        path = interpolate(flow, table(6, 3), pairs=3, steps=3)
        torch.testing.assert_close(path[:, 1], (path[:, 0] + path[:, 2]) / 2, atol=1e-4, rtol=0)

    def test_the_seed_chooses_the_rows(self):
        model, data = table_flow(3), table(10, 3)
        first, again, other = (interpolate(model, data, pairs=2, steps=2, seed=s) for s in (0, 0, 1))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_there_are_no_more_pairs_than_rows_allow(self):
        assert interpolate(table_flow(3), table(5, 3), pairs=6, steps=2).shape == (2, 2, 3)

    def test_rows_of_one_class_are_paired_all_the_same(self):
        data = table(4, 3, classes=("a", "b"))
        one = Dataset(data.x, torch.zeros(4, dtype=torch.int64), data.schema)
        assert interpolate(table_flow(3), one, pairs=2, steps=2).shape == (2, 2, 3)

    def test_one_row_is_too_few(self):
        with pytest.raises(ValueError, match="an interpolation needs at least two samples; got 1."):
            interpolate(table_flow(3), table(1, 3))
