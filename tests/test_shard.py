"""A batch that several processes share: the average of their losses, metrics and gradients is that of the batch."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from iresnet import RussianRoulette
from iresnet.data import Augment, Schema
from iresnet.logdet import PowerSeries
from iresnet.models import Network, build
from iresnet.models.readout import Dropout
from iresnet.shard import batch_mean, draw_rows, is_shared, own_rows, sharing, take_own
from iresnet.train import Classification, Joint, Margin, MaximumLikelihood

IMAGES = Schema((1, 4, 4), levels=5, classes=("a", "b", "c"))
TABLE = Schema((3,), classes=("a", "b"))
CONV = Network(blocks=(1, 1), width=4, kernels=(3, 1), head=(4,), dropout=0.5, terms=2)
MLP = Network(blocks=(2,), width=6, depth=1, head=(4,), dropout=0.5)
SHIFTED = Augment(shift=1, flip=True, shifted=0.5, cutout=2)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def images(network, kind, labelled=0, **options):
    x, y = torch.randint(5, (8, 1, 4, 4), generator=seeded()).to(torch.uint8), torch.tensor([0, 1, -1, 2, -1, 0, 1, 2])
    model = build(network, IMAGES, kind, x)
    if kind == "density":
        return MaximumLikelihood(model, 5), x, None
    if kind == "classification":
        return (Margin if options else Classification)(model, 5, **options), x, y
    return Joint(model, 5, labelled=labelled, **options), x, y


def table(estimator):
    x, y = torch.randn(8, 3, generator=seeded()), torch.tensor([0, 1, -1, 0, -1, 0, 1, 1])
    model = build(MLP, TABLE, "semi-supervised", x)
    model.estimator = estimator
    return Joint(model), x, y


OBJECTIVES = {
    "uniform noise": lambda: images(CONV, "density"),
    "learned noise": lambda: images(replace(CONV, dequantiser=4), "density"),
    "classes": lambda: images(CONV, "classification"),
    "margin": lambda: images(replace(CONV, head=(), dropout=0.0), "classification", radius=0.5),
    "hybrid": lambda: images(CONV, "hybrid", augment=SHIFTED),
    "labelled": lambda: images(CONV, "hybrid", labelled=3, augment=SHIFTED),
    "classes of a hybrid": lambda: images(CONV, "hybrid", density=0.0),
    "gaussian probes": lambda: table(PowerSeries(3, probe="gaussian", probes=2)),
    "shared probes": lambda: table(PowerSeries(3, shared=True)),
    "roulette": lambda: table(RussianRoulette(2)),
}


def outcome(objective, x, y):
    """The loss with its metrics, and all gradients, with fixed random numbers."""
    torch.manual_seed(5)
    objective = copy.deepcopy(objective)
    loss, metrics = objective(x, y, generator=seeded(7))
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in objective.parameters()]
    return [loss.detach(), *metrics.values(), *gradients]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_average_over_the_processes_is_that_of_the_batch(name, ranks):
    objective, x, y = OBJECTIVES[name]()
    objective(x, y, generator=seeded())  # the first batch initialises
    whole, parts = outcome(objective, x, y), []
    for rank in range(ranks):
        with sharing(rank, ranks):
            parts.append(outcome(objective, x, y))
    assert len({float(part[0]) for part in parts}) == ranks  # of other rows each
    for expected, *found in zip(whole, *parts, strict=True):
        torch.testing.assert_close(torch.stack(found).mean(0), expected.to(found[0].dtype), atol=2e-5, rtol=2e-5)


def test_the_rows_of_all_processes_are_those_of_the_batch():
    x, parts = torch.arange(7), []
    for rank in range(3):
        with sharing(rank, 3):
            parts.append(take_own(x))
    assert [len(part) for part in parts] == [2, 2, 3]
    assert torch.equal(torch.cat(parts), x)


def test_random_numbers_are_those_of_the_own_rows():
    x, found = torch.empty(5, 2), []
    expected = torch.rand(3, 5, 2, generator=seeded())
    for rank in range(2):
        with sharing(rank, 2), own_rows(x) as rows:
            generator = seeded()
            shape = (3, *rows.shape)
            found.append(draw_rows(lambda s, g=generator: torch.rand(s, generator=g), shape, axis=1))
            assert torch.equal(generator.get_state(), _after(15 * 2))
    assert torch.equal(torch.cat(found, dim=1), expected)


def _after(count):
    generator = seeded()
    torch.rand(count, generator=generator)
    return generator.get_state()


def test_one_process_has_the_whole_batch():
    x = torch.rand(5, 2)
    with sharing(0, 1), own_rows(x) as rows:
        assert rows is x
        assert not is_shared()
        assert torch.equal(batch_mean(rows), x.mean())


def test_random_numbers_for_other_rows_are_refused():
    with (
        sharing(0, 2),
        own_rows(torch.empty(6, 2)),
        pytest.raises(RuntimeError, match="must be drawn for the 3 rows of a part; got 2."),
    ):
        draw_rows(torch.rand, (2, 2))


def test_dropout_without_other_processes_is_that_of_torch():
    x = torch.rand(6, 4)
    torch.manual_seed(2)
    expected = F.dropout(x, 0.5)
    torch.manual_seed(2)
    assert torch.equal(Dropout(0.5)(x), expected)
    assert isinstance(Dropout(0.5), nn.Dropout)
    assert Dropout(0.5).eval()(x) is x
