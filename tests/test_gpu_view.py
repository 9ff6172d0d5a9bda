"""A view of a model computes with its chains wrapped, shares its tensors, and does not change it."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from iresnet import ActNorm, Chain, Classifier, ResidualBlock, contractive_mlp, mlp_flow
from iresnet.gpu import Acceleration, Plan, planned
from iresnet.gpu.view import module_view
from iresnet.lipschitz import cap_of
from iresnet.logdet import PowerSeries
from iresnet.train import Classification, State, Training
from iresnet.trust import why_modified
from tests.zoo import normal


def classifier():
    torch.manual_seed(0)
    inner = Chain(ActNorm(4), ResidualBlock(contractive_mlp(4, (8,))))
    chain = Chain(inner, ActNorm(4), ResidualBlock(contractive_mlp(4, (8,))))
    model = Classifier(chain, nn.Linear(4, 2))
    x = normal(6, 4, dtype=torch.float32)
    model(x)  # initialises ActNorms
    return model, x


def plain(model, dtype=torch.float32):
    return planned(model, dtype, compiled=False)


def test_it_shares_every_parameter_and_buffer_and_the_model_is_unchanged():
    model, x = classifier()
    before = list(model.modules())
    with plain(model) as view:
        assert isinstance(view, Classifier)
        assert view.head is model.head
        assert {id(p) for p in view.parameters()} == {id(p) for p in model.parameters()}
        assert {id(b) for b in view.buffers()} == {id(b) for b in model.buffers()}
        plans = [m for m in view.modules() if isinstance(m, Plan)]
        assert [len(plan.units) for plan in plans] == [1, 1]  # the outer chain, the inner one
        nn.functional.cross_entropy(view(x), torch.tensor([0, 1] * 3)).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert list(model.modules()) == before
    assert not any(isinstance(m, Plan) for m in model.modules())
    assert all(why_modified(m) is None for m in model.modules())


def test_a_plan_delegates_everything_else_to_the_chain():
    model, x = classifier()
    chain = model.eval().transform
    with plain(model) as view:
        plan = view.transform
        assert isinstance(plan, Plan)
        assert not plan.training
        assert len(plan) == len(chain)
        assert plan[1] is chain[1]
        assert [type(t) for t in plan] == [Plan, ActNorm, ResidualBlock]
        assert plan.stretch((4,)) == chain.stretch((4,))
        assert plan.output_shape((4,)) == (4,)
        assert [name for name, _, _ in plan.parts((4,))] == ["0", "1", "2"]
        assert not plan.takes_context
        torch.testing.assert_close(plan.inverse(plan(x)), x, atol=1e-4, rtol=1e-4)
        assert bool(plan.solve(plan(x)).converged.all())
        torch.testing.assert_close(plan.reference(x), chain.reference(x))


def test_a_module_that_is_used_twice_is_one_module_in_the_view():
    chain = Chain(ActNorm(2))
    model = nn.Sequential(chain, nn.Sequential(chain), nn.Linear(2, 2))
    seen = module_view(model, lambda m: nn.Sequential(m) if m is chain else m)
    assert seen[0] is seen[1][0]
    assert seen[0][0] is chain
    assert seen[2] is model[2]
    assert module_view(model, lambda m: m) is model


def test_a_chain_with_a_hook_is_not_wrapped():
    model, x = classifier()
    calls = []
    model.transform[0].register_forward_hook(lambda *_: calls.append("inner"))
    model.transform.register_forward_hook(lambda *_: calls.append("outer"))
    expected = model(x)
    with plain(model) as view:
        torch.testing.assert_close(view(x), expected)
        assert not any(isinstance(m, Plan) for m in view.modules())
    assert calls == ["inner", "outer"] * 2


def test_the_compiled_version_of_a_model_is_replaced_by_the_original():
    model, x = classifier()
    expected = model(x)
    for wrapped in (torch.compile(model, backend="eager"), model):
        with plain(wrapped) as view:
            assert isinstance(view, Classifier)
            torch.testing.assert_close(view(x), expected, atol=1e-6, rtol=1e-5)
        model.compile(backend="eager")


def test_distributed_training_goes_through_the_view(tmp_path):
    model, x = classifier()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        both, gradients = DistributedDataParallel(model), []
        for context in (plain(both), plain(model)):
            with context as view:
                view(x).sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
            model.zero_grad(set_to_none=True)
        torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)
    finally:
        dist.destroy_process_group()


def test_the_precision_of_weights_is_restored_after_an_exception():
    model, x = classifier()
    caps = [cap for m in model.modules() if (cap := cap_of(m)) is not None]

    def fail():
        with plain(model, torch.bfloat16) as view:
            assert view(x).dtype is torch.float32
            assert all(cap._scale_in for cap in caps)
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        fail()
    assert not any(cap._scale_in for cap in caps)
    assert model(x).dtype is torch.float32


def test_the_mode_of_the_model_is_that_of_the_view():
    flow = mlp_flow(4, blocks=1, hidden=(8,), estimator=PowerSeries(2))
    for mode in (True, False):
        with plain(flow.train(mode)) as view:
            assert all(m.training is mode for m in view.modules())


def test_a_finished_training_frees_its_memory_at_once():
    """Its graphs would keep theirs until garbage is collected, if it and its fast step held each other."""
    model, x = classifier()
    gc.disable()
    try:
        state = State(Classification(model).train(), Training(), None, Acceleration(precision="bfloat16"))
        for _ in range(3):
            state.advance(x, torch.tensor([0, 1] * 3))
        held = weakref.ref(state), weakref.ref(state.fast)
        del state
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


def test_a_block_with_a_hook_is_not_fused():
    model, x = classifier()
    block, seen = model.transform[2], []
    block.register_forward_hook(lambda *_: seen.append(1))
    with plain(model) as view:
        view(x)
    assert seen == [1]
