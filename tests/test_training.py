"""The training loop: schedule, average, guards, that it learns, and that it resumes exactly where it stopped."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from iresnet import (
    ActNorm,
    Chain,
    Classifier,
    DiagonalNormal,
    Flow,
    Hybrid,
    ResidualBlock,
    certify,
    contractive_mlp,
    lipschitz,
    mlp_flow,
)
from iresnet.data import Augment, Batches, Dataset, Schema, toy
from iresnet.models import Network, build
from iresnet.train import OPTIMISERS, Average, State, Training, checkpoint, parameter_groups, train
from iresnet.train.checkpoint import Checkpoint
from iresnet.train.guard import TrainingError
from iresnet.train.objective import Classification, Joint, MaximumLikelihood, Objective


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def moons(size=128, seed=0):
    generator = seeded(seed)
    while True:
        yield toy.sample("moons", size, generator)


def tiny_flow():
    torch.manual_seed(0)
    return mlp_flow(2, blocks=2, hidden=(16,))


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


class Plain(Objective):
    """The mean of what a model returns, for tests that need no more."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor | None = None, *, estimator=None, generator=None):
        loss = self.model(x).mean()
        return loss, {"loss": loss.detach()}


class TestSchedule:
    def test_warmup_reaches_the_peak_learning_rate_and_not_more(self):
        settings = Training(steps=100, learning_rate=1.0, warmup=10, cooldown=0.0)
        assert [round(settings.learning_rate_at(i), 6) for i in (0, 4, 9, 10, 50)] == [0.1, 0.5, 1.0, 1.0, 1.0]

    @pytest.mark.parametrize("warmup", [0, 1])
    def test_without_warmup_the_first_step_has_the_peak_learning_rate(self, warmup):
        assert Training(steps=10, learning_rate=0.5, warmup=warmup, schedule="constant").learning_rate_at(0) == 0.5

    def test_cools_down_linearly_over_the_last_part(self):
        settings = Training(steps=100, learning_rate=1.0, warmup=1, cooldown=0.4)
        assert settings.learning_rate_at(59) == 1.0
        assert settings.learning_rate_at(80) == pytest.approx(0.5)
        assert 0 < settings.learning_rate_at(99) == pytest.approx(1 / 40)

    def test_a_constant_learning_rate_is_constant_after_the_warmup(self):
        settings = Training(steps=100, learning_rate=0.3, warmup=4, schedule="constant", cooldown=0.9)
        assert [settings.learning_rate_at(i) for i in range(5)] == pytest.approx([0.075, 0.15, 0.225, 0.3, 0.3])
        assert {settings.learning_rate_at(i) for i in range(4, 100)} == {0.3}

    def test_a_cosine_falls_from_the_peak_learning_rate_to_nearly_zero(self):
        settings = Training(steps=1000, learning_rate=1.0, warmup=100, schedule="cosine")
        rates = [settings.learning_rate_at(i) for i in range(1000)]
        assert rates[:100] == pytest.approx([(i + 1) / 100 for i in range(100)])
        assert rates[99] == max(rates) == 1.0
        assert all(a > b for a, b in pairwise(rates[99:]))
        assert rates[549] == pytest.approx(0.5, abs=2e-3)  # half way down after half of the rest
        assert 0 < rates[-1] < 1e-4

    @pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
    def test_a_warmup_longer_than_training_never_ends(self, schedule):
        settings = Training(steps=10, learning_rate=1.0, warmup=100, schedule=schedule, cooldown=0.0)
        assert [settings.learning_rate_at(i) for i in range(10)] == pytest.approx([(i + 1) / 100 for i in range(10)])

    @pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "milestones"])
    def test_a_warmup_may_be_a_fraction_of_training(self, schedule):
        settings = Training(epochs=3, learning_rate=1.0, warmup=0.1, schedule=schedule).resolve_epochs(40)
        counted = replace(settings, warmup=12)
        assert [settings.learning_rate_at(i) for i in range(120)] == [counted.learning_rate_at(i) for i in range(120)]
        assert settings.learning_rate_at(2) == pytest.approx(3 / 12)

    def test_steps_are_computed_from_epochs_if_given(self):
        assert Training(epochs=3).resolve_epochs(40) == Training(epochs=3, steps=120)
        assert Training(steps=7).resolve_epochs(40) == Training(steps=7)

    def test_the_optimiser_gets_the_learning_rate_of_the_step(self):
        settings, rates = Training(steps=4, warmup=2, learning_rate=1.0, cooldown=0.5), []

        def callback(state):
            rates.append([group["lr"] for group in state.optimiser.param_groups])
            return False

        train(Plain(nn.Linear(1, 1)), [torch.ones(1, 1)] * 4, settings, callback=callback)
        assert rates == [[0.5], [1.0], [1.0], [0.5]]

    @pytest.mark.parametrize(
        ("wrong", "sentence"),
        [
            ({"steps": 0}, "steps must be at least 1; got 0"),
            ({"batch": 0}, "batch must be at least 1; got 0"),
            ({"validate_every": 0}, "validate_every must be at least 1; got 0"),
            ({"save_every": -5}, "save_every must be at least 1; got -5"),
            ({"epochs": -1}, "epochs must not be negative; got -1"),
            ({"warmup": -1}, r"warmup must be a fraction of training in \[0, 1\) or a number of steps; got -1"),
            ({"warmup": 1.5}, r"warmup must be a fraction of training in \[0, 1\) or a number of steps; got 1.5"),
            ({"warmup": math.nan}, r"warmup must be a fraction of training in \[0, 1\) or a number of steps; got nan"),
            ({"weight_decay": -0.1}, "weight_decay must not be negative; got -0.1"),
            ({"head_decay": -0.1}, "head_decay must not be negative; got -0.1"),
            ({"other_decay": -0.1}, "other_decay must not be negative; got -0.1"),
            ({"learning_rate": -1.0}, "learning_rate must be positive; got -1"),
            ({"learning_rate": math.nan}, "learning_rate must be positive; got nan"),
            ({"clip": 0.0}, "clip must be positive; got 0"),
            ({"cooldown": 2.0}, r"cooldown is a fraction of training, in \[0, 1\]; got 2.0"),
            ({"average": 1.0}, r"average is the decay of the averaged weights, in \[0, 1\); got 1.0"),
            (
                {"optimiser": "adma"},
                "optimiser must be one of adam, adamax, sgd; got 'adma'. Did you mean 'adam'?",
            ),
            (
                {"schedule": "cosin"},
                "schedule must be one of linear, cosine, constant, milestones; got 'cosin'. Did you mean 'cosine'?",
            ),
        ],
    )
    def test_invalid_settings_raise_a_clear_error(self, wrong, sentence):
        with pytest.raises(ValueError, match=sentence):
            Training(**wrong)


