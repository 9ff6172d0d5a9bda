"""The likelihood of a test set to the paper's protocol: closed forms, coverage, and what it says of itself."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from iresnet import ActNorm, Chain, Classifier, DiagonalNormal, Flow, terms_needed
from iresnet.evaluate import density, protocol
from iresnet.evaluate.chunks import memory_factor
from iresnet.residual import ResidualBlock
from tests.test_evaluate import image_hybrid, images, pixel_flow, table, table_flow
from tests.zoo import contraction, linear_block

BIT = math.log(2)
MODULE = sys.modules["iresnet.evaluate.protocol"]


def linear(d, *norms, seed=0):
    """Blocks x + A x with a standard normal base, whose likelihood is linear algebra, and the matrices."""
    matrices = [contraction(d, n, seed=seed + i, dtype=torch.float32) for i, n in enumerate(norms)]
    return Flow(Chain(*(linear_block(a) for a in matrices)), DiagonalNormal(d)).eval(), matrices


def truth(matrices, x):
    """-ln p of every row, in float64."""
    z, logdet, eye = x.double(), 0.0, torch.eye(x.shape[1], dtype=torch.float64)
    for a in matrices:
        z = z @ (eye + a.double()).T
        logdet += float(torch.linalg.slogdet(eye + a.double())[1])
    return -(torch.distributions.Normal(0, 1).log_prob(z).sum(1) + logdet)


class TestValue:
    def test_of_linear_blocks_the_truth_lies_within_the_errors(self):
        (flow, matrices), data = linear(70, 0.8, 0.6), table(400, 70)
        got = protocol(flow, data, error=1e-3)
        assert got.method == "series"
        assert 0 < got.bias_bound <= 1e-4 * 70 * BIT
        assert 0 < got.estimator_error <= 1e-3 * 70 * BIT
        assert abs(got.value - float(truth(matrices, data.x).mean())) <= got.bias_bound + 4 * got.estimator_error
        assert got.reached
        assert got.proven

    def test_the_bias_bound_covers_the_truncation_at_its_worst(self):
        """For J = -L I every probe gives the exact trace, and every term has the same sign."""
        flow = Flow(Chain(*(linear_block(-0.8 * torch.eye(70)) for _ in range(2))), DiagonalNormal(70)).eval()
        data = table(4, 70)
        got = protocol(flow, data, bias=1e-3)
        off = float(truth([-0.8 * torch.eye(70)] * 2, data.x).mean()) - got.value
        assert 0.2 * got.bias_bound < off < got.bias_bound + 1e-4  # the last is float32
        assert got.draws == 2

    def test_the_bias_bound_covers_a_series_that_stops_early(self):
        """Trap: with slopes a little below the bound, the remainder at which a sample stops exceeds Theorem 3's."""
        d, constant, slope = 66, 0.5, 0.49
        small, large = slope / math.sqrt(constant), math.sqrt(constant)
        first, second = torch.full((d,), small), torch.full((d,), -large)
        first[0], second[0] = large, -small
        g = nn.Sequential(*(nn.Linear(d, d, bias=False) for _ in range(2))).double()
        with torch.no_grad():
            for layer, diagonal in zip(g, (first, second), strict=True):
                layer.weight.copy_(diagonal.diag())
        flow, data, worst = Flow(ResidualBlock(g), DiagonalNormal(d)).double().eval(), table(2, d), 0.0
        exact = float(truth([-slope * torch.eye(d)], data.x).mean())
        for bias in torch.logspace(-4, -2, 20).tolist():
            got = protocol(flow, data, bias=bias)
            worst = max(worst, abs(got.value - exact) / got.bias_bound)
        assert 0.3 < worst < 1

    def test_estimated_and_exact_determinants_agree(self):
        model, data = image_hybrid(), images(200)
        exact = protocol(model, data, error=5e-3)
        forced = protocol(model, data, error=5e-3, exact_up_to=0, seed=1)
        assert (exact.method, exact.terms, exact.bias_bound) == ("exact", 0, 0.0)
        assert (forced.method, forced.unit) == ("series", "bits/dim")
        noise = math.hypot(exact.estimator_error, forced.estimator_error)
        assert abs(exact.value - forced.value) <= forced.bias_bound + 4 * noise

    def test_exact_determinants_beyond_64_dimensions_if_asked(self):
        (flow, matrices), data = linear(70, 0.8), table(5, 70)
        got = protocol(flow, data, exact_up_to=70)
        assert (got.method, got.draws, got.estimator_error, got.row_error) == ("exact", 1, 0.0, 0.0)
        assert got.value == pytest.approx(float(truth(matrices, data.x).mean()), rel=1e-5)

    def test_it_is_the_density_of_evaluate(self):
        flow, data = pixel_flow(), images(200, (1, 1, 2), 4)
        got, other = protocol(flow, data, error=5e-3), density(flow, data, draws=32, seed=5)
        assert abs(got.value - other.value) <= 4 * math.hypot(got.estimator_error, other.estimator_error)

    def test_a_flow_without_blocks_has_no_bias(self):
        got = protocol(Flow(Chain(), DiagonalNormal(70)).eval(), table(10, 70))
        assert (got.method, got.bias_bound, got.rows) == ("exact", 0.0, 10)


