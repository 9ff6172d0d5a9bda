"""certify and tighten_: what is proven of a model, in any nesting, and what is not."""

import json
import math

import pytest
import torch
from torch import nn

from iresnet import (
    ActNorm,
    Chain,
    Classifier,
    DiagonalNormal,
    Flow,
    InjectivePad,
    LipschitzLinear,
    Multiscale,
    ResidualBlock,
    Squeeze,
    certify,
    contractive_convnet,
    contractive_mlp,
    mlp_flow,
    tighten_,
)
from tests.zoo import ZOO, UserNet, constrained_layers, linear_block, normal, rouse_


def block(d=3, **options):
    return ResidualBlock(contractive_mlp(d, (8,), **options))


def conv_block(channels=2, **options):
    return ResidualBlock(contractive_convnet(channels, 4, kernels=(3, 1), **options))


def disturb_(module, seed=0, scale=1.0):
    """Edit weights behind the back of the constraint: its sigma is stale, and the norms exceed."""
    with torch.no_grad():
        for i, layer in enumerate(constrained_layers(module)):
            w = layer.parametrizations.weight.original
            w.add_(scale * normal(*w.shape, seed=seed + i).to(w))
    return module


NESTINGS = {
    "block": (block, (3,), ["block"]),
    "chain": (lambda: Chain(ActNorm(3), block(), Chain(block(), ActNorm(3))), (3,), ["1", "2.0"]),
    "flow": (lambda: mlp_flow(3, blocks=2, hidden=(8,)), (3,), ["transform.1", "transform.3"]),
    "classifier": (
        lambda: Classifier(Chain(InjectivePad(2), conv_block(4), Squeeze(), conv_block(16)), nn.Flatten()),
        (2, 4, 4),
        ["transform.1", "transform.3"],
    ),
    "multiscale": (
        lambda: Multiscale([Chain(Squeeze(), conv_block(4)), conv_block(2)], input_shape=(1, 4, 4)),
        (1, 4, 4),
        ["0.1", "1"],
    ),
    "sequential": (lambda: nn.Sequential(nn.Linear(3, 3), block(), nn.ModuleList([block()])), None, ["1", "2.0"]),
    "flow of scales": (
        lambda: Flow(
            Chain(ActNorm(1), Multiscale([Chain(Squeeze(), conv_block(4)), conv_block(2)], input_shape=(1, 4, 4))),
            DiagonalNormal(16),
        ),
        (1, 4, 4),
        ["transform.1.0.1", "transform.1.1"],
    ),
}

nestings = pytest.mark.parametrize("nesting", NESTINGS)


class TestNesting:
    @nestings
    def test_every_block_is_found_named_and_proven(self, nesting):
        make, shape, names = NESTINGS[nesting]
        certificate = certify(rouse_(make()).eval(), shape)
        assert list(certificate.lipschitz) == names
        assert certificate.passed
        assert all(b.status == "proven" for b in certificate.blocks)
        assert 0.5 < max(certificate.lipschitz.values()) < 1
        assert (certificate.stretch is None) == (nesting == "sequential")
        assert certificate.summary().startswith("Invertible: proven") == (nesting != "sequential")

    @nestings
    def test_a_model_with_edited_weights_fails_until_it_is_tightened(self, nesting):
        make, shape, names = NESTINGS[nesting]
        model = disturb_(rouse_(make()).eval())
        broken = certify(model, shape)
        assert not broken.passed
        assert {b.status for b in broken.blocks} >= {"not proven (bound >= 1)"}
        assert "not proven (bound >= 1)" in str(broken)
        assert broken.summary().startswith(
            f"Invertible: not proven. {sum(b.passed for b in broken.blocks)} of {len(names)} blocks"
        )
        changed = tighten_(model, shape)
        assert all(name.rpartition(".g.")[0] in names for name in changed)
        assert certify(model, shape).passed
        assert tighten_(model, shape) == []

    def test_sizes_are_followed_through_squeezes(self):
        make, shape, _ = NESTINGS["classifier"]
        shapes = [b.input_shape for b in certify(make(), shape).blocks]
        assert shapes == [(4, 4, 4), (16, 2, 2)]

    @pytest.mark.parametrize(
        "case", [c for c in ZOO if c.name.startswith(("mlp", "conv", "multi"))], ids=lambda c: c.name
    )
    def test_the_whole_zoo_passes(self, case):
        model = case.build()
        tighten_(model, case.shape)
        certificate = certify(model, case.shape)
        assert certificate.passed
        assert certificate.stretch.proven

    def test_a_model_without_blocks_has_nothing_to_certify(self):
        for model in (nn.Linear(2, 2), Chain(ActNorm(2))):
            with pytest.raises(ValueError, match=f"{type(model).__name__} contains no ResidualBlock"):
                certify(model)


