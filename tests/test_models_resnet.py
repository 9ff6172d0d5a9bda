"""What an i-ResNet is compared with: unconstrained blocks and ResNets, of which nothing is claimed."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from iresnet import ActNorm, Banach, Chain, ConvergenceError, ResidualBlock, certify, cli, constrain_, tighten_
from iresnet.data import DataSettings, load
from iresnet.models import Network, build
from iresnet.models.resnet import PlainResNet, PreActResNet
from iresnet.models.unconstrained import UnconstrainedBlock
from tests.zoo import normal


def linear(a, bias=0.0):
    """x + A x + bias."""
    layer = nn.Linear(len(a), len(a))
    with torch.no_grad():
        layer.weight.copy_(torch.as_tensor(a))
        layer.bias.fill_(bias)
    return UnconstrainedBlock(layer)


class TestUnconstrainedBlock:
    def test_a_block_that_happens_to_contract_is_proven(self):
        block, z = linear([[0.3, 0.1], [-0.2, 0.4]], 0.5), normal(6, 2, dtype=torch.float32)
        solution = block.solve(z)
        expected = torch.linalg.solve(torch.eye(2) + block.g.weight, (z - 0.5).T).T
        torch.testing.assert_close(solution.x, expected.detach(), atol=1e-4, rtol=1e-4)
        assert solution.converged.all()
        assert certify(block).passed
        torch.testing.assert_close(block.inverse(z), expected, atol=1e-4, rtol=1e-4)

    def test_the_plain_iteration_diverges_at_the_rate_of_the_norm(self):
        """x <- z - 3 x from x = z: after n steps the error is 3^n times that of the start, 3 z / 4."""
        block, z = linear([[3.0]]), torch.ones(1, 1, dtype=torch.float64)
        solution = block.double().solve(z, solver=Banach(max_iterations=20))
        assert float(solution.x - z / 4) == pytest.approx(0.75 * 3**20, rel=1e-6)
        assert solution.error_bound.tolist() == [math.inf]
        assert solution.converged.tolist() == [False]
        assert solution.iterations.tolist() == [20]

    def test_what_is_solved_without_a_proof_is_not_called_converged(self):
        """A skew map of norm 1 has an inverse, which Anderson finds; nothing is proven of it."""
        block, z = linear([[0.0, 1.0], [-1.0, 0.0]]).double(), normal(5, 2)
        solution = block.solve(z)
        torch.testing.assert_close(solution.x + block.g(solution.x), z, atol=1e-6, rtol=0)
        assert not solution.converged.any()
        assert torch.isinf(solution.error_bound).all()

    def test_the_bound_is_that_of_its_layers(self):
        block = linear([[3.0, 0.0], [0.0, 0.5]])
        certificate = certify(block)
        assert certificate.blocks[0].lipschitz == pytest.approx(3.0, rel=1e-4)
        assert certificate.blocks[0].status == "not proven (bound >= 1)"
        assert not certificate.passed
        assert certificate.stretch.inverse == math.inf

    def test_batchnorm_has_no_bound(self):
        block = UnconstrainedBlock(nn.Sequential(nn.BatchNorm1d(3), nn.ELU(), nn.Linear(3, 3)))
        certificate = certify(block)
        assert not certificate.passed
        assert certificate.blocks[0].status == "no bound known"
        assert certificate.stretch is None
        solution = block.solve(normal(5, 3, dtype=torch.float32))
        assert torch.isinf(solution.error_bound).all()
        assert not solution.converged.any()
        assert block.stretch((3,)).inverse == math.inf

    def test_the_function_solved_for_is_that_of_eval(self):
        """In training BatchNorm would see the iterates: neither they nor a solve may change its statistics."""
        torch.manual_seed(0)
        block = UnconstrainedBlock(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))).train()
        block(5 + normal(50, 3, dtype=torch.float32))
        with torch.no_grad():
            block.g[1].weight.fill_(0.1)
        before, z = block.g[1].running_mean.clone(), normal(4, 3, dtype=torch.float32)
        x = block.solve(z).x
        assert block.training
        assert block.g.training
        assert torch.equal(block.g[1].running_mean, before)
        torch.testing.assert_close(block.eval()(x), z, atol=1e-5, rtol=0)

    def test_tighten_leaves_it_alone(self):
        torch.manual_seed(0)
        constrained = nn.Sequential(nn.Linear(2, 8), nn.ELU(), nn.Linear(8, 2))
        batchnorm = UnconstrainedBlock(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
        model = Chain(linear([[3.0, 0.0], [0.0, 3.0]]), batchnorm, ResidualBlock(constrain_(constrained, 0.9)))
        before = [p.clone() for p in (*model[0].parameters(), *model[1].parameters())]
        with torch.no_grad():
            constrained[0].parametrizations.weight.original.copy_(torch.randn(8, 2))  # its norm is not measured anew
        assert tighten_(model, (2,)) == ["2.g.0"]
        after = (*model[0].parameters(), *model[1].parameters())
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    def test_samples_that_overflowed_do_not_stop_the_others(self):
        block = linear([[0.5]])
        z = torch.tensor([[1.0], [math.inf], [3.0], [math.nan]])
        solution = block.solve(z)
        torch.testing.assert_close(solution.x[[0, 2], 0], torch.tensor([1 / 1.5, 2.0]), atol=1e-5, rtol=0)
        assert solution.converged.tolist() == [True, False, True, False]
        assert solution.iterations[[1, 3]].tolist() == [0, 0]
        assert torch.isinf(solution.error_bound[[1, 3]]).all()
        assert not block.solve(z[[1, 3]]).converged.any()

    def test_a_chain_that_overflows_is_reported_and_not_refused(self):
        chain = Chain(*[t for _ in range(4) for t in (ActNorm(1), linear([[3.0]]))])
        solution = chain.solve(torch.ones(2, 1), solver=Banach(max_iterations=100))
        assert not solution.converged.any()
        assert not torch.isfinite(solution.x).any()

    def test_an_inverse_that_is_not_proven_is_refused(self):
        with pytest.raises(ConvergenceError, match=r"not proven to .* No contraction is proven \(Lip\(g\) <= 3.001\)"):
            linear([[3.0]]).inverse(torch.ones(2, 1))

    def test_shapes_are_checked(self):
        with pytest.raises(ValueError, match=r"x must have shape \(batch, ..., 2\)"):
            linear([[1.0, 0.0], [0.0, 1.0]])(torch.ones(2, 3))


NETWORK = Network(
    blocks=(2, 2), squeeze_first=False, width=0, constrained=False, preactivation=True, preprocessing="standardise",
    padding=3, readout="batchnorm", pool=True,
)  # fmt: skip


class TestOnDigits:
    @pytest.mark.parametrize("normalisation", ["actnorm", "batchnorm"])
    def test_a_network_with_large_weights_is_shown_to_diverge(self, normalisation):
        splits = load(DataSettings("digits"))
        torch.manual_seed(0)
        network = replace(NETWORK, normalisation=normalisation)
        model = build(network, splits.schema, "classification", splits.train.x)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(4.0 if p.dim() == 4 else 1.0)
        x = splits.train.x[:32].float() + 0.5
        model(x)
        model.eval()
        assert certify(model, splits.schema.shape).passed is False
        solution = model.transform.solve(model.encode(x), solver=Banach(max_iterations=100))
        assert not solution.converged.any()
        assert not (solution.measured_error(x) < 1e3).any()


@pytest.mark.parametrize(
    ("preset", "reason"),
    [
        ("vanilla164", "Not certified: it was trained without the Lipschitz constraint (constrained = false)."),
        ("batchnorm164", "Not certified: it was trained without the Lipschitz constraint (constrained = false)."),
        ("resnet164", "Not certified: an ordinary ResNet has no inverse to prove."),
    ],
)
def test_training_one_succeeds_and_says_that_nothing_is_proven(preset, reason, tmp_path, capsys):
    changes = [
        "blocks=[1,1]", "width=4", "padding=1", "steps=2", "validation=0.15", "shift=1", "flip=false", "warmup=0",
        "batch=64",
    ]  # fmt: skip
    words = [w for change in changes if (preset, change) != ("resnet164", "padding=1") for w in ("--set", change)]
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", preset, "--data", "digits", "--device", "cpu", "--out", str(tmp_path / "run"), *words])
    assert stop.value.code == 0
    assert reason in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "run" / "certificate.json").exists() == (preset != "resnet164")


class TestResNets:
    @pytest.mark.parametrize("make", [PreActResNet, PlainResNet])
    @pytest.mark.parametrize(("blocks", "width"), [((1,), 2), ((2, 1, 1), 4)])
    def test_forward_and_backward(self, make, blocks, width):
        torch.manual_seed(0)
        model = make(3, 5, blocks, width)
        logits = model(normal(4, 3, 8, 8, dtype=torch.float32))
        assert logits.shape == (4, 5)
        nn.functional.cross_entropy(logits, torch.arange(4)).backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())

    def test_neither_is_a_kind_of_the_other_and_their_names_in_a_state_stay(self):
        """Weights that were saved are found again; what is plain is not taken for a pre-activation net."""
        assert not issubclass(PlainResNet, PreActResNet)
        assert not issubclass(PreActResNet, PlainResNet)
        names = {
            make: [n for n, p in make(1, 2, (1,), 2).named_parameters() if p.dim() > 1]
            for make in (PreActResNet, PlainResNet)
        }
        inner = [f"blocks.0.branch.{i}.weight" for i in (0, 3, 6)]
        assert names[PreActResNet] == ["first.weight", *inner, "blocks.0.skip.weight", "last.4.weight"]
        assert names[PlainResNet] == ["first.0.weight", *inner, "blocks.0.skip.0.weight", "last.2.weight"]

    @pytest.mark.parametrize("make", [PreActResNet, PlainResNet])
    def test_it_is_164_layers_deep(self, make):
        """54 bottlenecks of three convolutions, the first convolution and the last linear layer."""
        model = make(3, 10)
        main = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and "skip" not in n]
        assert len(main) == 164
        shapes = [tuple(model.blocks[i].branch[6].weight.shape[:2]) for i in (0, 18, 36)]
        assert shapes == [(64, 16), (128, 32), (256, 64)]

    def test_a_block_is_the_identity_and_a_branch(self):
        torch.manual_seed(0)
        block = PreActResNet(2, 2, (2,), 3).eval().blocks[1]
        x = normal(2, 12, 4, 4, dtype=torch.float32)
        torch.testing.assert_close(block(x), x + block.branch(torch.relu(x / math.sqrt(1 + 1e-5))))
        nn.init.zeros_(block.branch[6].weight)
        assert torch.equal(block(x), x)

    def test_a_plain_block_ends_with_its_activation(self):
        torch.manual_seed(0)
        first, block = PlainResNet(2, 2, (2,), 3).eval().blocks
        x = normal(2, 12, 4, 4, dtype=torch.float32)
        torch.testing.assert_close(block(x), torch.relu(x + block.branch(x)))
        nn.init.zeros_(block.branch[7].weight)
        assert torch.equal(block(x), x.relu())
        nn.init.zeros_(first.branch[7].weight)
        x = normal(2, 3, 4, 4, dtype=torch.float32)
        scaled = nn.functional.conv2d(x, first.skip[0].weight) / math.sqrt(1 + 1e-5)
        torch.testing.assert_close(first(x), scaled.relu())

    @pytest.mark.parametrize("make", [PreActResNet, PlainResNet])
    def test_every_stage_after_the_first_halves_the_image(self, make):
        model = make(1, 2, (1, 1, 1), 2)
        assert model.blocks(model.first(torch.zeros(2, 1, 28, 28))).shape == (2, 32, 7, 7)

    @pytest.mark.parametrize(
        "wrong", [{"blocks": ()}, {"blocks": (1, 0)}, {"width": 0}, {"channels": 0}, {"classes": 0}]
    )
    def test_wrong_arguments_are_refused(self, wrong):
        with pytest.raises(
            ValueError, match="channels, classes, width and every entry of blocks must be at least 1; got"
        ):
            PreActResNet(**{"channels": 1, "classes": 2, **wrong})