class TestErrors:
    @pytest.mark.no_cover
    def test_two_standard_errors_cover_the_truth_as_often_as_they_say(self):
        (flow, matrices), data, n = linear(16, 0.7), table(50, 16), 80
        exact = float(truth(matrices, data.x).mean())
        runs = [protocol(flow, data, error=1.2e-2, exact_up_to=0, seed=s) for s in range(n)]
        covered = sum(abs(r.value - exact) <= 2 * r.estimator_error + r.bias_bound for r in runs) / n
        assert abs(covered - 0.954) <= 4 * math.sqrt(0.954 * 0.046 / n)
        spread = float(torch.tensor([r.value for r in runs], dtype=torch.float64).std())
        assert spread == pytest.approx(sum(r.estimator_error for r in runs) / n, rel=4 / math.sqrt(2 * n))

    def test_the_limit_is_kept_and_not_by_far(self):
        (flow, _), data = linear(16, 0.7), table(100, 16)
        for limit in (4e-3, 2e-3):
            got = protocol(flow, data, error=limit, exact_up_to=0)
            assert 0.5 * limit < got.estimator_error / (16 * BIT) <= limit

    def test_more_rows_need_fewer_draws_each(self):
        flow, _ = linear(16, 0.7)
        few, many = (protocol(flow, table(n, 16), error=3e-3, exact_up_to=0).draws for n in (50, 400))
        assert few == pytest.approx(8 * many, rel=0.3)

    def test_one_row_is_known_less_well_than_the_mean(self):
        got = protocol(pixel_flow(), images(49, (1, 1, 2), 4), error=0.02)
        assert got.row_error == pytest.approx(7 * got.estimator_error)

    def test_the_error_over_rows_is_that_of_the_bootstrap(self):
        (flow, matrices), data = linear(4, 0.5), table(300, 4)
        values, generator = truth(matrices, data.x), torch.Generator().manual_seed(0)
        chosen = torch.randint(300, (4000, 300), generator=generator)
        bootstrap = float(values[chosen].mean(1).std())
        assert protocol(flow, data).standard_error == pytest.approx(bootstrap, rel=0.06)

    def test_the_estimate_is_made_of_fresh_draws(self, monkeypatch):
        """Trap: draws that decided how many are made must not be in the mean."""
        made = []

        def drawn(flow, data, estimator, generators):
            made.extend(len(data) for _ in generators)
            if len(made) > MODULE.PILOT_DRAWS:
                return torch.full((len(generators), len(data)), -7.0).double()
            return torch.arange(len(data)) % 2 * torch.arange(1, len(generators) + 1)[:, None] * 0.1

        monkeypatch.setattr(MODULE, "log_prob_by_generator", drawn)
        got = protocol(pixel_flow(), images(300, (1, 1, 2), 4), error=0.1)
        assert got.value == pytest.approx(7 / (2 * BIT))
        assert made[:8] == [200] * 8
        assert made[8:] == [300] * got.draws

    def test_too_few_draws_are_reported(self):
        got = protocol(pixel_flow(), images(20, (1, 1, 2), 4), max_draws=3)
        assert (got.draws, got.reached) == (3, False)
        assert "(3 draws per sample, ABOVE the limit)" in str(got)

    def test_it_repeats_itself_and_the_seed_decides(self):
        flow, data = pixel_flow(), images(20, (1, 1, 2), 4)
        state = torch.get_rng_state()
        first, again, other = (protocol(flow, data, error=0.05, seed=s) for s in (0, 0, 1))
        assert first == again != other
        assert torch.equal(torch.get_rng_state(), state)


class Shifted(ActNorm):
    def logdet(self, x):
        return super().logdet(x) + 100


