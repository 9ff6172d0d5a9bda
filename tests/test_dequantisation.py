"""Learned dequantisation noise: its density is exact, it bounds the probability of integers, and it closes the gap."""

import copy
import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from iresnet import (
    ActNorm,
    Chain,
    DiagonalNormal,
    Flow,
    PowerSeries,
    ResidualBlock,
    Squeeze,
    contractive_convnet,
    load,
    run,
)
from iresnet.data import Dataset, Schema
from iresnet.data.builtin import schema_of
from iresnet.evaluate import log_likelihood
from iresnet.evaluate.protocol import protocol
from iresnet.gpu import Acceleration, planned
from iresnet.gpu.plan import unfused_convolutions
from iresnet.models import Network, build
from iresnet.train import State, Training
from iresnet.train.objective import MaximumLikelihood
from iresnet.transforms.dequantisation import LearnedNoise, dequantise_for, learned_noise, raw_noise
from tests.runs import tiny
from tests.zoo import normal

LEVELS = 4


def integers(n, *shape, seed=0, levels=LEVELS):
    return torch.randint(0, levels, (n, *shape), generator=torch.Generator().manual_seed(seed)).float()


def noise_of(*shape, width=8, steps=2, strength=0.3, seed=0):
    """A noise with random weights in all its layers."""
    torch.manual_seed(seed)
    noise = LearnedNoise(shape, LEVELS, width, steps)
    for p in noise.parameters():
        nn.init.normal_(p, std=strength)
    return noise


class TestNoise:
    def test_its_density_is_that_of_the_map_from_normal_numbers(self):
        noise, x, e = noise_of(1, 2, 2).double(), integers(3, 1, 2, 2).double(), normal(3, 1, 2, 2)
        u, log_q = noise(x, e)
        for i in range(3):
            row = x[i : i + 1]
            jacobian = torch.autograd.functional.jacobian(lambda e, row=row: noise(row, e)[0].flatten(), e[i : i + 1])
            known = torch.distributions.Normal(0, 1).log_prob(e[i]).sum() - jacobian.reshape(4, 4).slogdet().logabsdet
            torch.testing.assert_close(log_q[i], known)
        assert 0 < float(u.detach().min()) < float(u.detach().max()) < 1

    def test_its_density_integrates_to_one(self):
        """The mean of 1 / q is the volume of the cell."""
        n = 20_000
        _, log_q = noise_of(1, 2, 2, strength=0.2)(integers(1, 1, 2, 2).expand(n, 1, 2, 2), normal(n, 1, 2, 2).float())
        volumes = (-log_q.detach()).exp().double()
        assert float(volumes.std()) > 0.1
        assert abs(float(volumes.mean()) - 1) < 4 * float(volumes.std()) / math.sqrt(n)

    def test_the_initial_noise_is_close_to_uniform(self):
        u, log_q = LearnedNoise((1, 4, 4), LEVELS)(integers(2000, 1, 4, 4), normal(2000, 1, 4, 4).float())
        quarters = torch.histc(u.detach(), 4, 0, 1) / u.numel()
        torch.testing.assert_close(quarters, torch.full((4,), 0.25), atol=0.02, rtol=0)
        assert 0 <= float(log_q.detach().mean()) / 16 < 0.01  # KL to uniform noise, in nats per dimension

    def test_rounding_down_recovers_the_integers(self):
        flow = Flow(ActNorm(1), DiagonalNormal((1, 2, 2)), dequantiser=noise_of(1, 2, 2, strength=3.0))
        x = integers(500, 1, 2, 2)
        point, _ = dequantise_for(flow, x, LEVELS, torch.Generator().manual_seed(0))
        assert torch.equal(point.floor(), x)
        assert point.frac().std() > 0.1

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (((1, 3, 3), 4), r"height and width are multiples of 2; got \(1, 3, 3\)"),
            (((4,), 4), "needs images"),
            (((1, 2, 2), 4, 0), "width must be at least 1 and steps at least 0; got width 0"),
            (((1, 2, 2), 4, 8, -1), "steps -1"),
        ],
    )
    def test_invalid_arguments_are_refused(self, arguments, sentence):
        with pytest.raises(ValueError, match=sentence):
            LearnedNoise(*arguments)


