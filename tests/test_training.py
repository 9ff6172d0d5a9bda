"""The training loop: its schedule, its average, its guard, and that it learns."""

import math

import pytest
import torch
from torch import Tensor, nn

from iresnet import certify, lipschitz, mlp_flow
from iresnet.data import toy
from iresnet.objective import MaximumLikelihood, Objective
from iresnet.training import Average, Training, TrainingError, train


def moons(size=128, seed=0):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield toy.sample("moons", size, generator)


def tiny_flow():
    torch.manual_seed(0)
    return mlp_flow(2, blocks=2, hidden=(16,))


class TestSchedule:
    def test_warm_up_reaches_the_full_rate_and_not_more(self):
        settings = Training(steps=100, learning_rate=1.0, warmup=10, cooldown=0.0)
        assert [round(settings.rate(i), 6) for i in (0, 4, 9, 10, 50)] == [0.1, 0.5, 1.0, 1.0, 1.0]

    def test_cools_down_linearly_over_the_last_part(self):
        settings = Training(steps=100, learning_rate=1.0, warmup=1, cooldown=0.4)
        assert settings.rate(59) == 1.0
        assert settings.rate(80) == pytest.approx(0.5)
        assert 0 < settings.rate(99) == pytest.approx(1 / 40)

    @pytest.mark.parametrize(
        ("wrong", "sentence"),
        [
            ({"steps": 0}, "steps must be at least 1; got 0"),
            ({"learning_rate": -1.0}, "learning_rate must be positive; got -1"),
            ({"cooldown": 2.0}, "cooldown is the last part"),
            ({"average": 1.0}, "average is the decay"),
        ],
    )
    def test_wrong_settings_get_a_sentence(self, wrong, sentence):
        with pytest.raises(ValueError, match=sentence):
            Training(**wrong)


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
        for a, b in zip(*(m.state_dict().values() for m in runs), strict=True):
            assert torch.equal(a, b)

    def test_reports_every_step_in_nats(self):
        seen = []
        train(MaximumLikelihood(tiny_flow()), moons(), Training(steps=3), report=lambda *a: seen.append(a))
        assert [(done, steps) for done, steps, _ in seen] == [(1, 3), (2, 3), (3, 3)]
        assert all(math.isfinite(figures["nats"]) for _, _, figures in seen)

    def test_the_logged_figure_is_the_likelihood(self):
        flow, x = tiny_flow(), next(moons())
        flow(x)  # initialises ActNorm
        flow.eval()
        loss, figures = MaximumLikelihood(flow)(x)
        assert float(figures["nats"]) == pytest.approx(float(-flow.log_prob(x).mean().detach()))
        assert float(loss.detach()) == float(figures["nats"])

    def test_without_a_batch(self):
        with pytest.raises(TrainingError, match="no batch"):
            train(MaximumLikelihood(tiny_flow()), [], Training(steps=3))

    def test_a_loss_that_is_not_a_number_names_step_and_parameter(self):
        class Broken(Objective):
            def __init__(self):
                super().__init__()
                self.model = nn.Linear(1, 1)
                self.calls = 0

            def forward(self, batch: Tensor, *, generator=None):
                self.calls += 1
                if self.calls == 3:
                    nn.init.constant_(self.model.get_parameter("weight"), math.nan)
                loss = self.model(batch).square().mean()
                return loss, {"loss": loss.detach()}

        with pytest.raises(TrainingError, match=r"step 3 is nan; model.weight is the first .* Lower learning_rate"):
            train(Broken(), [torch.ones(2, 1)] * 5, Training(steps=5))
