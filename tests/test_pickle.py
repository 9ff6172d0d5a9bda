"""Whatever holds a constrained layer can be pickled: what comes back is the same function, and trains on as it would
have."""

import copy
import io
import multiprocessing
import pickle

import joblib  # type: ignore[import-untyped]
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel

from iresnet import (
    ActNorm,
    Chain,
    Classifier,
    DiagonalNormal,
    Flow,
    GramIteration,
    Hybrid,
    LipschitzConv2d,
    LipschitzLinear,
    ResidualBlock,
    certify,
    constrain_,
    contractive_mlp,
    mlp_flow,
)
from iresnet.lipschitz import cap_of, release_
from iresnet.lipschitz.refresh import prepare_layer

from .zoo import ZOO, normal, rouse_

pytestmark = pytest.mark.no_cover


def pickled(model, protocol=pickle.DEFAULT_PROTOCOL):
    return pickle.loads(pickle.dumps(model, protocol))


def torch_saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def joblib_dumped(model):
    file = io.BytesIO()
    joblib.dump(model, file)
    file.seek(0)
    return joblib.load(file)


WAYS = {"pickle": pickled, "torch.save": torch_saved, "joblib": joblib_dumped, "deepcopy": copy.deepcopy}


def assert_same_state(one, other):
    expected, found = one.state_dict(), other.state_dict()
    assert list(expected) == list(found)
    assert all(torch.equal(expected[key], found[key]) and expected[key].dtype == found[key].dtype for key in expected)


def train(model, x, *inputs, steps=3):
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        model(x, *inputs).square().sum().backward()
        optimiser.step()
    return model


class Marked(LipschitzConv2d):
    """A user's own layer, with an attribute of its own."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.note = "mine"


class Skipping(nn.Module):
    """A user's own network around constrained layers, one of them used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.again = LipschitzLinear(3, 3, coefficient=0.5), None
        self.again = self.first

    def forward(self, x):
        return x + self.again(torch.tanh(self.first(x)))


def remember(layer, inputs):
    layer.calls = getattr(layer, "calls", 0) + 1


def _tied():
    first, second = LipschitzLinear(3, 3, coefficient=0.5), LipschitzLinear(3, 3, coefficient=0.7)
    second.parametrizations.weight.original = first.parametrizations.weight.original
    return nn.Sequential(first, nn.ELU(), second)


def _block():
    return ResidualBlock(contractive_mlp(3, hidden=(6,)))