def hybrid():
    torch.manual_seed(0)
    block = ResidualBlock(contractive_mlp(2, (4,)))
    head = nn.Sequential(nn.Linear(2, 4), nn.ELU(), nn.Dropout(0.3), nn.Linear(4, 3))
    return Hybrid(Chain(block), DiagonalNormal(2, learned=True), head)


class Nothing(Objective):
    """A loss of zero with a gradient of zero for every parameter: what moves a weight is the decay alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y=None, *, estimator=None, generator=None):
        loss = sum((0 * p).sum() for p in self.model.parameters())
        return loss, {}


class TestDecay:
    def test_every_parameter_is_in_one_group(self):
        model = hybrid()
        groups = parameter_groups(Nothing(model), Training(weight_decay=0.1, head_decay=0.2, other_decay=0.3))
        names = {id(p): name for name, p in model.named_parameters()}
        found = {g["weight_decay"]: sorted(names[id(p)] for p in g["params"]) for g in groups}
        assert found == {
            0.1: sorted(n for n in names.values() if n.endswith("original")),
            0.2: ["head.0.weight", "head.3.weight"],
            0.3: sorted(n for n in names.values() if n.endswith(("bias", "mean", "log_scale"))),
        }
        assert len(found[0.1]) == 2

    def test_a_model_without_a_head_or_constraints_has_fewer_groups(self):
        assert [g["weight_decay"] for g in parameter_groups(Plain(nn.Linear(2, 2)), Training(weight_decay=0.1))] == [0]

    @pytest.mark.parametrize(
        ("optimiser", "factor"),
        [("adam", 1 - 0.5 * 0.1), ("sgd", 1 - 0.5 * 1.9 * 0.1)],  # Nesterov: the penalty's gradient once and 0.9 of it
    )
    @pytest.mark.parametrize("which", ["weight_decay", "head_decay", "other_decay"])
    def test_one_step_of_decay(self, optimiser, factor, which):
        model = hybrid()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        settings = Training(
            steps=1, optimiser=optimiser, learning_rate=0.5, warmup=0, schedule="constant", **{which: 0.1}
        )
        train(Nothing(model), [torch.zeros(1, 2)], settings)
        for name, p in model.named_parameters():
            head = name.startswith("head.") and name.endswith("weight")
            group = "head_decay" if head else "weight_decay" if name.endswith("original") else "other_decay"
            decays = group == which
            torch.testing.assert_close(p.detach(), before[name] * (factor if decays else 1), msg=name)

    @pytest.mark.parametrize(("nesterov", "moved"), [(True, 1.9), (False, 1.0)])
    def test_only_nesterov_momentum_looks_ahead(self, nesterov, moved):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        settings = Training(steps=1, optimiser="sgd", learning_rate=0.1, warmup=0, schedule="constant")
        train(Plain(model), [torch.full((1, 1), 0.5)], replace(settings, nesterov=nesterov))
        assert float(model.weight.detach()) == pytest.approx(1 - 0.05 * moved)

    @pytest.mark.parametrize("name", OPTIMISERS)
    def test_every_optimiser_decreases_the_loss(self, name):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        settings = Training(steps=1, optimiser=name, learning_rate=0.1, warmup=0, schedule="constant", momentum=0.0)
        train(Plain(model), [torch.full((1, 1), 0.5)], settings)
        step = 0.05 if name == "sgd" else 0.1  # sgd follows the gradient 0.5, the others its sign
        assert float(model.weight.detach()) == pytest.approx(1 - step)

    def test_the_gradient_is_clipped(self):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        settings = Training(steps=1, optimiser="sgd", learning_rate=1.0, warmup=0, schedule="constant", momentum=0.0)
        train(Plain(model), [torch.full((1, 1), 100.0)], replace(settings, clip=0.25))
        assert float(model.weight.detach()) == pytest.approx(0.75)


class TestAverage:
    def test_of_a_constant_is_the_constant(self):
        model = nn.Linear(2, 2)
        average = Average(model, 0.9)
        for _ in range(5):
            average.update(model)
        assert torch.allclose(average.copy.weight, model.weight)

    def test_follows_the_recurrence(self):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 0.0)
        average = Average(model, 0.5)
        nn.init.constant_(model.weight, 1.0)
        expected = 0.0
        for count in (1, 2, 3):
            average.update(model)
            decay = min(0.5, count / (count + 10))
            expected = decay * expected + (1 - decay)
        assert float(average.copy.weight.detach()) == pytest.approx(expected)

    def test_norms_of_the_average_are_its_own(self):
        """An average carries the live model's power iteration until it is refreshed: its sigma would be wrong."""
        flow = tiny_flow()
        trained = train(MaximumLikelihood(flow), moons(), Training(steps=20, learning_rate=0.02))
        for layer in trained.modules():
            if lipschitz.cap_of(layer) is not None:
                norm = float(torch.linalg.matrix_norm(layer.weight.detach(), 2))
                assert norm <= lipschitz.cap_of(layer).coefficient * (1 + 1e-4)

    def test_norms_of_the_average_are_its_own_in_eval_too(self):
        """There is no way from train to eval then, on which a layer would settle by itself."""
        layer = lipschitz.LipschitzLinear(4, 4, coefficient=0.5).eval()
        average = Average(layer, 0.5)
        with torch.no_grad():
            layer.parametrizations.weight.original.add_(3 * torch.eye(4))
        average.update(layer)
        norm = float(torch.linalg.matrix_norm(average.result(layer).weight.detach(), 2))
        assert norm == pytest.approx(0.5, rel=1e-4)

    def test_the_result_has_the_averaged_weights_and_the_live_buffers(self):
        model = nn.BatchNorm1d(1)
        average = Average(model, 0.5)
        nn.init.constant_(model.weight, 3.0)
        model.running_mean.fill_(7.0)
        average.update(model)
        result = average.result(model)
        assert float(result.weight.detach()) == pytest.approx(1 / 11 + 3 * 10 / 11)
        assert float(result.running_mean) == 7.0
        assert result.weight.requires_grad
        assert not result.training

    def test_a_layer_that_is_used_twice_is_averaged_too(self):
        layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(layer.weight, 0.0)
        model = nn.Sequential(layer, layer)
        average = Average(model, 0.5)
        nn.init.constant_(layer.weight, 1.0)
        average.update(model)
        assert float(average.result(model)[0].weight.detach()) == pytest.approx(10 / 11)

    def test_validating_the_average_does_not_change_training(self):
        """Trap: a validation that settles the live model's norms trains another model, the more often it looks."""
        looked, alone = tiny_flow(), tiny_flow()
        settings, seen = Training(steps=8, learning_rate=0.02), []

        def callback(state):
            before = {name: value.clone() for name, value in state.objective.model.state_dict().items()}
            model = state.averaged_model()
            model(torch.zeros(2, 2))
            model.sample((2,))
            assert all(torch.equal(v, before[n]) for n, v in state.objective.model.state_dict().items())
            assert state.objective.model.training
            seen.append(model)
            return False

        a = train(MaximumLikelihood(looked), moons(), settings, callback=callback)
        b = train(MaximumLikelihood(alone), moons(), settings)
        assert len(seen) == 8
        assert same(looked, alone)
        assert same(a, b)
        assert same(seen[-1], a)