class TestBound:
    """A normal density in the plane of four pixels, whose integral over a cell is a product of differences."""

    def setup_method(self):
        base = DiagonalNormal((1, 2, 2), learned=True)
        with torch.no_grad():
            base.mean.fill_(1.6)
            base.log_scale.fill_(math.log(0.7))
        self.flow = Flow(nn_identity(), base, event_shape=(1, 2, 2)).eval()
        self.x = torch.tensor([[[[1.0, 2.0], [0.0, 3.0]]]])
        cdf = torch.distributions.Normal(1.6, 0.7).cdf
        self.known = float((cdf(self.x + 1) - cdf(self.x)).log().sum())

    def values(self, n=20_000, seed=1):
        point, spent = dequantise_for(self.flow, self.x.expand(n, 1, 2, 2), LEVELS, torch.Generator().manual_seed(seed))
        return (self.flow(point) - spent).detach().double()

    @pytest.mark.parametrize("learned", [False, True])
    def test_the_mean_of_p_over_q_is_the_probability_and_that_of_its_logarithm_is_below(self, learned):
        self.flow.dequantiser = noise_of(1, 2, 2, strength=0.2) if learned else None
        values = self.values()
        weights = (values - self.known).exp()
        assert abs(float(weights.mean()) - 1) < 4 * float(weights.std()) / math.sqrt(len(weights))
        assert float(values.mean()) < self.known - 4 * float(values.std()) / math.sqrt(len(values))

    @pytest.mark.no_cover
    def test_learning_closes_the_gap(self):
        gap = self.known - float(self.values().mean())
        torch.manual_seed(0)
        self.flow.dequantiser = LearnedNoise((1, 2, 2), LEVELS, 8, 1)
        objective = MaximumLikelihood(self.flow, LEVELS)
        optimiser = torch.optim.Adam(self.flow.dequantiser.parameters(), 2e-2)
        generator = torch.Generator().manual_seed(0)
        for _ in range(150):
            loss, _ = objective(self.x.expand(64, 1, 2, 2), generator=generator)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        assert gap > 0.1
        assert 0 <= self.known - float(self.values().mean()) < gap / 4


def nn_identity():
    return ActNorm(1).requires_grad_(False)


def image_flow(**settings):
    torch.manual_seed(0)
    parts = [Squeeze(), ActNorm(4), ResidualBlock(contractive_convnet(4, 8)), ActNorm(4)]
    noise = noise_of(1, 4, 4, **settings)
    base = DiagonalNormal((4, 2, 2))
    return Flow(Chain(*parts), base, estimator=PowerSeries(3), event_shape=(1, 4, 4), dequantiser=noise)


