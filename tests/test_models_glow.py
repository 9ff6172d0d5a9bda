"""Flows made of couplings: their layouts, learning, volume preservation and training steps."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

from iresnet import ActNorm, Chain, Classifier, DiagonalNormal, Flow, InjectivePad, Squeeze, certify, compiler
from iresnet.gpu import Acceleration, planned
from iresnet.gpu.couplings import CompiledCoupling, find_couplings
from iresnet.logdet import PowerSeries
from iresnet.models.glow import additive_glow, glow, i_revnet, mlp_glow, nice, real_nvp
from iresnet.train import State, Training
from iresnet.train.objective import Classification, MaximumLikelihood
from iresnet.transforms import AdditiveCoupling, AffineCoupling, Checkerboard, preserves_volume
from iresnet.transforms.conditioner import convnet, mlp
from iresnet.transforms.mixing import InvertibleConv1x1, Reverse
from iresnet.trust import why_modified
from tests.zoo import DOUBLE, dense_jacobian, normal, roused


class TestFlows:
    @pytest.mark.parametrize(
        ("make", "kinds"),
        [
            (glow, [ActNorm, InvertibleConv1x1, AffineCoupling]),
            (additive_glow, [ActNorm, Reverse, AdditiveCoupling]),
            (real_nvp, [ActNorm, AffineCoupling]),
            (nice, [AdditiveCoupling]),
        ],
    )
    def test_what_they_are_made_of(self, make, kinds):
        made = make((4,), 3, mlp)
        assert [type(t) for t in made] == kinds * 3

    @pytest.mark.parametrize("make", [real_nvp, nice])
    def test_couplings_alternate_between_the_two_parts(self, make):
        splits = [t.split.swapped for t in make((4,), 4, mlp) if hasattr(t, "split")]
        assert splits == [False, True, False, True]

    @pytest.mark.parametrize("make", [glow, additive_glow, real_nvp, nice])
    def test_every_output_comes_to_depend_on_every_input(self, make):
        torch.manual_seed(0)
        transform = roused(Chain(*make((4,), 4, mlp))).double().eval()
        assert float(dense_jacobian(transform, normal(1, 4)).abs().min()) > 1e-9

    def test_couplings_start_as_the_identity(self):
        x = normal(50, 4).float()
        assert torch.equal(Chain(*nice((4,), 3, mlp))(x), x)

    def test_the_glow_of_figure_2(self):
        flow = mlp_glow(2)
        kinds = [type(t) for t in flow.transform]
        assert kinds.count(AffineCoupling) == kinds.count(InvertibleConv1x1) == 100
        assert sum(p.numel() for p in flow.parameters()) == 100 * (8578 + 4 + 4) + 4

    @pytest.mark.no_cover
    @pytest.mark.parametrize("family", [glow, additive_glow, real_nvp, nice])
    def test_it_learns_a_density(self, family):
        """A normal with the wrong scales and correlation: its entropy is known."""
        torch.manual_seed(0)
        mix = torch.tensor([[2.0, 0.0], [1.0, 0.5]])
        flow = mlp_glow(2, 4, (16,), family=family, learned_base=True)
        optimiser = torch.optim.Adam(flow.parameters(), 1e-2)
        for i in range(150):
            loss = -flow(normal(256, 2, seed=i).float() @ mix.T).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        entropy = math.log(2 * math.pi * math.e) + math.log(float(torch.linalg.det(mix)))
        with torch.no_grad():
            nats = -flow.eval()(normal(4000, 2, seed=999).float() @ mix.T).mean()
        assert float(nats) == pytest.approx(entropy, abs=0.1)

    def test_samples_have_the_likelihood_that_is_reported(self):
        torch.manual_seed(0)
        flow = roused(mlp_glow(3, 2, (8,))).eval()
        x, log_prob = flow.rsample_and_log_prob((20,))
        torch.testing.assert_close(flow(x), log_prob, atol=1e-4, rtol=1e-4)

    def test_there_is_nothing_to_certify(self):
        with pytest.raises(ValueError, match="nothing to certify: Flow contains no ResidualBlock"):
            certify(mlp_glow(2, 1))

    @pytest.mark.parametrize(
        ("make", "sentence"),
        [
            (lambda: glow((2,), 0, mlp), "steps must be at least 1; got 0"),
            (lambda: nice((2,), 0, mlp), "steps must be at least 1; got 0"),
            (lambda: i_revnet((3, 4, 4), 1), "an i-RevNet needs an even number of channels; got 3"),
            (
                lambda: i_revnet((12, 4, 4), 1, squeezed=True),
                "got 12 after squeezing. Pad by one more",
            ),
            (lambda: mlp_glow(1), "dimension must be at least 2 for a coupling; got 1"),
        ],
    )
    def test_wrong_arguments_are_refused(self, make, sentence):
        with pytest.raises(ValueError, match=sentence):
            make()


class TestVolume:
    """NICE and i-RevNet preserve volume, and it can be read off what they are made of."""

    @pytest.mark.parametrize(
        ("make", "known"),
        [
            (lambda: nice((4,), 3, mlp), True),
            (lambda: [InjectivePad(1), *i_revnet((4, 4, 4), 2), Squeeze(), *i_revnet((16, 2, 2), 1)], True),
            (lambda: [Reverse(), AdditiveCoupling(nn.Linear(2, 2))], True),
            (lambda: additive_glow((4,), 1, mlp), False),  # its ActNorm scales
            (lambda: real_nvp((4,), 1, mlp), False),
            (lambda: glow((4,), 1, mlp), False),
        ],
    )
    def test_it_is_known(self, make, known):
        assert preserves_volume(Chain(*make())) is known

    def test_an_i_revnet_preserves_volume(self):
        torch.manual_seed(0)
        net = Chain(*i_revnet((4, 2, 2), 3)).double().eval()
        sign, logdet = torch.linalg.slogdet(dense_jacobian(net, normal(3, 4, 2, 2)))
        assert sign.tolist() == [1.0] * 3
        torch.testing.assert_close(logdet, torch.zeros(3, dtype=DOUBLE), atol=1e-12, rtol=0)
        assert net.forward_and_logdet(normal(3, 4, 2, 2))[1].tolist() == [0.0] * 3


class TestSteps:
    """A training step needs no estimator of a log-determinant, and says what it is made of."""

    def training(self, flow, **wish):
        return State(MaximumLikelihood(flow), Training(learning_rate=1e-3), None, Acceleration(**wish))

    def test_what_is_left_out_has_a_reason(self):
        state = self.training(mlp_glow(2, 1, (8,)), precision="bfloat16")
        assert state.engine.method == "eager"
        assert state.engine.precision == "float32"
        assert state.engine.reasons == [
            "no CUDA graph: this device is a CPU",
            "no compiled blocks: this device is a CPU",
            "no bfloat16: there are neither residual blocks nor convolutions",
        ]
        state = self.training(Flow(ActNorm(2), DiagonalNormal(2)), compile="on")
        assert "no compiled blocks: there are neither residual blocks nor couplings" in state.engine.reasons

    @pytest.mark.no_cover
    @pytest.mark.parametrize(
        "kind", ["glow", *(pytest.param(k, marks=pytest.mark.slow) for k in ("additive", "realnvp", "rows"))]
    )
    def test_compiled_couplings_are_the_plain_ones_and_share_a_function(self, monkeypatch, kind):
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        compiler._compiled.cache_clear()
        torch.manual_seed(0)
        inside = partial(convnet, width=8)
        steps = {
            "glow": lambda: glow((4, 2, 2), 4, inside),
            "additive": lambda: additive_glow((4, 2, 2), 4, inside),
            "realnvp": lambda: real_nvp((4, 2, 2), 4, inside, Checkerboard),
            "rows": lambda: nice((4,), 4, partial(mlp, hidden=(8,))),
        }[kind]()
        shape = (4,) if kind == "rows" else (4, 2, 2)
        flow, x = Flow(Chain(*steps), DiagonalNormal(shape), event_shape=shape).double(), normal(16, *shape)
        losses, graphs, made = [], [], torch._dynamo.utils.counters["stats"]
        for wish in ({"compile": "off"}, {"compile": "on"}):
            state, begun = self.training(copy.deepcopy(flow).train(), **wish), made["unique_graphs"]
            losses.append([float(state.advance(x).loss) for _ in range(6)])
            graphs.append(made["unique_graphs"] - begun)
        compiler._compiled.cache_clear()
        assert state.engine.method == "eager, couplings compiled"
        assert losses[1] == pytest.approx(losses[0], rel=1e-9)
        assert losses[0][-1] < losses[0][0]
        # Two for halves that take turns; the first of a chain may meet another layout.
        assert graphs[0] == 0
        assert 1 <= graphs[1] <= 3

    @pytest.mark.slow
    @pytest.mark.no_cover
    def test_batch_norms_of_compiled_couplings_count_their_batches(self, monkeypatch):
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        compiler._compiled.cache_clear()
        torch.manual_seed(0)
        model = Classifier(Chain(*i_revnet((8, 4, 4), 3)), nn.Sequential(nn.Flatten(), nn.Linear(128, 3)))
        x, y, states = normal(8, 8, 4, 4).float(), torch.arange(8) % 3, []
        for wish in ("off", "on"):
            twin = copy.deepcopy(model).train()
            settings = Training(optimiser="sgd", learning_rate=1e-3, momentum=0.0)
            state = State(Classification(twin), settings, None, Acceleration("off", wish, "float32"))
            for _ in range(5):
                state.advance(x, y)
            states.append(twin.state_dict())
        compiler._compiled.cache_clear()
        assert state.engine.compiled
        torch.testing.assert_close(states[1], states[0], atol=1e-5, rtol=1e-4)
        assert {int(v) for k, v in states[1].items() if k.endswith("num_batches_tracked")} == {5}

    def test_compiling_does_not_change_a_coupling(self):
        flow = mlp_glow(2, 2, (8,))
        with planned(flow, torch.float32, compiled=True) as view:
            wrapped = [m for m in view.modules() if isinstance(m, CompiledCoupling)]
        assert [m.inner for m in wrapped] == find_couplings(flow)
        assert not any(isinstance(m, CompiledCoupling) for m in flow.modules())
        assert all(why_modified(m) is None for m in flow.modules())

    def test_convolutions_may_run_in_bfloat16(self):
        torch.manual_seed(0)
        steps = Chain(Squeeze(), *glow((4, 2, 2), 2, lambda a, b: convnet(a, b, 8)))
        flow = Flow(steps, DiagonalNormal((4, 2, 2)), event_shape=(1, 4, 4))
        state = self.training(flow.train(), precision="bfloat16")
        assert state.engine.method == "eager, convolutions in bfloat16"
        losses = [float(state.advance(normal(64, 1, 4, 4).float()).loss) for _ in range(8)]
        assert losses[-1] < losses[0]

    def test_an_estimator_is_not_used(self):
        flow = mlp_glow(2, 2, (8,)).eval()
        x = normal(3, 2).float()
        assert torch.equal(flow(x), flow(x, estimator=PowerSeries(1)))

    @pytest.mark.gpu
    @pytest.mark.parametrize("image", [False, True])
    def test_a_cuda_graph_step_trains_like_eager_steps(self, image):
        torch.manual_seed(0)
        if image:
            steps = Chain(Squeeze(), *glow((4, 4, 4), 2, lambda a, b: convnet(a, b, 16)))
            flow = Flow(steps, DiagonalNormal((4, 4, 4)), event_shape=(1, 8, 8))
        else:
            flow = mlp_glow(2, 4, (16,))
        shape, runs = flow.event_shape, []
        for wish in (Acceleration("off", "off", "float32"), Acceleration("on", "auto", "float32")):
            model = copy.deepcopy(flow).cuda().train()
            state = State(MaximumLikelihood(model), Training(learning_rate=1e-3), None, wish)
            runs.append([float(state.advance(normal(64, *shape, seed=i).float().cuda()).loss) for i in range(20)])
        assert state.engine.method == "one CUDA graph, couplings compiled"
        assert state.engine.reasons == []
        assert runs[1] == pytest.approx(runs[0], rel=1e-3)

    @pytest.mark.gpu
    def test_convolutions_run_in_bfloat16_within_the_graph(self):
        torch.manual_seed(0)
        steps = Chain(Squeeze(), *glow((4, 4, 4), 2, lambda a, b: convnet(a, b, 64)))
        flow = Flow(steps, DiagonalNormal((4, 4, 4)), event_shape=(1, 8, 8)).cuda().train()
        state = State(MaximumLikelihood(flow), Training(learning_rate=1e-3), None, Acceleration())
        losses = [float(state.advance(normal(64, 1, 8, 8).float().cuda()).loss) for _ in range(30)]
        assert state.engine.method == "one CUDA graph, couplings compiled, convolutions in bfloat16"
        assert losses[-1] < losses[0]