class TestTrain:
    def test_learns(self):
        before = float(-tiny_flow()(next(moons(2_000, seed=9))).mean().detach())
        trained = train(MaximumLikelihood(tiny_flow()), moons(), Training(steps=150, learning_rate=1e-2))
        after = float(-trained(next(moons(2_000, seed=9))).mean().detach())
        assert after < before - 0.2
        assert not trained.training
        assert certify(trained).passed

    def test_repeats_itself(self):
        runs = [train(MaximumLikelihood(tiny_flow()), moons(), Training(steps=5)) for _ in range(2)]
        assert same(*runs)

    def test_reports_every_step_in_nats(self):
        seen = []
        train(MaximumLikelihood(tiny_flow()), moons(), Training(steps=3), report=lambda *a: seen.append(a))
        assert [(done, steps) for done, steps, _ in seen] == [(1, 3), (2, 3), (3, 3)]
        assert all(math.isfinite(metrics["nats"]) for _, _, metrics in seen)

    def test_the_logged_metric_is_the_likelihood(self):
        flow, x = tiny_flow(), next(moons())
        flow(x)  # initialises ActNorm
        flow.eval()
        loss, metrics = MaximumLikelihood(flow)(x)
        assert float(metrics["nats"]) == pytest.approx(float(-flow.log_prob(x).mean().detach()))
        assert float(loss.detach()) == float(metrics["nats"])

    def test_labels_reach_the_objective(self):
        torch.manual_seed(0)
        model = Classifier(Chain(ResidualBlock(contractive_mlp(2, (8,)))), nn.Linear(2, 2))
        x = next(moons(200))
        y, seen = (x[:, 0] > 0.5).long(), []
        train(
            Classification(model),
            [(x, y)] * 60,
            Training(steps=60, learning_rate=0.1, warmup=1),
            report=lambda *a: seen.append(a),
        )
        assert float(seen[-1][2]["error %"]) < 5 < float(seen[0][2]["error %"])

    def test_a_callback_can_stop_it(self):
        seen = []
        model = train(
            MaximumLikelihood(tiny_flow()),
            moons(),
            Training(steps=100),
            callback=lambda state: seen.append(state.step) or state.step == 3,
        )
        assert seen == [1, 2, 3]
        assert same(model, train(MaximumLikelihood(tiny_flow()), moons(), Training(steps=3, warmup=50, cooldown=0.0)))

    def test_it_takes_as_many_batches_as_steps(self):
        batches = iter(range(10))
        train(Plain(nn.Linear(1, 1)), (torch.ones(1, 1) * b for b in batches), Training(steps=4))
        assert next(batches) in (4, 5)

    def test_training_without_a_batch_raises(self):
        with pytest.raises(
            TrainingError, match="training needs at least one batch; got none. Give more data or more steps."
        ):
            train(MaximumLikelihood(tiny_flow()), [], Training(steps=3))