MODELS = {
    "linear": lambda: LipschitzLinear(3, 3, coefficient=0.5),
    "strict": lambda: LipschitzLinear(3, 3, coefficient=0.5, norm=GramIteration()),
    "sequential": lambda: constrain_(nn.Sequential(nn.Linear(3, 5), nn.ELU(), nn.Linear(5, 3)), lipschitz=0.9),
    "user": Skipping,
    "tied": _tied,
    "block": _block,
    "chain": lambda: Chain(ActNorm(3).initialise_(normal(9, 3, dtype=torch.float32)), _block()),
    "flow": lambda: mlp_flow(3, blocks=2, hidden=(6,)),
    "flow-of-one": lambda: Flow(_block(), DiagonalNormal(3)),
    "classifier": lambda: Classifier(_block(), nn.Linear(3, 2)),
    "average": lambda: AveragedModel(_block()),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
class TestEveryWay:
    def test_the_same_function_comes_back_and_trains_on(self, make, way):
        torch.manual_seed(0)
        model, x = rouse_(make()).train(), normal(4, 3, dtype=torch.float32)
        train(model, x, steps=1)
        twin = way(model)
        assert twin is not model
        assert_same_state(model, twin)
        assert_same_state(train(model, x), train(twin, x))
        assert torch.equal(model.eval()(x), twin.eval()(x))
        assert not {id(p) for p in model.parameters()} & {id(p) for p in twin.parameters()}


@pytest.mark.no_cover
@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_every_transform_comes_back(case):
    transform, x, c = case.build(), case.x(2), case.c(2)
    twin = pickled(transform)
    assert_same_state(transform, twin)
    assert torch.equal(transform(x, c), twin(x, c))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol(protocol):
    model, x = LipschitzLinear(3, 3), normal(2, 3, dtype=torch.float32)
    assert torch.equal(pickled(model, protocol)(x), model(x))


class TestALayer:
    def test_keeps_its_class_its_attributes_and_its_rule(self):
        layer = Marked(2, 3, 3, padding=1, coefficient=0.5, norm=GramIteration(3))
        layer(normal(1, 2, 5, 4, dtype=torch.float32))
        layer.eval().requires_grad_(False)
        twin = pickled(layer)
        assert parametrize.type_before_parametrizations(twin) is Marked
        assert (twin.note, twin.training) == ("mine", False)
        assert not any(p.requires_grad for p in twin.parameters())
        cap = cap_of(twin)
        assert (cap.coefficient, cap.norm, cap.seen) == (0.5, GramIteration(3), (5, 4))
        assert cap.geometry == cap_of(layer).geometry

    def test_a_type_of_few_bits_stays(self):
        layer = LipschitzConv2d(2, 2, 3).bfloat16()
        assert_same_state(layer, pickled(layer))

    def test_hooks_stay_and_run_once(self):
        layer = LipschitzLinear(3, 3)
        layer.register_forward_pre_hook(remember)
        twin = pickled(layer)
        twin(torch.zeros(1, 3))
        assert twin.calls == 1
        assert list(twin._forward_pre_hooks.values()) == [prepare_layer, remember]

    def test_shared_layers_stay_shared(self):
        twin = pickled(Skipping())
        assert twin.first is twin.again
        tied = pickled(_tied())
        assert tied[0].parametrizations.weight.original is tied[2].parametrizations.weight.original

    def test_other_parametrizations_of_it_come_along(self):
        layer = LipschitzLinear(3, 3)
        parametrize.register_parametrization(layer, "bias", nn.Tanh(), unsafe=True)
        x = normal(2, 3, dtype=torch.float32)
        assert torch.equal(pickled(layer)(x), layer(x))
        release_(layer)  # the other one stays, and with it the class of its own
        assert torch.equal(pickled(layer)(x), layer(x))

    @pytest.mark.parametrize("way", [pickled, copy.deepcopy])
    def test_it_can_be_released_alone(self, way):
        layer, x = rouse_(LipschitzLinear(3, 3, coefficient=0.5)).eval(), normal(2, 3, dtype=torch.float32)
        twin, expected = way(layer), layer(x)
        assert type(release_(twin)) is LipschitzLinear
        assert torch.equal(twin(x), expected)
        assert torch.equal(layer(x), expected)
        assert pickle.loads(pickle.dumps(twin)).weight.equal(twin.weight)

    @pytest.mark.parametrize("way", [pickled, copy.deepcopy])
    def test_torchs_cache_tells_a_copy_from_its_original(self, way):
        layer = rouse_(LipschitzLinear(3, 3, coefficient=0.5)).eval()
        twin = way(layer)
        with torch.no_grad():
            twin.weight = -twin.weight
        with torch.no_grad(), parametrize.cached():
            assert torch.equal(twin.weight, -layer.weight)

    def test_a_shallow_copy_shares_its_tensors(self):
        layer, x = LipschitzLinear(3, 3), normal(2, 3, dtype=torch.float32)
        twin = copy.copy(layer)
        assert twin.parametrizations is layer.parametrizations
        assert torch.equal(twin(x), layer(x))


def test_a_certificate_and_an_inverse_are_the_same():
    block, z = rouse_(_block()).eval(), normal(4, 3, dtype=torch.float32)
    twin = pickled(block)
    assert str(certify(twin)) == str(certify(block))
    assert torch.equal(twin.inverse(z), block.inverse(z))


def test_what_is_kept_for_later_calls_is_not_written():
    flow = mlp_flow(3, blocks=2, hidden=(6,)).eval()
    before = len(pickle.dumps(flow))
    flow.sample((4,))
    certify(flow)
    flow.transform.solve(normal(2, 3, dtype=torch.float32))
    assert len(pickle.dumps(flow)) == before
    hybrid = Hybrid(_block(), DiagonalNormal(3), nn.Linear(3, 2)).eval()
    hybrid.decoder.inverter = "prepared"
    assert pickled(hybrid).decoder.inverter is None


def _child(model, x, answers):
    """In a process of its own, where hooks are numbered from zero again."""
    layer = next(m for m in model.modules() if cap_of(m) is not None)
    for _ in range(50):
        layer.register_forward_pre_hook(remember)
    kept = prepare_layer in layer._forward_pre_hooks.values()
    answers.put((model(x).tolist(), kept, len(layer._forward_pre_hooks), pickle.dumps(model)))


def test_a_spawned_process_takes_a_model():
    torch.manual_seed(0)
    model, x = mlp_flow(3, blocks=1, hidden=(6,)).eval(), normal(4, 3, dtype=torch.float32)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_child, args=(model, x, answers))
    process.start()
    values, kept, hooks, again = answers.get(timeout=600)
    process.join()
    assert (kept, hooks) == (True, 51)
    assert values == pytest.approx(model(x).tolist(), rel=1e-5)  # it may have another number of threads
    assert_same_state(model, pickle.loads(again))
