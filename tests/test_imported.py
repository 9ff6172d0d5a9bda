"""MADE, MAF and FFJORD as transforms: against their formulas; nothing is claimed to be proven."""

import importlib
import math

import pytest
import torch
from torch import nn

from iresnet import Chain, DiagonalNormal, Flow, export
from iresnet.data import Dataset, Schema
from iresnet.evaluate import density, log_likelihood, protocol
from iresnet.gpu import Acceleration, engine
from iresnet.train import State, Training
from iresnet.train.objective import MaximumLikelihood
from iresnet.transforms import ffjord, made, maf, preserves_volume
from tests.zoo import DOUBLE, dense_jacobian, normal

zuko = pytest.importorskip("zuko", reason="MADE, MAF and FFJORD are zuko's: pip install 'iresnet[flows]'")


def chain(make, dimension, **options):
    torch.manual_seed(0)
    return Chain(*make(dimension, **{"hidden": (16,), "activation": nn.ELU, **options})).eval()


class TestAutoregressive:
    def test_the_jacobian_of_made_is_triangular(self):
        transform, x = chain(made, 4).double(), normal(3, 4)
        j = dense_jacobian(transform, x)
        assert not j.triu(1).any()
        assert (j.diagonal(dim1=1, dim2=2) > 0).all()
        assert float(j.tril(-1).abs().max()) > 1e-3

    def test_maf_is_several_made_with_the_coordinates_reversed(self):
        transform = chain(maf, 4, blocks=3).double()
        assert [type(t).__name__ for t in transform] == ["Imported", "Reverse", "Imported", "Reverse", "Imported"]
        assert float(dense_jacobian(transform, normal(1, 4)).abs().min()) > 1e-9

    def test_made_refuses_more_than_one_block(self):
        with pytest.raises(ValueError, match=r"blocks must be 1 for MADE; got 2. Use blocks = \[1\]"):
            made(3, 2)

    def test_it_is_what_zuko_computes(self):
        transform, x = chain(made, 5), normal(6, 5).float()
        z, logdet = transform.forward_and_logdet(x)
        theirs = transform[0].lazy().call_and_ladj(x)
        assert torch.equal(z, theirs[0])
        torch.testing.assert_close(logdet, theirs[1])

    def test_the_inverse_recovers_the_input(self):
        transform, x = chain(maf, 6, blocks=2).double(), normal(20, 6)
        with torch.no_grad():
            torch.testing.assert_close(transform.inverse(transform(x)), x, atol=1e-10, rtol=0)


class TestDifferentialEquations:
    def test_a_linear_field_is_the_matrix_exponential(self):
        """dx/dt = A x: z = e^A x and ln det = tr A."""
        transform = chain(ffjord, 3, hidden=(), absolute=1e-10, relative=1e-10).double()
        ode = transform[0].lazy.ode
        a = 0.5 * normal(3, 3)
        with torch.no_grad():
            ode[0].weight.zero_()
            ode[0].weight[:, 6:] = a  # after the frequencies of time
            ode[0].bias.zero_()
        x = normal(7, 3)
        with torch.no_grad():
            z, logdet = transform.forward_and_logdet(x)
        torch.testing.assert_close(z, x @ torch.linalg.matrix_exp(a).T, atol=1e-7, rtol=0)
        torch.testing.assert_close(logdet, torch.trace(a).expand(7), atol=1e-7, rtol=0)
        with torch.no_grad():
            torch.testing.assert_close(transform.inverse(z), x, atol=1e-7, rtol=0)

    def test_the_determinant_is_that_of_the_jacobian(self):
        transform, x = chain(ffjord, 2, blocks=2, absolute=1e-9, relative=1e-9).double(), normal(4, 2)
        _, logdet = transform.forward_and_logdet(x)
        torch.testing.assert_close(
            logdet.detach(), torch.linalg.slogdet(dense_jacobian(transform, x)).logabsdet, atol=1e-5, rtol=0
        )

    def test_beyond_64_dimensions_it_is_an_estimate_and_in_training_beyond_8(self):
        assert [chain(ffjord, d)[0].random for d in (64, 65)] == [False, True]
        assert [chain(ffjord, d).train()[0].random for d in (8, 9)] == [False, True]
        assert "one probe" in repr(chain(ffjord, 65))

    def test_a_random_trace_has_an_error(self):
        flow, data = (
            Flow(chain(ffjord, 65), DiagonalNormal(65)).eval(),
            Dataset(normal(4, 65).float(), None, Schema((65,))),
        )
        with torch.no_grad():
            for p in flow.transform.parameters():
                p.add_(0.1 * torch.randn_like(p))
        got = log_likelihood(flow, data, draws=3)
        assert got.passes == 3
        assert (got.standard_error > 0).all()
        assert got.bias_bound.isinf().all()
        assert density(flow, data, draws=3).estimator_error > 0

    def test_training_and_eval_mode_decide_between_trace_and_estimate(self):
        transform, x = chain(ffjord, 9), normal(3, 9).float()
        first, second = (transform.train().forward_and_logdet(x)[1] for _ in range(2))
        assert not torch.equal(first, second)
        exact = transform.eval().forward_and_logdet(x)[1]
        jacobian = torch.linalg.slogdet(dense_jacobian(transform, x)).logabsdet
        torch.testing.assert_close(exact.detach(), jacobian, atol=1e-3, rtol=0)

    def test_the_estimate_has_no_bias(self):
        """The mean of many seeded draws lies within four standard errors of the exact value."""
        exact, random = chain(ffjord, 3, exact=True), chain(ffjord, 3, exact=False)
        random.load_state_dict(exact.state_dict())
        x = normal(1, 3).float()
        with torch.no_grad():
            (truth,) = exact.forward_and_logdet(x)[1].tolist()
            generator = torch.Generator().manual_seed(0)
            drawn = random.forward_and_logdet(x.expand(4000, -1), generator=generator)[1].double()
        assert float(drawn.std()) > 1e-3
        assert float(drawn.mean()) == pytest.approx(truth, abs=4 * float(drawn.std()) / math.sqrt(4000) + 1e-4)

    def test_the_probe_follows_the_generator_and_is_fixed_in_eval(self):
        transform, x = chain(ffjord, 3, exact=False), normal(4, 3).float()

        def logdet(seed=None):
            generator = None if seed is None else torch.Generator().manual_seed(seed)
            with torch.no_grad():
                return transform.forward_and_logdet(x, generator=generator)[1]

        assert torch.equal(logdet(), logdet())
        assert torch.equal(logdet(1), logdet(1))
        assert not torch.equal(logdet(1), logdet(2))
        before = torch.random.get_rng_state()
        logdet(1)
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_gradients_reach_the_weights_in_training(self):
        transform = chain(ffjord, 2).train()
        z, logdet = transform.forward_and_logdet(normal(5, 2).float())
        (z.square().sum() + logdet.sum()).backward()
        assert all(p.grad is not None and bool(p.grad.abs().max() > 0) for p in transform.parameters())