class TestContent:
    def test_layers_show_coefficient_estimate_and_bound(self):
        model = rouse_(block(coefficient=0.7)).eval()
        layers = certify(model).layers
        assert [(part.name, part.kind, part.coefficient) for part in layers] == [
            ("0", "Linear", 0.7),
            ("2", "Linear", 0.7),
        ]
        for part in layers:
            assert part.estimate <= part.bound <= part.estimate * 1.01
            assert part.bound == pytest.approx(0.7, rel=1e-3)

    def test_the_constant_of_a_block_is_the_product_of_its_layers(self):
        certificate = certify(rouse_(block(coefficient=0.7)))
        assert certificate.lipschitz["block"] == pytest.approx(math.prod(part.bound for part in certificate.layers))

    def test_the_table_has_a_line_per_block_and_layer(self):
        text = str(certify(rouse_(Chain(block(coefficient=0.7), ActNorm(3))).eval(), (3,)))
        lines = text.splitlines()
        assert lines[0].split() == ["block", "layer", "kind", "coefficient", "estimate", "bound", "status"]
        assert lines[1].split() == ["0", lines[1].split()[1], "proven"]
        assert lines[2].split()[:3] == ["0", "Linear", "0.7000"]
        assert lines[-1].startswith("Invertible: proven. 1 of 1 blocks proven contractive, largest Lip(g) <= 0.4")
        assert "Lip(F) <= " in lines[-1]
        assert "ln det in [" in lines[-1]

    @pytest.mark.parametrize("kind", [nn.Module, Flow])
    def test_a_users_own_module_may_do_more_than_its_transform(self, kind):
        class Constant(kind):
            def forward(self, x):
                return 0 * self.transform(x)

        model = Constant(*() if kind is nn.Module else (block(), DiagonalNormal(3)))
        model.transform = block()
        certificate = certify(model)
        assert certificate.passed
        assert certificate.stretch is None
        assert certificate.summary().startswith("Blocks invertible: proven. 1 of 1 blocks proven contractive")
        assert "Lip(F" not in certificate.summary()

    def test_bounds_for_the_whole_are_those_of_the_transform(self):
        chain = Chain(block(), ActNorm(3), block())
        certificate = certify(chain, (3,))
        assert certificate.stretch == chain.stretch((3,))
        assert certificate.input_shape == (3,)

    def test_a_flow_knows_its_shape(self):
        assert certify(mlp_flow(3, blocks=1, hidden=(8,))).input_shape == (3,)

    def test_without_a_shape_the_bound_is_for_the_largest_size_seen_or_for_all(self):
        model = conv_block().eval()
        everywhere = certify(model)
        assert everywhere.layers[0].input_shape is None
        model(torch.zeros(1, 2, 3, 3))
        met = certify(model)
        assert met.layers[0].input_shape == (2, 3, 3)
        assert met.lipschitz["block"] < everywhere.lipschitz["block"]
        assert certify(model, (2, 3, 3)).lipschitz["block"] == pytest.approx(met.lipschitz["block"])
        assert certify(model, (2, 40, 40)).lipschitz["block"] > met.lipschitz["block"]
        assert "ln det" not in met.summary()

    def test_json_round_trip(self, tmp_path):
        certificate = certify(rouse_(mlp_flow(3, blocks=2, hidden=(8,))))
        path = tmp_path / "certificate.json"
        text = certificate.to_json(path)
        content = json.loads(path.read_text())
        assert content == json.loads(text)
        assert content["passed"] is True
        assert [b["name"] for b in content["blocks"]] == list(certificate.lipschitz)
        assert content["blocks"][0]["lipschitz"] == certificate.blocks[0].lipschitz
        assert content["blocks"][0]["layers"][0]["bound"] == certificate.layers[0].bound
        assert content["stretch"]["logdet"] == list(certificate.stretch.logdet)
        assert [p.name for p in tmp_path.iterdir()] == ["certificate.json"]

    def test_json_has_no_infinities(self):
        """Standard JSON knows neither NaN nor infinity."""
        model = disturb_(block().eval(), scale=10.0)
        text = certify(model).to_json()

        def refuse(name):
            raise AssertionError(name)

        content = json.loads(text, parse_constant=refuse)
        assert content["stretch"]["inverse"] is None
        assert content["passed"] is False