class Explodes(nn.Module):
    """The identity, and infinite from the third call on."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x if self.calls < 3 else x * math.inf


class BadGradient(torch.autograd.Function):
    """The identity, whose gradient is not a number."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.nan


class TestGuards:
    def test_a_loss_that_is_not_a_number_names_step_and_parameter(self):
        class Broken(Plain):
            calls = 0

            def forward(self, x, y=None, *, estimator=None, generator=None):
                self.calls += 1
                if self.calls == 3:
                    nn.init.constant_(self.model.get_parameter("weight"), math.nan)
                return super().forward(x)

        with pytest.raises(TrainingError, match=r"step 3 is nan; model.weight is the first .* Lower learning_rate"):
            train(Broken(nn.Linear(1, 1)), [torch.ones(2, 1)] * 5, Training(steps=5))

    def test_with_finite_parameters_it_names_the_first_layer_with_an_output_that_is_not_finite(self):
        model = nn.Sequential(nn.Linear(1, 2), nn.Sequential(nn.Tanh(), Explodes()), nn.Linear(2, 1))
        sentence = (
            r"the loss of step 3 is -?(inf|nan); the output of model.1.1 is the first that is not finite. "
            r"Lower learning_rate, lengthen warmup, or clip harder."
        )
        with pytest.raises(TrainingError, match=sentence):
            train(Plain(model), [torch.ones(2, 1)] * 5, Training(steps=5))
        assert not any(m._forward_hooks for m in model.modules())  # the replay leaves nothing behind

    def test_the_layers_of_a_hybrid_are_named(self):
        model = hybrid()
        model.head.insert(1, Explodes())
        batch = (torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))
        with pytest.raises(TrainingError, match="step 3 is nan; the output of model.head.1 is the first"):
            train(Joint(model), [batch] * 5, Training(steps=5))

    def test_the_layers_of_a_flow_are_named(self):
        """A flow asks its transforms for value and determinant together, which is not calling them."""
        chain = Chain(ActNorm(2), Chain(ActNorm(2), ResidualBlock(contractive_mlp(2, (4,)))), ActNorm(2))
        bad = chain[1][1]
        train(MaximumLikelihood(Flow(chain, DiagonalNormal(2))), moons(), Training(steps=1))
        with torch.no_grad():
            bad.g[-1].bias.fill_(3e38)
            chain[1][0].shift.fill_(3e38)  # both finite; their sum is not
            chain[1][0].log_scale.zero_()
        with pytest.raises(TrainingError, match="the output of model.transform.transforms.1.transforms.1 is the first"):
            train(MaximumLikelihood(Flow(chain, DiagonalNormal(2))), moons(), Training(steps=1))
        assert "forward_and_logdet" not in vars(bad)  # the replay leaves nothing behind

    def test_if_every_layer_is_finite_it_says_so(self):
        class Odd(Plain):
            def forward(self, x, y=None, *, estimator=None, generator=None):
                loss = super().forward(x)[0] / 0
                return loss, {"loss": loss.detach()}

        with pytest.raises(TrainingError, match="step 1 is -?inf; every layer is finite: check the data. Lower"):
            train(Odd(nn.Linear(1, 1)), [torch.ones(2, 1)], Training(steps=1))

    def test_a_gradient_that_is_not_finite_does_not_reach_the_weights(self):
        class Second(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second, self.calls = nn.Linear(1, 1), nn.Linear(1, 1), 0

            def forward(self, x):
                self.calls += 1
                y = self.second(x)
                return self.first(x) + (BadGradient.apply(y) if self.calls == 3 else y)

        model, kept = Second(), []

        def callback(state):
            kept.append({name: p.detach().clone() for name, p in model.named_parameters()})
            return False

        sentence = (
            r"the gradient of step 3 is nan; that of model.second.weight is the first that is not finite. "
            r"The weights are still those of step 2. Lower learning_rate"
        )
        with pytest.raises(TrainingError, match=sentence):
            train(Plain(model), [torch.ones(2, 1)] * 5, Training(steps=5), callback=callback)
        assert len(kept) == 2
        assert all(torch.equal(p.detach(), kept[-1][name]) for name, p in model.named_parameters())


IMAGES = Schema((1, 4, 4), levels=5, classes=("a", "b", "c"))
TABLE = Schema((3,), classes=("a", "b"))


def problem(kind):
    """(objective, batches) that draw on everything: augmentation, noise, probes, dropout, a learned base, labels."""
    torch.manual_seed(3)
    if kind == "images":
        x = torch.randint(5, (24, 1, 4, 4), generator=seeded()).to(torch.uint8)
        network = Network(blocks=(1, 1), width=4, kernels=(3, 1), head=(4,), dropout=0.5, terms=2, factor_out=True)
        model = build(network, IMAGES, "hybrid", x)
        data = Dataset(x, torch.arange(24) % 3, IMAGES)
        return Joint(model, 5, augment=Augment(shift=1)), Batches(data, 8, augment=Augment(shift=1))
    x = torch.randn(24, 3, generator=seeded())
    network = Network(blocks=(2,), width=6, depth=1, estimator="roulette", terms=2, dropout=0.5, head=(4,))
    data = Dataset(x, torch.tensor([0, 1, -1] * 8), TABLE)
    return Joint(build(network, TABLE, "semi-supervised", x)), Batches(data, 8)


class TestResume:
    @pytest.mark.parametrize("optimiser", OPTIMISERS)
    @pytest.mark.parametrize("kind", ["images", "table"])
    def test_resumed_training_continues_bit_for_bit(self, kind, optimiser, tmp_path):
        """Ten steps at once, and five, a file, another process (as far as one can tell), five: bit for bit."""
        settings = Training(
            steps=10, optimiser=optimiser, learning_rate=0.02, warmup=3, weight_decay=0.01, head_decay=0.01, average=0.7
        )
        path = tmp_path / "last.safetensors"

        def save(state):
            if state.step == 5:
                state.averaged_model()
                checkpoint.save(state.snapshot(), path, version="1")
            return False

        objective, batches = problem(kind)
        generator, metrics = seeded(7), []
        whole = train(
            objective, batches.starting_at(0), settings, generator=generator, callback=save,
            report=lambda step, steps, f: metrics.append({k: float(v) for k, v in f.items()}),
        )  # fmt: skip
        resumed, batches = problem(kind)
        torch.manual_seed(99)  # a new process has another past
        again, its_figures = seeded(1), []
        half = train(
            resumed, batches.starting_at(5), settings, generator=again, resume=checkpoint.load(path),
            report=lambda step, steps, f: its_figures.append({k: float(v) for k, v in f.items()}),
        )  # fmt: skip
        assert its_figures == metrics[5:]
        assert same(resumed.model, objective.model)
        assert same(half, whole)
        assert torch.equal(again.get_state(), generator.get_state())

    def test_later_steps_do_not_change_a_snapshot(self):
        """The weights go on; what was taken must not."""
        objective, batches = problem("table")
        taken = []

        def callback(state):
            if state.step == 2:
                snapshot = state.snapshot()
                taken.extend(
                    [snapshot, {(g, n): t.clone() for g, ts in snapshot.tensors.items() for n, t in ts.items()}]
                )
            return False

        train(objective, batches.starting_at(0), Training(steps=4), generator=seeded(), callback=callback)
        snapshot, copies = taken
        assert {"weights", "average", "optimiser", "generator"} == set(snapshot.tensors)
        assert (snapshot.state["step"], snapshot.state["averaged"]) == (2, 2)
        for (group, name), tensor in copies.items():
            assert torch.equal(snapshot.tensors[group][name], tensor), (group, name)

    def test_one_checkpoint_can_be_resumed_twice(self):
        objective, batches = problem("table")
        taken = []
        train(
            objective, batches.starting_at(0), Training(steps=2), generator=seeded(),
            callback=lambda state: taken.append(state.snapshot()),
        )  # fmt: skip
        models = []
        for _ in range(2):
            resumed, batches = problem("table")
            train(resumed, batches.starting_at(2), Training(steps=4), generator=seeded(), resume=taken[-1])
            models.append(resumed.model)
        assert same(*models)

    def test_a_checkpoint_from_before_the_first_step(self):
        objective, _ = problem("table")
        state = State(objective, Training(), seeded())
        start, snapshot = {n: t.clone() for n, t in objective.model.state_dict().items()}, state.snapshot()
        with torch.no_grad():
            for p in objective.parameters():
                p.add_(1)
        state.restore(snapshot)
        assert state.step == 0
        assert state.average is None
        assert all(torch.equal(t, start[n]) for n, t in objective.model.state_dict().items())

    @pytest.mark.parametrize("steps", [2, 1])
    def test_resuming_a_finished_training_returns_its_result(self, steps):
        objective, batches = problem("table")
        taken = []
        settings = Training(steps=2)
        done = train(
            objective, batches.starting_at(0), settings, generator=seeded(),
            callback=lambda state: taken.append(state.snapshot()),
        )  # fmt: skip
        resumed, batches = problem("table")
        again = train(resumed, batches.starting_at(2), replace(settings, steps=steps), resume=taken[-1])
        assert same(done, again)

    def test_the_generator_state_of_another_device_is_ignored(self):
        objective, _ = problem("table")
        snapshot = State(objective, Training(), seeded(4)).snapshot()
        tensors = {**snapshot.tensors, "generator": {"state": torch.zeros(16, dtype=torch.uint8)}}
        generator = seeded(5)
        State(objective, Training(), generator).restore(Checkpoint(tensors, snapshot.state))
        assert torch.equal(generator.get_state(), seeded(5).get_state())

    def test_a_checkpoint_of_another_model(self):
        flow = MaximumLikelihood(tiny_flow())
        snapshot = State(flow, Training(), None).snapshot()
        other = State(MaximumLikelihood(mlp_flow(2, blocks=1, hidden=(16,))), Training(), None)
        sentence = (
            r"the checkpoint does not fit this model: weights/transform[.\w]+ is unexpected. Resume with the "
            r"settings it was made with.$"
        )
        with pytest.raises(ValueError, match=sentence):
            other.restore(snapshot)
        sentence = r"does not fit this model: weights/transform[.\w]+ must have shape \(.*\); got \(.*\). Resume with"
        with pytest.raises(ValueError, match=sentence):
            State(MaximumLikelihood(mlp_flow(2, blocks=2, hidden=(8,))), Training(), None).restore(snapshot)

    def test_a_checkpoint_without_weights(self):
        with pytest.raises(
            ValueError, match="the checkpoint does not fit this model: weights/trans.* is missing. Resume"
        ):
            State(MaximumLikelihood(tiny_flow()), Training(), None).restore(Checkpoint({}, {"step": 1}))

    def test_a_checkpoint_of_another_optimiser(self):
        objective, _ = problem("table")
        snapshot = State(objective, Training(optimiser="sgd"), None).snapshot()
        with pytest.raises(
            ValueError, match="the checkpoint was made with the optimiser sgd; got adam. Resume with the settings it"
        ):
            State(objective, Training(), None).restore(snapshot)


#: A weight of the table's network, under its name.
FIRST = "transform.transforms.2.g.0.parametrizations.weight.original"


def interrupted(kind="table", optimiser="adam"):
    """(a State that took two steps' worth of nothing, what was saved after two steps of its twin)."""
    settings, taken = Training(steps=4, optimiser=optimiser), []
    objective, batches = problem(kind)
    train(
        objective, batches.starting_at(0), settings, generator=seeded(),
        callback=lambda state: taken.append(state.snapshot()) or state.step == 2,
    )  # fmt: skip
    return State(problem(kind)[0], settings, seeded()), taken[-1]


def held(state):
    """All that a State may change, as it is."""
    tensors = {f"weights/{n}": t.clone() for n, t in state.objective.model.state_dict().items()}
    noise = {"global": torch.get_rng_state(), "state": state.generator.get_state()}
    return tensors | noise, state.average, dict(state.optimiser.state), state.step


class TestForeignTensors:
    """Everything that is restored is checked before any of it is: fused optimisers write where they are told to."""

    @pytest.mark.parametrize(
        ("group", "name", "change", "why"),
        [
            ("optimiser", "0.exp_avg", lambda t: t.flatten()[:1], r"optimiser/0.exp_avg must have shape"),
            ("optimiser", "0.exp_avg", lambda t: t[:-1], r"optimiser/0.exp_avg must have shape"),
            ("optimiser", "0.exp_avg_sq", lambda t: torch.cat([t, t]), r"optimiser/0.exp_avg_sq must have shape"),
            ("optimiser", "0.step", lambda t: t.expand(3), r"optimiser/0.step must have shape \(\); got \(3,\)"),
            ("optimiser", "0.exp_avg", lambda t: t.int(), "optimiser/0.exp_avg must be float32; got int32"),
            ("optimiser", "0.exp_avg", lambda t: t * math.nan, "optimiser/0.exp_avg has values that are not finite"),
            ("optimiser", "0.exp_avg_sq", lambda t: -1 - t, "optimiser/0.exp_avg_sq must not be negative"),
            ("optimiser", "0.step", lambda t: t - 9, "optimiser/0.step must not be negative"),
            ("optimiser", "0.exp_avg_sq", lambda t: None, "optimiser/0.exp_avg_sq is missing"),
            ("optimiser", "99.exp_avg", lambda t: torch.ones(1), "optimiser/99.exp_avg is unexpected"),
            ("optimiser", "x.exp_avg", lambda t: torch.ones(1), "optimiser/x.exp_avg is unexpected"),
            ("optimiser", "-1.exp_avg", lambda t: torch.ones(1), "optimiser/-1.exp_avg is unexpected"),
            ("optimiser", "00.exp_avg", lambda t: torch.ones(1), "optimiser/00.exp_avg is unexpected"),
            ("optimiser", "0.exp_inf", lambda t: torch.ones(1), "optimiser/0.exp_inf is unexpected"),
            ("average", FIRST, lambda t: t.flatten()[:1], "average/.* must have shape"),
            ("average", FIRST, lambda t: t * math.inf, "average/.* has values that are not finite"),
            ("average", FIRST, lambda t: None, "average/.* is missing"),
            ("weights", FIRST, lambda t: t * math.nan, "weights/.* has values that are not finite"),
            ("weights", FIRST, lambda t: t.to(torch.int32), "weights/.* must be float32; got int32"),
            ("generator", "global", lambda t: t[:-1], "generator/global must have shape"),
            ("generator", "global", lambda t: t.int(), "generator/global must be uint8; got int32"),
            ("generator", "state", lambda t: t[:100], "generator/state must have shape"),
            ("generator", "state", torch.zeros_like, "a generator state is invalid, Invalid mt19937 state"),
            ("generator", "mine", lambda t: torch.zeros(3), "generator/mine is unexpected"),
        ],
    )
    def test_are_refused_and_nothing_changes(self, group, name, change, why):
        state, saved = interrupted()
        tensors = {g: dict(named) for g, named in saved.tensors.items()}
        changed = change(tensors[group].pop(name, None))
        tensors[group] |= {} if changed is None else {name: changed}
        before = held(state)
        with pytest.raises(ValueError, match=why) as caught:
            state.restore(replace(saved, tensors=tensors))
        assert "\n" not in str(caught.value)
        after = held(state)
        assert before[0].keys() == after[0].keys()
        assert all(torch.equal(t, after[0][n]) for n, t in before[0].items())
        assert before[1:] == after[1:]

    @pytest.mark.parametrize(
        ("optimiser", "name"), [("adam", "exp_avg"), ("adamax", "exp_inf"), ("sgd", "momentum_buffer")]
    )
    def test_the_optimiser_state_has_the_layout_of_its_weight(self, optimiser, name):
        state, saved = interrupted(optimiser=optimiser)
        tensors = {g: dict(named) for g, named in saved.tensors.items()}
        tensors["optimiser"][f"1.{name}"] = torch.ones(1)
        with pytest.raises(ValueError, match=f"optimiser/1.{name} must have shape"):
            state.restore(replace(saved, tensors=tensors))

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"step": None}, "the checkpoint is damaged: step must be a number; got None"),
            ({"step": -3}, "step must be a non-negative integer; got -3"),
            ({"step": "two"}, "step must be a number; got 'two'"),
            ({"averaged": 1.5}, "averaged must be a non-negative integer"),
        ],
    )
    def test_states_with_invalid_numbers_are_refused(self, changes, why):
        state, saved = interrupted()
        with pytest.raises(ValueError, match=why):
            state.restore(replace(saved, state={**saved.state, **changes}))

    @pytest.mark.parametrize("missing", ["step", "averaged"])
    def test_what_is_missing_is_named(self, missing):
        state, saved = interrupted()
        with pytest.raises(ValueError, match=f"{missing} is missing. Restore it, or train again."):
            state.restore(replace(saved, state={k: v for k, v in saved.state.items() if k != missing}))

    @pytest.mark.parametrize(
        ("group", "why"), [("average", "average/.* is missing"), ("optimiser", "the optimiser.s state is missing")]
    )
    def test_a_group_that_is_missing_is_named(self, group, why):
        state, saved = interrupted()
        with pytest.raises(ValueError, match=why):
            state.restore(replace(saved, tensors={g: t for g, t in saved.tensors.items() if g != group}))
