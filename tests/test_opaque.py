"""Calls that are one operation of compiled code: results, gradients, proofs and errors are those of eager code."""

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from iresnet import (
    ActNorm,
    Anderson,
    Banach,
    Chain,
    Classifier,
    ConvergenceError,
    DiagonalNormal,
    Flow,
    NoBoundKnown,
    PowerSeries,
    ResidualBlock,
    RussianRoulette,
    Sine,
    Squeeze,
    constrain_,
    contractive_convnet,
    contractive_mlp,
    mlp_flow,
)
from iresnet.compiler import compile_settings
from iresnet.logdet import AdaptiveRoulette, CertifiedSeries
from iresnet.transforms import ClosedForm
from tests.compiling import fresh, whole, x_of  # noqa: F401
from tests.zoo import ZOO, rouse_

# Tracing doubles the time of a compilation; what is compiled is covered where it is tested as it is.
pytestmark = pytest.mark.no_cover


def block(d=2, seed=0, **options):
    torch.manual_seed(seed)
    return rouse_(ResidualBlock(contractive_mlp(d, (8,), **options))).eval()


def images():
    torch.manual_seed(0)
    chain = rouse_(Chain(ActNorm(1), Squeeze(), ResidualBlock(contractive_convnet(4, 3))))
    for _ in range(2):
        chain(x_of(3, 1, 4, 4))
    return chain.eval()


def wide_flow():
    """Beyond 64 dimensions, where the log-determinant relies on a proven bound."""
    return Flow(Chain(block(65), block(65, seed=1)), DiagonalNormal(65)).eval()


CASES: dict[str, Any] = {
    "block": (block, lambda model, z: model.inverse(z), (3, 2), None),
    "settings": (
        block,
        lambda model, z: model.inverse(z, tolerance=1e-3, solver=Banach(max_iterations=90)),
        (3, 2),
        None,
    ),
    "chain": (images, lambda model, z: model.inverse(z), (3, 4, 2, 2), None),
    "context": (
        lambda: Chain(block(context=3), block(context=3, seed=1)),
        lambda model, z, c: model.inverse(z, c, solver=Anderson(memory=2)),
        (3, 2),
        (3, 3),
    ),
    "likelihood": (wide_flow, lambda model, x: model(x), (3, 65), None),
    "logdet": (lambda: block(65), lambda model, x: model.forward_and_logdet(x)[1], (3, 65), None),
}


def gradients(model, function, inputs):
    """Return the result and the gradients of inputs and parameters, for a loss that weights all numbers differently."""
    model.zero_grad()
    inputs = [t.clone().requires_grad_() for t in inputs]
    out = function(model, *inputs)
    (out * torch.linspace(1, 2, out.numel()).view_as(out)).sum().backward()
    found = [*(t.grad for t in inputs), *(p.grad for p in model.parameters())]
    # A parameter without influence has no gradient in eager code, and zeros in compiled code.
    return [out.detach(), *(torch.zeros(()) if g is None or not g.any() else g for g in found)]


@pytest.mark.parametrize("kind", CASES)
def test_values_and_gradients_are_those_of_eager_code(kind):
    make, function, *shapes = CASES[kind]
    model, inputs = make(), [x_of(*shape, seed=n) for n, shape in enumerate(shapes) if shape]
    eager, compiled = (gradients(model, f, inputs) for f in (function, whole(function)))
    torch.testing.assert_close(compiled, eager, atol=0, rtol=0)
    with torch.no_grad():
        assert torch.equal(whole(function)(model, *inputs), function(model, *inputs))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["context", "likelihood"])