class TestNotProven:
    def test_an_asserted_constant_is_shown_and_never_passes(self):
        certificate = certify(Chain(block(), ResidualBlock(UserNet(3), lipschitz=0.7)), (3,))
        assert [b.status for b in certificate.blocks] == ["proven", "asserted"]
        assert not certificate.passed
        assert not certificate.stretch.proven
        assert certificate.lipschitz["1"] == 0.7
        assert "1 of 2 blocks proven contractive" in certificate.summary()

    @pytest.mark.parametrize("how", ["hook", "batchnorm"])
    def test_a_block_that_can_no_longer_be_read_has_no_bound(self, how):
        model = block().eval()
        if how == "hook":
            model.g[0].register_forward_hook(lambda *_: None)
        else:
            model.g.append(nn.BatchNorm1d(3))
        certificate = certify(model)
        assert certificate.blocks[0].status == "no bound known"
        assert not certificate.passed
        assert certificate.stretch is None
        assert math.isinf(certificate.lipschitz["block"])
        assert "remove them" in str(certificate) or "Remove it from g" in str(certificate)
        assert json.loads(certificate.to_json())["blocks"][0]["lipschitz"] is None

    def test_a_power_iteration_that_missed_is_caught(self):
        """Trap: at coefficient .98 a miss of a few percent makes a block of three layers expand, and nobody notices."""
        model = rouse_(ResidualBlock(contractive_mlp(3, (32, 32), coefficient=0.98))).eval()
        assert certify(model).lipschitz["block"] == pytest.approx(0.98**3, rel=1e-3)
        disturb_(model, scale=0.3)
        asked = math.prod(part.coefficient for part in certify(model).layers)
        assert asked < 1
        assert 1 < certify(model).lipschitz["block"] < 2
        assert not certify(model).passed
        tighten_(model)
        assert certify(model).passed

    def test_an_expanding_block_cannot_be_inverted_with_a_proof(self):
        from iresnet import ConvergenceError

        model = disturb_(block().eval(), scale=3.0)
        with pytest.raises(
            ConvergenceError, match=r"No contraction is proven \(Lip\(g\) <= .*tighten_\(model\) repairs it"
        ):
            model.inverse(normal(2, 3, dtype=torch.float32))
        assert not model.solve(normal(2, 3, dtype=torch.float32)).converged.any()


class TestTighten:
    def test_only_layers_above_their_coefficient_are_changed(self):
        model = rouse_(mlp_flow(3, blocks=3, hidden=(8,), coefficient=0.7)).eval()
        tighten_(model)
        weights = {name: p.clone() for name, p in model.named_parameters()}
        disturb_(model.transform[3], scale=2.0)
        changed = tighten_(model)
        assert changed
        assert all(name.startswith("transform.3.g.") for name in changed)
        edited = {f"transform.transforms.3.g.{i}.parametrizations.weight.original" for i in (0, 2)}
        for name, p in model.named_parameters():
            assert torch.equal(p, weights[name]) == (name not in edited), name
        assert certify(model).passed

    def test_asserted_blocks_are_not_changed(self):
        model = ResidualBlock(UserNet(), lipschitz=0.7)
        assert tighten_(model) == []

    def test_the_function_changes_by_the_excess_only(self):
        """Tightening a converged model is a matter of digits."""
        model, x = rouse_(mlp_flow(3, blocks=2, hidden=(8,))).eval(), normal(5, 3, dtype=torch.float32)
        before = model.transform(x)
        tighten_(model)
        torch.testing.assert_close(model.transform(x), before, atol=1e-3, rtol=1e-3)

    def test_a_tightened_model_passes_after_a_round_trip(self):
        model = disturb_(rouse_(Chain(block(), block())).eval())
        tighten_(model, (3,))
        other = Chain(block(), block()).eval()
        other.load_state_dict(model.state_dict())
        assert certify(other, (3,)).lipschitz == certify(model, (3,)).lipschitz
        assert certify(other, (3,)).passed

    def test_unconstrained_layers_are_certified_and_not_changed(self):
        chain = Chain(linear_block(0.5 * torch.eye(2)), ResidualBlock(LipschitzLinear(2, 2, coefficient=0.5))).eval()
        assert certify(chain, (2,)).layers[0].coefficient is None
        assert certify(chain, (2,)).passed
        disturb_(chain)
        assert tighten_(chain, (2,)) == ["1.g"]
        assert torch.equal(chain[0].g[0].weight, 0.5 * torch.eye(2))