class TestModels:
    def test_the_loss_is_log_q_minus_the_log_likelihood(self):
        flow, x = image_flow().train(), integers(8, 1, 4, 4)
        flow(dequantise_for(flow, x, LEVELS, torch.Generator().manual_seed(1))[0])  # ActNorms see a batch
        loss, metrics = MaximumLikelihood(flow, LEVELS)(x, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(0)
        point, spent = dequantise_for(flow, x, LEVELS, generator)
        known = (spent - flow(point, generator=generator)).mean() / (16 * math.log(2))
        torch.testing.assert_close(loss, known)
        assert float(metrics["bits/dim"]) == float(loss.detach())
        assert float(spent.detach().abs().min()) > 0.1

    def test_fused_blocks_pass_the_gradient_to_the_noise(self):
        flow, x = image_flow().train(), integers(8, 1, 4, 4)
        flow(dequantise_for(flow, x, LEVELS)[0])
        gradients = []
        for quick in (False, True):
            twin = copy.deepcopy(flow)
            objective = MaximumLikelihood(twin, LEVELS)
            with planned(objective, torch.float32, compiled=False) if quick else nullcontext(objective) as view:
                view(x, generator=torch.Generator().manual_seed(0))[0].backward()
            gradients.append([p.grad for p in twin.dequantiser.parameters()])
        torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-3)
        assert max(float(g.abs().max()) for g in gradients[0]) > 1e-3

    def test_the_value_of_a_sample_does_not_depend_on_the_batch(self):
        flow = image_flow()
        data = Dataset(integers(6, 1, 4, 4).to(torch.uint8), None, Schema((1, 4, 4), levels=LEVELS))
        flow.train()(dequantise_for(flow, data.x, LEVELS)[0])
        flow.eval()
        together = log_likelihood(flow, data, draws=2).value
        alone = log_likelihood(flow, replace(data, x=data.x[3:4]), draws=2).value
        torch.testing.assert_close(together[3:4], alone, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("where", ["", "features.0", "couplings.0"])
    def test_nothing_is_proven_with_a_hook_on_the_noise(self, where):
        flow = image_flow().eval()
        assert flow.proof_status((1, 4, 4))[0]
        flow.dequantiser.get_submodule(where).register_forward_hook(lambda *_: None)
        assert flow.proof_status((1, 4, 4)) == (False, False)

    def test_the_protocol_evaluates_what_training_minimises(self):
        flow = image_flow()
        data = Dataset(integers(300, 1, 4, 4).to(torch.uint8), None, Schema((1, 4, 4), levels=LEVELS))
        flow.train()(dequantise_for(flow, data.x, LEVELS)[0])
        flow.eval()
        found = protocol(flow, data, error=0.01, bias=0.01)
        loss, _ = MaximumLikelihood(flow, LEVELS)(data.x, generator=torch.Generator().manual_seed(5))
        plain = copy.deepcopy(flow)
        plain.dequantiser = None
        assert found.value == pytest.approx(float(loss.detach()), abs=0.05)
        assert abs(protocol(plain, data, error=0.01, bias=0.01).value - found.value) > 0.1

    @pytest.mark.parametrize("x", [integers(8, 1, 4, 4).double(), integers(8, 1, 4, 4).to(torch.uint8)])
    def test_a_model_in_float64(self, x):
        flow = image_flow().double().train()
        loss, _ = MaximumLikelihood(flow, LEVELS)(x, generator=torch.Generator().manual_seed(0))
        assert loss.dtype is torch.float64
        assert bool(loss.isfinite())

    def test_a_flow_that_hides_its_noise_is_refused(self):
        flow = image_flow()
        with pytest.raises(
            ValueError, match="a Sequential hides the learned noise of the flow it wraps. Wrap the objective instead"
        ):
            MaximumLikelihood(nn.Sequential(flow), LEVELS)
        assert learned_noise(torch.compile(flow, backend="eager")) is flow.dequantiser

    def test_convolutions_of_the_noise_do_not_enable_autocast(self):
        """Blocks compute in bfloat16; the few convolutions of the noise do not turn autocast on for everything."""
        assert unfused_convolutions(MaximumLikelihood(image_flow(), LEVELS)) == []

    @pytest.mark.gpu
    def test_a_cuda_graph_step_trains_like_eager_steps(self):
        flow, runs = image_flow(), []
        flow.dequantiser.levels = 256
        for wish in (Acceleration("off", "off", "float32"), Acceleration("on", "on", "float32")):
            model, generator = copy.deepcopy(flow).cuda().train(), torch.Generator("cuda").manual_seed(0)
            state = State(MaximumLikelihood(model, 256), Training(learning_rate=1e-3), generator, wish)
            batches = [integers(64, 1, 4, 4, seed=i, levels=256).to(torch.uint8).cuda() for i in range(20)]
            runs.append([float(state.advance(x).loss) for x in batches])
        assert state.engine.method == "one CUDA graph, blocks compiled, couplings compiled, g in float32"
        assert runs[1] == pytest.approx(runs[0], rel=1e-2)  # a recording draws other numbers

    def test_settings_build_learned_noise(self):
        network = Network(blocks=(1,), width=4, dequantiser=6)
        flow = build(network, schema_of("digits"), "density")
        assert isinstance(learned_noise(flow), LearnedNoise)
        assert flow.dequantiser.features[0].out_channels == 6
        assert learned_noise(build(replace(network, dequantiser=0), schema_of("digits"), "density")) is None
        for purpose, schema, sentence in (
            ("hybrid", schema_of("digits"), "got 6 for hybrid. Set it to 0"),
            ("density", Schema((3,), columns=tuple("abc")), "got 6 for data that are not images of integers"),
        ):
            with pytest.raises(ValueError, match=sentence):
                build(network, schema, purpose)
        with pytest.raises(ValueError, match="dequantiser must not be negative; got -1"):
            replace(network, dequantiser=-1)

    def test_raw_noise_fits_the_flow(self):
        flow, generator = image_flow(), torch.Generator().manual_seed(0)
        assert float(raw_noise(flow, (1000,), torch.device("cpu"), generator).min()) < -1
        flow.dequantiser = None
        assert float(raw_noise(flow, (1000,), torch.device("cpu"), generator).min()) >= 0


@pytest.mark.slow
def test_every_command_takes_such_a_run(tmp_path, call):
    experiment, folder = tiny("digits-density"), str(tmp_path / "run")
    run.start(replace(experiment, network=replace(experiment.network, dequantiser=4)), folder)
    assert learned_noise(load(folder)) is not None
    images, scores = tmp_path / "images.npy", tmp_path / "scores.csv"
    np.save(images, integers(2, 1, 8, 8, levels=17).numpy().astype("uint8"))
    for arguments in (
        ("evaluate", folder, "--rows", "30"),
        ("sample", folder, "-n", "2", "--out", str(tmp_path / "samples")),
        ("score", folder, str(images), "--out", str(scores)),
        ("report", folder),
        ("export", folder, "--out", str(tmp_path / "export")),
    ):
        code, said = call(*arguments)
        assert code == 0, said
    assert len(scores.read_text().splitlines()) == 3