class TestTerms:
    def test_they_are_the_fewest_that_the_bounds_allow(self):
        flow, data = table_flow(70), table(5, 70)
        got = protocol(flow, data, error=1.0)
        share = 1e-4 * 70 * BIT / 2
        bounds = [block.bound((70,)).value for block in flow.transform if isinstance(block, ResidualBlock)]
        assert got.terms == max(terms_needed(b, 70, share) for b in bounds)
        assert 0.1 * 1e-4 * 70 * BIT < got.bias_bound <= 1e-4 * 70 * BIT

    def test_where_terms_are_absurd_the_roulette_is_unbiased(self):
        (flow, matrices), data = linear(16, 0.995), table(60, 16)
        got = protocol(flow, data, error=2e-2, exact_up_to=0)
        assert (got.method, got.bias_bound, got.terms) == ("roulette", 0.0, 20)
        assert abs(got.value - float(truth(matrices, data.x).mean())) <= 4 * got.estimator_error
        assert "bias 0, roulette (20 terms, then a random number more)" in str(got)

    def test_a_series_may_have_up_to_200_terms(self, monkeypatch):
        (flow, _), data = linear(16, 0.9), table(10, 16)
        got = protocol(flow, data, error=1.0, exact_up_to=0)
        assert got.method == "series"
        monkeypatch.setattr(MODULE, "MAX_TERMS", got.terms - 1)
        assert protocol(flow, data, error=1.0, exact_up_to=0).method == "roulette"

    def test_what_was_asserted_is_said(self):
        chain = Chain(linear_block(contraction(70, 0.6, dtype=torch.float32), lipschitz=0.7))
        got = protocol(Flow(chain, DiagonalNormal(70)).eval(), table(3, 70), error=1.0)
        assert not got.proven
        assert ", as asserted (" in str(got)

    def test_a_bias_is_not_called_zero_where_nothing_is_known(self):
        """Trap: a determinant of a user's own may be any number, and a roulette with a wrong constant diverges."""
        block = linear_block(contraction(70, 0.6, dtype=torch.float32), lipschitz=0.99)
        for chain, d, method in ((Chain(Shifted(2)), 2, "exact"), (Chain(block), 70, "roulette")):
            got = protocol(Flow(chain, DiagonalNormal(d)).eval(), table(3, d), error=1.0)
            assert (got.method, got.bias_bound, got.proven) == (method, math.inf, False)
            assert "no bound of the bias known" in str(got)


class TestWords:
    def test_it_reads_as_a_line_of_a_table(self):
        got = protocol(pixel_flow(), images(20, (1, 1, 2), 4), error=0.1)
        assert str(got) == (
            f"{got.value:.4f} bits/dim; bias 0 (exact determinants); estimator ± {got.estimator_error:.1e} "
            f"({got.draws} draws per sample); over 20 samples ± "
            f"{got.standard_error:.4f}; one sample ± {got.row_error:.4f}"
        )
        (flow, _), data = linear(70, 0.5), table(3, 70)
        series = protocol(flow, data, error=1.0)
        assert f"bias at most {series.bias_bound:.1e} (at most {series.terms} terms per block)" in str(series)
        assert "(1 draw)" in str(protocol(flow, data, exact_up_to=70))


class TestRefused:
    @pytest.mark.parametrize(
        ("wish", "sentence"),
        [
            ({"bias": 0.0}, "bias must be positive, in bits per dimension; got 0.0. The paper uses 1e-4."),
            ({"error": math.inf}, "error must be positive, in bits per dimension; got inf."),
            ({"max_draws": 1}, "max_draws must be at least 2, to estimate the error of the draws; got 1."),
        ],
    )
    def test_limits(self, wish, sentence):
        with pytest.raises(ValueError, match=sentence):
            protocol(pixel_flow(), images(3, (1, 1, 2), 4), **wish)

    def test_models_and_rows(self):
        flow, data = pixel_flow(), images(3, (1, 1, 2), 4)
        with pytest.raises(ValueError, match="a mean with a standard error needs at least two samples; got 1."):
            protocol(flow, data.take([0]))
        with pytest.raises(ValueError, match=r"needs a model in eval mode; call model.eval\(\) first"):
            protocol(pixel_flow().train(), data)
        with pytest.raises(ValueError, match="a likelihood needs a density; this model only classifies."):
            protocol(Classifier(Chain(), nn.Identity()).eval(), data)

    def test_what_is_no_contraction(self):
        flow, _ = linear(70, 0.9)
        with torch.no_grad():
            flow.transform[0].g[0].weight.mul_(2)
        with pytest.raises(ValueError, match=r"a likelihood needs contractions; got Lip\(g\) <= 1.8. See certify"):
            protocol(flow, table(3, 70))


def test_a_gpu_with_much_memory_judges_more_rows_at_a_time(monkeypatch):
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for gib, times in ((6, 1), (8, 1), (24, 3), (140, 18)):
        properties = SimpleNamespace(total_memory=gib * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
        assert (memory_factor(cuda), memory_factor(cpu)) == (times, 1)
