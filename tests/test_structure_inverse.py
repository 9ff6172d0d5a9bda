"""Every public inverse goes through one function that chooses the method; a report compares every g only once."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from iresnet import (
    ActNorm,
    Banach,
    Chain,
    Classifier,
    DiagonalNormal,
    Flow,
    Hybrid,
    Multiscale,
    ResidualBlock,
    Squeeze,
    contractive_convnet,
    contractive_mlp,
    evaluate,
    mlp_flow,
)
from iresnet.data import Dataset, Schema
from iresnet.evaluate import solving
from iresnet.fingerprint import Fingerprint
from iresnet.fixed_point import ConvergenceError
from iresnet.inverse import decoder, ordinary
from iresnet.inverse.decoder import ON_CPU
from iresnet.transform import Stretch
from iresnet.transforms import ClosedForm
from tests.runs import copy_of, trained
from tests.zoo import normal, rouse_


@pytest.fixture
def chosen(monkeypatch):
    """What `choose` was asked for and said: (transform, report, why not by an Inverter)."""
    asked, choose = [], decoder.choose

    def spy(transform, z, context, solver, **options):
        found = choose(transform, z, context, solver, **options)
        asked.append((transform, options["report"], found))
        return found

    monkeypatch.setattr(decoder, "choose", spy)
    return asked


def block():
    return ResidualBlock(contractive_mlp(4, (8,), lipschitz=0.8))


def chain():
    return rouse_(Chain(ActNorm(4), block())).double().eval()


def multiscale():
    first = Chain(Squeeze(), ResidualBlock(contractive_convnet(4, 6, lipschitz=0.8)))
    second = Chain(ResidualBlock(contractive_convnet(2, 6, lipschitz=0.8)), ActNorm(2))
    return rouse_(Multiscale([first, second], (1, 4, 4))).double().eval()


def rows():
    return Dataset(normal(5, 4).float(), None, Schema((4,)))


def _flow():
    return Flow(chain(), DiagonalNormal(4)).double().eval()


def _classifier():
    return Classifier(chain(), nn.Linear(4, 2)).double().eval()


def _hybrid():
    return Hybrid(chain(), DiagonalNormal(4), nn.Linear(4, 2)).double().eval()


def _conditional():
    return mlp_flow(4, blocks=1, hidden=(8,), context=2).double().eval()


def _encoded(model):
    return evaluate.reconstruct(model.float(), rows())


CODES = normal(3, 4)
SOLVER, CONTEXT, GRADIENT = (
    f"not accelerated: {words}." for words in ("a solver was given", "a context was given", "gradients are enabled")
)


@pytest.mark.parametrize(
    ("make", "call", "report", "reason"),
    [
        (_flow, lambda m: m.sample((3,)), False, ON_CPU),
        (_flow, lambda m: m.sample((3,), solver=Banach()), False, SOLVER),
        (_flow, torch.enable_grad()(lambda m: m.rsample_and_log_prob((3,))), False, GRADIENT),
        (lambda: Flow(block(), DiagonalNormal(4)).double().eval(), lambda m: m.sample((3,)), False, ON_CPU),
        (_conditional, lambda m: m.given(normal(2, 2)).sample((3,)), False, CONTEXT),
        (_conditional, lambda m: m.given(normal(2, 2)).rsample((3,)), False, CONTEXT),
        (_classifier, lambda m: m.decode(CODES), False, ON_CPU),
        (_hybrid, lambda m: m.decode(CODES), False, ON_CPU),
        (_hybrid, lambda m: m.sample((3,)), False, ON_CPU),
        (_hybrid, lambda m: m.flow.sample((3,)), False, ON_CPU),
        (_hybrid, lambda m: m.classifier.decode(CODES), False, ON_CPU),
        (chain, lambda t: t.inverse(CODES), False, ON_CPU),
        (chain, lambda t: t.inverse(CODES, solver=Banach()), False, SOLVER),
        (chain, lambda t: t.solve(CODES), True, ON_CPU),
        (multiscale, lambda t: t.inverse(normal(2, 16)), False, ON_CPU),
        (multiscale, lambda t: t.solve(normal(2, 16)), True, ON_CPU),
        (lambda: Chain(ActNorm(4)).double().eval(), lambda t: t.inverse(CODES), False, ON_CPU),
        (_flow, _encoded, True, ON_CPU),
        (_flow, lambda m: evaluate.inverse(m.float(), rows()), True, ON_CPU),
        (_flow, lambda m: solving.solve_codes(m, CODES), True, ON_CPU),
        (_flow, lambda m: solving.decode(m.transform, CODES), False, ON_CPU),
        (_flow, lambda m: evaluate.interpolate(m.float(), rows(), pairs=1, steps=3), False, ON_CPU),
        (_classifier, lambda m: evaluate.inverse(m.float(), rows()), True, ON_CPU),
    ],
)
@torch.no_grad()
def test_every_inverse_is_chosen_by_one_function(chosen, make, call, report, reason):
    model = make()
    call(model)
    assert {(asked, how) for _, asked, how in chosen} == {(report, reason)}
    assert len(chosen) == 1


@pytest.mark.parametrize(("command", "report"), [("sample", False), ("interpolate", False), ("invert", True)])
def test_commands_use_the_same_choice(chosen, call, tmp_path, command, report):
    folder = copy_of(trained(), tmp_path / "run")
    code, text = call(command, folder, *(("--pairs", 1) if command == "interpolate" else ("-n", 2)))
    assert code == 0, text
    assert {asked for _, asked, _ in chosen} == {report}


def test_with_gradients_it_is_the_ordinary_inverse(chosen):
    model, z = _classifier(), CODES.clone().requires_grad_()
    model.decode(z).sum().backward()
    assert z.grad is not None
    assert chosen[-1][2] == GRADIENT
    model.train()
    with torch.no_grad():
        model.decode(CODES)
    assert chosen[-1][2] == "not accelerated: the model is in training mode."


def test_on_a_gpu_a_report_or_a_decoder_takes_an_inverter(chosen, monkeypatch):
    monkeypatch.setattr(decoder, "_on_gpu", lambda z: True)
    model, hybrid = _classifier(), _hybrid()
    with torch.no_grad():
        x, plain = model.decode(CODES), ordinary.invert(model.transform, CODES)
        hybrid.decode(CODES)
        prepared = hybrid.decoder.inverter
        hybrid.sample((2,))
        assert hybrid.decoder.inverter is prepared is not None
        solving.solve_codes(model, CODES)
        assert {how for _, _, how in chosen} == {""}
        torch.testing.assert_close(x, plain, atol=1e-8, rtol=0)
        model.transform.inverse(CODES)  # which has no place to keep one
        assert chosen[-1][2] == "not accelerated: there is no Decoder to keep the prepared inverse."
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.decoder.inverter is None


def test_an_error_in_nested_parts_names_each_level(chosen):
    with torch.no_grad(), pytest.raises(ConvergenceError, match="of stage 1 of 2, transform 0 of 2 is not proven"):
        multiscale().inverse(normal(2, 16), tolerance=1e-18)
    assert len(chosen) == 1


@pytest.mark.parametrize(
    ("make", "z", "blocks"),
    [
        (lambda: Chain(block(), block(), block(), ActNorm(4)), normal(3, 4), 3),
        (multiscale, normal(2, 16), 2),
        (lambda: Chain(Chain(multiscale()), ActNorm(16)), normal(2, 16), 2),
    ],
    ids=["chain", "multiscale", "nested"],
)
def test_a_report_compares_every_block_once(monkeypatch, make, z, blocks):
    transform = make().double().eval()
    first = transform.solve(z)  # makes what is kept
    held, matches = [], Fingerprint.matches
    monkeypatch.setattr(Fingerprint, "matches", lambda self, module: held.append(module) or matches(self, module))
    second = transform.solve(z)
    assert [len(held), len({id(g) for g in held})] == [blocks, blocks]
    assert torch.equal(first.x, second.x)
    assert second.proven


def test_nested_chains_report_what_a_flat_one_does():
    parts = [ActNorm(4), block(), block(), block()]
    flat = rouse_(Chain(*parts)).double().eval()
    nested, z = Chain(parts[0], Chain(parts[1], Chain(parts[2])), parts[3]).eval(), normal(3, 4)
    ours, theirs = nested.solve(z), flat.solve(z)
    for name in ("x", "largest_block_bound", "code_residual", "composed_bound", "iterations"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-12, atol=0)


class Named(ClosedForm):
    """A transform of a user's own, with attributes that this library has methods of the same name for."""

    def __init__(self):
        super().__init__()
        self.steps, self.verify, self.inverse_error_bound = 3, 2.0, 1.0

    def value(self, x):
        return 2 * x

    def logdet(self, x):
        return x.new_full((len(x),), x[0].numel() * math.log(2))

    def undo(self, z):
        return z / 2

    def stretch(self, input_shape=None):
        return Stretch(2.0, 0.5, None)


@torch.no_grad()
def test_a_users_attributes_may_have_any_name():
    whole = Chain(Named(), ActNorm(4)).double().eval()
    torch.testing.assert_close(whole.inverse(whole(CODES)), CODES)
    solution = whole.solve(whole(CODES))
    assert not solution.proven
    torch.testing.assert_close(solution.x, CODES)
