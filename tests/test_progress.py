"""Loops report how far they are: fractions by hand, nested loops, and every evaluation that takes long."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from iresnet import Chain, Classifier, Flow, ResidualBlock, contractive_mlp, evaluate
from iresnet.base import DiagonalNormal
from iresnet.data import Dataset, Schema
from iresnet.evaluate import chunks
from iresnet.inverse import invert
from iresnet.progress import each, listening, part, phase


def heard(function):
    """The fractions that a call reports."""
    found = []
    with listening(lambda fraction, name: found.append((fraction, name))):
        function()
    return found


def fractions(function):
    return [fraction for fraction, _ in heard(function)]


class TestFractions:
    def test_a_loop_reports_the_fraction_that_is_done(self):
        assert fractions(lambda: each(str, range(4))) == [0.0, 0.25, 0.5, 0.75, 1.0]

    def test_an_inner_loop_divides_its_part_of_the_outer_one(self):
        nested = fractions(lambda: each(lambda _: each(str, range(2)), range(2)))
        assert nested == [0.0, 0.25, 0.5, 0.5, 0.75, 1.0, 1.0]

    def test_a_second_loop_starts_again(self):
        def two():
            each(str, range(1))
            each(str, range(2))

        assert fractions(two) == [0.0, 1.0, 0.0, 0.5, 1.0]

    def test_results_are_those_of_a_list(self):
        assert each(lambda x: x * x, iter([1, 2, 3])) == [1, 4, 9]
        assert each(str, []) == []

    def test_a_phase_is_named_and_an_inner_one_is_not(self):
        def work():
            with phase("outer"):
                each(inner, range(1))

        def inner(_):
            with phase("inner"):
                each(str, range(1))

        assert [name for _, name in heard(work)] == ["outer"] * 5

    def test_without_a_listener_nothing_happens(self):
        with part(0, 2), phase("x"):
            assert each(str, [1]) == ["1"]

    def test_after_an_error_the_next_loop_starts_at_0(self):
        def work():
            with pytest.raises(ZeroDivisionError):
                each(lambda x: 1 / x, [1, 0])
            each(str, range(1))

        assert fractions(work) == [0.0, 0.5, 0.0, 1.0]


def flow(blocks=3):
    chain = Chain(*(ResidualBlock(contractive_mlp(2, hidden=(4,))) for _ in range(blocks)))
    return Flow(chain, DiagonalNormal((2,))).eval()


def points(n=6, y=None):
    schema = Schema((2,), columns=("a", "b"), classes=() if y is None else ("0", "1"))
    return Dataset(torch.randn(n, 2, generator=torch.Generator().manual_seed(0)), y, schema)


def rises(values):
    """Whether fractions rise from 0 to 1, with something between, except where a loop starts again."""
    assert values[0] == 0
    assert values[-1] == 1
    assert all(b == 0 or b >= a - 1e-12 for a, b in pairwise(values))
    assert any(0 < value < 1 for value in values)
    return True


class TestEvaluations:
    """Whatever the command waits for reports fractions between 0 and 1."""

    def test_chunks(self):
        assert fractions(lambda: chunks.in_chunks(lambda x: x, torch.zeros(4, 1), 2)) == [0.0, 0.5, 1.0]

    def test_blocks_of_an_inverse(self):
        model = flow()
        with torch.no_grad():
            found = fractions(lambda: invert(model.transform, torch.zeros(1, 2)))
        assert found == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0])

    def test_draws_of_a_likelihood(self):
        images = Dataset(torch.zeros(3, 1, 1, 2, dtype=torch.uint8), None, Schema((1, 1, 2), 4))
        model = Flow(Chain(ResidualBlock(nn.Conv2d(1, 1, 1), lipschitz=0.5)), DiagonalNormal((1, 1, 2))).eval()
        with torch.no_grad():
            model.transform[0].g.weight.fill_(0.5)
        found = fractions(lambda: evaluate.density(model, images, draws=4))
        assert found == pytest.approx([0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75, 1, 1])

    @pytest.mark.parametrize("what", ["evaluate", "ood", "gains", "reconstruct", "attack"])
    def test_others(self, what):
        model, data = flow(), points(20)
        labelled = points(20, torch.arange(20) % 2)
        classifier = Classifier(Chain(ResidualBlock(contractive_mlp(2, hidden=(4,)))), nn.Linear(2, 2)).eval()
        calls = {
            "evaluate": lambda: evaluate.evaluate(model, data),
            "ood": lambda: evaluate.ood_detection(model, data, {"other": data}, torch.zeros(5)),
            "gains": lambda: evaluate.column_gains(model, data, values=2),
            "reconstruct": lambda: evaluate.reconstruct(model, data),
            "attack": lambda: evaluate.robustness(classifier, labelled, 0.1, steps=1, restarts=2),
        }
        assert rises(fractions(calls[what]))

    def test_phases_of_an_evaluation(self):
        assert list(dict.fromkeys(name for _, name in heard(lambda: evaluate.evaluate(flow(), points())))) == [
            "likelihood",
            "inverse",
        ]