@pytest.mark.parametrize("make", [made, maf, ffjord])
class TestEvery:
    def test_nothing_is_proven_of_its_inverse(self, make):
        transform, x = chain(make, 3), normal(5, 3).float()
        solution = transform.solve(transform(x).detach())
        assert not solution.converged.any()
        assert torch.isinf(solution.error_bound).all()
        assert solution.proven is False
        assert "0 of 5 samples solved, not proven (No error bound is known for the inverse of a" in str(solution)
        assert float(solution.measured_error(x).max()) < 1e-2
        assert transform.stretch((3,)).inverse == math.inf
        assert not preserves_volume(transform)

    def test_a_wrong_shape_is_refused(self, make):
        for wrong in (lambda t: t(torch.zeros(2, 4)), lambda t: t.inverse(torch.zeros(2, 4))):
            with pytest.raises(ValueError, match=r"must have shape \(batch, 3\); got \(2, 4\)"):
                wrong(chain(make, 3))

    def test_wrong_arguments_are_refused(self, make):
        with pytest.raises(ValueError, match="dimension must be at least 1; got 0"):
            make(0, 1)

    def test_without_zuko_the_error_says_how_to_install_it(self, make, monkeypatch):
        def absent(name):
            raise ImportError(name)

        monkeypatch.setattr(importlib, "import_module", absent)
        with pytest.raises(ValueError, match=r"which is not installed. Run `pip install 'iresnet\[flows\]'`"):
            make(2)


def test_a_step_with_an_adaptive_solver_is_not_captured():
    flow = Flow(chain(ffjord, 2), DiagonalNormal(2))
    state = State(MaximumLikelihood(flow), Training(), None, Acceleration(graph="on"))
    assert "no CUDA graph: this device is a CPU" in state.engine.reasons
    assert engine.adaptive_solver_reason(state.objective) == "an adaptive solver chooses its steps at run time"
    assert engine.adaptive_solver_reason(MaximumLikelihood(Flow(chain(maf, 2), DiagonalNormal(2)))) is None


def test_an_adaptive_solver_is_not_traced(capfd, tmp_path):
    flow = Flow(chain(ffjord, 2), DiagonalNormal(2), event_shape=(2,)).eval()
    with pytest.raises(
        RuntimeError, match="the steps of its solver depend on the values of x .FFJORD.. The model runs"
    ):
        export.export(flow, normal(2, 2).float(), tmp_path)
    assert capfd.readouterr() == ("", "")
    assert export.save_weights(flow, tmp_path / "weights.safetensors").exists()


def test_the_paper_s_protocol_says_that_a_trace_is_estimated():
    flow = Flow(chain(ffjord, 3, exact=False), DiagonalNormal(3), event_shape=(3,)).eval()
    data = Dataset(normal(20, 3).float(), None, Schema((3,)))
    found = protocol(flow, data, bias=0.1, error=0.1, exact_up_to=2)
    assert found.method == "probe"
    assert "bias 0 except the solver's (a trace estimate with one probe)" in str(found)


def test_a_float64_input_gets_a_float64_code():
    transform = chain(maf, 3).float()
    assert transform.reference(normal(2, 3).float()).dtype == DOUBLE


def test_a_likelihood_to_the_protocol_says_that_a_solver_made_it():
    x = normal(8, 2).float()
    rows = Dataset(x, None, Schema((2,)))
    found = protocol(Flow(chain(ffjord, 2), DiagonalNormal(2)).eval(), rows)
    assert (found.method, found.draws) == ("trace", 1)
    assert "bias 0 except the solver's (the exact trace)" in str(found)