def test_the_default_compiler_agrees(kind):
    make, function, *shapes = CASES[kind]
    model, inputs = make(), [x_of(*shape, seed=n) for n, shape in enumerate(shapes) if shape]
    with compile_settings():
        compiled = gradients(model, whole(function, backend="inductor"), inputs)
    torch.testing.assert_close(compiled, gradients(model, function, inputs), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_results_have_the_layout_that_the_compiler_expects(layout):
    """Trap: the default compiler stops at a gradient whose strides are others than announced."""
    model = Chain(rouse_(ResidualBlock(contractive_convnet(4, 3)))).eval()
    z = x_of(3, 4, 6, 6).to(memory_format=layout)
    tensors, which = [*model.parameters(), *model.buffers()], ("inverse", id(model), None, "{'decoder': None}")
    inputs = (z, None, None, tensors, *which)
    wanted = [True, False, *(t.requires_grad for t in tensors)]
    for operation, arguments in (
        (torch.ops.iresnet.compute, inputs),
        (torch.ops.iresnet.compute_gradient, ([torch.ones(3, 4, 6, 6)], wanted, [model.inverse(z).detach()], *inputs)),
    ):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            announced = operation(*tree_map_only(torch.Tensor, mode.from_tensor, arguments))
        assert [t.stride() for t in operation(*arguments)] == [t.stride() for t in announced]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_second_derivative_is_refused(backend):
    """Trap: the gradient was a constant, without an error."""
    model, z = block(), x_of(3, 2).requires_grad_()
    (gradient,) = torch.autograd.grad(whole(model.inverse, backend)(z).square().sum(), z, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice|double backward"):
        (gradient.square().sum() + z.sum()).backward()


@pytest.mark.parametrize("kind", ["block", "logdet"])
def test_autocast_is_that_of_the_call(kind):
    """Trap: compiled code runs without autocast, and so did the call."""
    make, function, shape, _ = CASES[kind]
    model, inputs, compiled = make(), [x_of(*shape)], whole(function)

    def lowered(function):
        def run(*arguments):
            with torch.autocast("cpu", torch.bfloat16):
                return function(*arguments)

        return run

    found = [gradients(model, f, inputs) for f in (function, compiled, lowered(function), lowered(compiled))]
    torch.testing.assert_close(found[1], found[0], atol=0, rtol=0)
    torch.testing.assert_close(found[3], found[2], atol=0, rtol=0)
    assert not torch.equal(found[1][1], found[3][1])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_autocast_of_a_backward_pass_does_not_lower_what_it_repeats(backend):
    model, found = block(65), list[torch.Tensor]()
    logdet = lambda x: model.forward_and_logdet(x)[1]  # noqa: E731
    for function in (logdet, whole(logdet, backend)):
        x = x_of(3, 65).requires_grad_()
        result = function(x)
        with torch.autocast("cpu", torch.bfloat16):
            result.sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_samples_of_a_flow_are_those_of_eager_code():
    flow = mlp_flow(2, blocks=2, hidden=(8,)).eval()
    samples = []
    for function in (flow.sample, whole(lambda n: flow.sample(n))):
        torch.manual_seed(3)
        samples.append(function((5,)))
    assert torch.equal(*samples)


@pytest.mark.parametrize("estimator", [RussianRoulette(terms=2), CertifiedSeries(0.1), AdaptiveRoulette()], ids=repr)
@pytest.mark.parametrize("graph", [False, True])
def test_a_log_determinant_that_relies_on_a_bound_is_that_of_its_seed(estimator, graph):
    model, x = block(4), x_of(3, 4)
    with torch.set_grad_enabled(graph):
        torch.manual_seed(7)
        compiled = whole(lambda x: model.forward_and_logdet(x, estimator=estimator)[1])(x)
        torch.manual_seed(7)
        generator = torch.Generator().manual_seed(int(torch.randint(2**63 - 1, ())))
        assert torch.equal(compiled, model.forward_and_logdet(x, estimator=estimator, generator=generator)[1])


def test_a_roulette_in_compiled_code_has_new_draws_at_every_call():
    model, x = block(4), x_of(3, 4)
    compiled = whole(lambda x: [model.forward_and_logdet(x, estimator=RussianRoulette())[1] for _ in range(2)])
    first, second = compiled(x)
    assert not torch.equal(first, second)
    assert not torch.equal(first, compiled(x)[0])


def test_differentiable_samples_are_those_of_eager_code():
    flow = mlp_flow(2, blocks=2, hidden=(8,)).eval()

    def run(function):
        flow.zero_grad()
        torch.manual_seed(3)
        x, log_prob = function((5,))
        (x.sum() + log_prob.sum()).backward()
        return [x, log_prob, *(p.grad for p in flow.parameters())]

    eager, compiled = run(flow.rsample_and_log_prob), run(whole(lambda n: flow.rsample_and_log_prob(n)))
    torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=1e-5)


def test_a_classifier_decodes():
    model, z = Classifier(images(), nn.Flatten()).eval(), x_of(3, 4, 2, 2)
    assert torch.equal(whole(lambda z: model.decode(z))(z), model.decode(z))


@pytest.mark.slow
@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_every_transform_inverts_in_compiled_code(case):
    transform, x, c = case.build(), case.x(3), case.c(3)
    with torch.no_grad():
        z = transform(x, c)
        torch.testing.assert_close(whole(lambda z: transform.inverse(z, c))(z), transform.inverse(z, c))


def test_a_solve_that_fails_raises_the_same_error():
    model, z = Chain(block(), block(seed=1)), x_of(3, 2)
    messages = []
    for function in (model.inverse, whole(lambda z, **options: model.inverse(z, **options))):
        with pytest.raises(ConvergenceError, match="transform 1 of 2 is not proven to 1.0e-30") as caught:
            function(z, tolerance=1e-30)
        messages.append(str(caught.value))
    assert messages[1].startswith(messages[0])  # torch 2.7 adds where it happened


def test_a_wrong_shape_raises_the_same_error():
    """Trap: the compiler asks for the shape of the result first, and its own error hid the sentence."""
    model, z = images(), x_of(3, 8)
    for function in (model.inverse, whole(lambda z: model.inverse(z))):
        with pytest.raises(ValueError, match=r"z must have shape \(batch, 4, n, n\) for this block; got \(3, 8\)"):
            function(z)


def test_what_is_unknown_is_not_inverted():
    model, z = Chain(block()), x_of(3, 2)
    model.register_forward_hook(lambda module, inputs, output: output)
    with pytest.raises(NoBoundKnown, match="has forward hooks"):
        whole(lambda z: model.inverse(z))(z)
    model = block()
    model.g.register_forward_hook(lambda module, inputs, output: output)
    with pytest.raises(ConvergenceError, match="has forward hooks"):
        whole(lambda z: model.inverse(z))(z)


def test_compiled_code_follows_the_weights():
    model, z = block(), x_of(3, 2)
    compiled = whole(lambda z: model.inverse(z))
    before = compiled(z)
    with torch.no_grad():
        model.g[-1].bias.add_(1.0)
    assert torch.equal(compiled(z), model.inverse(z))
    assert not torch.equal(compiled(z), before)


def test_one_function_inverts_every_model_that_it_gets():
    first, z = block(), x_of(3, 2)
    second = copy.deepcopy(first)
    with torch.no_grad():
        second.g[-1].bias.add_(1.0)
    compiled = whole(lambda model, z: model.inverse(z))
    for model in (first, second, first):
        assert torch.equal(compiled(model, z), model.inverse(z))


def test_weights_must_not_change_inside():
    model, z = block(), x_of(3, 2)

    def change_and_invert(z):
        with torch.no_grad():
            model.g[-1].bias.add_(1.0)
            return model.inverse(z)

    with pytest.raises(RuntimeError, match="weights and buffers must not change in compiled code"):
        whole(change_and_invert)(z)


@pytest.mark.parametrize("change", ["data", "fused Adam", "setting"])
def test_a_change_between_both_passes_is_refused(change):
    """Trap: the backward pass computes the inverse again, of weights that version counters call unchanged."""
    torch.manual_seed(0)
    model = ResidualBlock(
        constrain_(nn.Sequential(nn.Linear(3, 16), Sine(1.0), nn.Linear(16, 3)), coefficient=0.9)
    ).eval()
    adam, z = torch.optim.Adam(model.parameters(), lr=0.02, fused=True), x_of(4, 3).requires_grad_()
    model.inverse(z).sum().backward()
    x = whole(model.inverse)(z)
    match change:
        case "data":
            model.g[0].parametrizations.weight.original.data.mul_(0.2)
        case "fused Adam":
            adam.step()
        case _:
            model.g[1].frequency = 5.0
    with pytest.raises(RuntimeError, match="changed between a compiled block's inverse and its backward pass"):
        x.sum().backward()


@pytest.mark.parametrize("kind", ["block", "logdet", "sample", "training"])
def test_a_batch_may_have_any_size(kind):
    """Trap: one graph per size, until torch refuses to compile another one."""
    model, small, flow = block(65), block(4).train(), mlp_flow(2, blocks=1, hidden=(8,)).eval()
    function = {
        "block": lambda x: model.inverse(x),
        "logdet": lambda x: model.forward_and_logdet(x)[1],
        "sample": lambda x: flow.sample((x.shape[0],)),
        "training": lambda x: small.forward_and_logdet(x[:, :4], estimator=PowerSeries(2))[1],
    }[kind]
    compiled = whole(function)
    for size in range(1, 6):
        assert len(compiled(x_of(size, 65))) == size
    assert counters["stats"]["unique_graphs"] <= 2


class Doubled(Chain):
    def inverse(self, z, context=None, **options):
        return 2 * super().inverse(z, context, **options)


def test_an_own_inverse_that_calls_the_library_runs_once():
    model, z = Doubled(block()), x_of(3, 2)
    assert torch.equal(whole(lambda z: model.inverse(z))(z), 2 * Chain(*model).inverse(z))


def test_solve_is_not_part_of_a_graph():
    for model in (block(), Chain(block()), ActNorm(2).eval()):
        z = x_of(3, 2)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            whole(lambda z, model=model: model.solve(z).x)(z)
        found = torch.compile(lambda z, model=model: model.solve(z), backend="eager")(z)
        expected = model.solve(z)
        assert torch.equal(found.x, expected.x)
        assert torch.equal(found.error_bound, expected.error_bound)
        assert (found.proven, found.reason) == (expected.proven, expected.reason)
        assert found.proven


# ---------------------------------------------------------------------------------------------- messages


class OwnSolver(Banach):
    pass


def test_an_unknown_solver_is_refused():
    model = block()
    with pytest.raises(Exception, match="must be of the classes Anderson, Banach, Newton; got .*OwnSolver"):
        whole(lambda z: model.inverse(z, solver=OwnSolver()))(x_of(3, 2))


class Crop(ClosedForm):
    """Changes shapes, but does not say how its inverse does."""

    def value(self, x):
        return x[:, :1]

    def logdet(self, x):
        return torch.zeros(len(x))

    def undo(self, z):
        return torch.cat([z, z], 1)

    def stretch(self, input_shape=None):
        raise NotImplementedError


def test_a_shape_that_is_not_declared_is_refused():
    chain = Chain(Crop())
    with pytest.raises(ValueError, match="must have shape and dtype .* must implement `data_shape`"):
        whole(lambda z: chain.inverse(z))(x_of(3, 1))


def test_a_generator_is_refused():
    model, generator = block(65), torch.Generator()
    with pytest.raises(Exception, match=r"generator|Generator"):
        whole(lambda x: model.forward_and_logdet(x, generator=generator)[1])(x_of(3, 65))


def test_an_object_is_known_while_it_lives():
    from iresnet.opaque import tracked

    model = block()
    key = id(model)
    assert tracked(key) is model
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match="belongs to the model and the process that it was compiled for"):
        tracked(key)
