"""A fast step computes the same as an eager step, up to rounding."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from iresnet import (
    ActNorm,
    Chain,
    Classifier,
    DiagonalNormal,
    Exact,
    Flow,
    Multiscale,
    PowerSeries,
    ResidualBlock,
    RussianRoulette,
    Squeeze,
    compiler,
    contractive_convnet,
    contractive_mlp,
    cuda_graph,
    mlp_flow,
)
from iresnet.branch import try_parse
from iresnet.gpu import Acceleration, FastStep, dual, maps, planned, step
from iresnet.gpu.unit import unit_function
from iresnet.lipschitz import LipSwish, MaxMin, Sine, batched_refresh
from iresnet.lipschitz import refresh as refresh_module
from iresnet.logdet import StoppedRoulette
from iresnet.models.unconstrained import UnconstrainedBlock
from iresnet.precision import float32_accumulation, float32_matmul_precision
from iresnet.train import State, Training, set_learning_rate
from iresnet.train.checkpoint import load, save
from iresnet.train.objective import Classification, MaximumLikelihood
from tests.zoo import normal


class Own(nn.Sequential):
    """A branch with a forward of its own."""

    def forward(self, x):
        return super().forward(x) / 4


def branch(channels):
    return contractive_convnet(channels, 6, coefficient=0.8, preactivation=True)


def convolutional(kind="blocks"):
    torch.manual_seed(0)
    parts = [ActNorm(2), ResidualBlock(branch(2)), ActNorm(2), ResidualBlock(branch(2)), Squeeze()]
    if kind == "mixed":  # a block without ActNorm, an ActNorm without a block, a branch that cannot be read
        parts += [
            ResidualBlock(branch(8)),
            ActNorm(8),
            Squeeze(),
            ResidualBlock(Own(nn.Conv2d(32, 32, 1)), lipschitz=0.9),
        ]
    elif kind == "free":
        parts += [ActNorm(8), UnconstrainedBlock(nn.Sequential(nn.ELU(), nn.Conv2d(8, 8, 3, padding=1, bias=False)))]
    else:
        parts += [ActNorm(8), ResidualBlock(branch(8)), ActNorm(8), ResidualBlock(branch(8))]
    size = 32 if kind == "mixed" else 8
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(size, 3))
    return (
        Classifier(Chain(*parts), head),
        normal(5, 2, 4, 4, seed=1, dtype=torch.float32),
        torch.tensor([0, 1, 2, 0, 1]),
    )


def dense():
    torch.manual_seed(0)
    parts = [t for _ in range(3) for t in (ActNorm(4), ResidualBlock(contractive_mlp(4, (8,))))]
    return (
        Classifier(Chain(*parts), nn.Linear(4, 2)),
        normal(6, 4, seed=1, dtype=torch.float32),
        torch.tensor([0, 1] * 3),
    )


def train(objective, x, y, wish, steps=9, device="cpu"):
    """Losses and weights of a few steps with a learning rate that changes, and how they were taken."""
    objective, x, y = copy.deepcopy(objective).to(device), x.to(device), y.to(device)
    settings, generator = Training(optimiser="sgd", learning_rate=0.05), torch.Generator(device).manual_seed(3)
    state, losses = State(objective.train(), settings, generator, wish), []
    for i in range(steps):
        set_learning_rate(state.optimiser, 0.05 / (1 + i))
        losses.append(state.advance(x, y).loss)
    return torch.stack(losses).cpu(), {k: v.cpu() for k, v in objective.state_dict().items()}, state


MAKE = {
    "blocks": convolutional,
    "mixed": lambda: convolutional("mixed"),
    "free": lambda: convolutional("free"),
    "dense": dense,
}
EAGER = Acceleration("off", "off", "float32")


@pytest.mark.parametrize("kind", MAKE)
def test_a_fused_pass_is_the_plain_pass(kind):
    model, x, y = MAKE[kind]()
    for _ in range(2):
        model.train()(x)
    twin, results = copy.deepcopy(model), []
    for each, context in ((model, nullcontext(model)), (twin, planned(twin, torch.float32, compiled=False))):
        with context as view:
            logits = view(x)
            nn.functional.cross_entropy(logits, y).backward()
        results.append([logits, *(p.grad for p in each.parameters())])
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(twin.state_dict(), model.state_dict())


@pytest.mark.parametrize("kind", MAKE)
def test_steps_in_bfloat16_stay_near_those_in_float32_and_keep_the_state_in_float32(kind):
    model, x, y = MAKE[kind]()
    plain, _, _ = train(Classification(model), x, y, EAGER)
    quick, _, state = train(Classification(model), x, y, Acceleration(precision="bfloat16"))
    assert state.engine.dtype is torch.bfloat16
    assert not torch.equal(quick, plain)
    torch.testing.assert_close(quick, plain, atol=3e-2, rtol=3e-2)
    with planned(model, torch.bfloat16, compiled=False) as view:
        assert view.encode(x).dtype is torch.float32


@pytest.mark.no_cover
@pytest.mark.slow
def test_the_compiled_function_is_the_plain_one(monkeypatch):
    """With a backend that needs no compiler; the default one is tried where there is time."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    unit_function.cache_clear()
    model, x, y = dense()
    plain, plain_state, _ = train(Classification(model), x, y, EAGER)
    quick, quick_state, state = train(Classification(model), x, y, Acceleration("off", "on", "float32"))
    unit_function.cache_clear()
    assert state.engine.compiled
    torch.testing.assert_close(quick, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(quick_state, plain_state, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.no_cover
def test_the_compiled_density_is_the_plain_one(monkeypatch):
    """The same for a unit with its log-determinant, whose convolutions are then products of matrices."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compiler._compiled.cache_clear()
    torch.manual_seed(0)
    parts = [ActNorm(2), ResidualBlock(contractive_convnet(2, 24, activation=LipSwish)), ActNorm(2)]
    base = DiagonalNormal((2, 5, 4))
    flow = Flow(Chain(*parts), base, estimator=RussianRoulette(2, 0.9), event_shape=(2, 5, 4))
    x = normal(3, 2, 5, 4, seed=1, dtype=torch.float32)
    plain, plain_state, _ = train(MaximumLikelihood(flow), x, torch.zeros(3), EAGER, steps=5)
    quick, quick_state, state = train(
        MaximumLikelihood(flow), x, torch.zeros(3), Acceleration("off", "on", "float32"), steps=5
    )
    compiler._compiled.cache_clear()
    assert state.engine.compiled
    torch.testing.assert_close(quick, plain, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(quick_state, plain_state, atol=2e-5, rtol=1e-4)


@pytest.mark.no_cover
@pytest.mark.slow
def test_nothing_that_is_compiled_depends_on_the_number_of_terms(monkeypatch):
    """A number of terms that is met late must not set the compiler to work for seconds."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compiler._compiled.cache_clear()
    torch.manual_seed(0)
    chain = Chain(ActNorm(2), ResidualBlock(contractive_convnet(2, 24)), ActNorm(2))
    x, made = normal(3, 2, 5, 4, seed=1, dtype=torch.float32), torch._dynamo.utils.counters["stats"]
    with planned(chain.train(), torch.float32, compiled=True) as plan:
        graphs = []
        for count in (3, 2, 5, 1, 1, 4):
            plan.forward_and_logdet(x, estimator=StoppedRoulette(count, 1, 0.7))[1].sum().backward()
            graphs.append(made["unique_graphs"])
    compiler._compiled.cache_clear()
    assert graphs[0] > 0
    assert graphs[:3] == [graphs[0]] * 3
    assert graphs[4:] == [graphs[3]] * 2  # one alone is a case of its own


@pytest.mark.no_cover
@pytest.mark.slow
def test_a_wide_branch_without_its_log_determinant_is_the_plain_one_when_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compiler._compiled.cache_clear()
    torch.manual_seed(0)
    parts = [
        ActNorm(2),
        ResidualBlock(contractive_convnet(2, 24)),
        ActNorm(2),
        ResidualBlock(contractive_convnet(2, 20)),
    ]
    model = Classifier(Chain(*parts), nn.Sequential(nn.Flatten(), nn.Linear(40, 3)))
    x, y = normal(4, 2, 5, 4, seed=1, dtype=torch.float32), torch.tensor([0, 1, 2, 0])
    plain, plain_state, _ = train(Classification(model), x, y, EAGER, steps=5)
    quick, quick_state, _ = train(Classification(model), x, y, Acceleration("off", "on", "float32"), steps=5)
    compiler._compiled.cache_clear()
    torch.testing.assert_close(quick, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(quick_state, plain_state, atol=2e-5, rtol=1e-4)


def test_a_cpu_takes_eager_steps_and_says_why():
    model, x, y = dense()
    _, _, state = train(Classification(model), x, y, Acceleration(), steps=1)
    assert state.engine.method == "eager"
    assert state.engine.reasons == ["no CUDA graph: this device is a CPU", "no compiled blocks: this device is a CPU"]


def image_flow(terms=3, kind="plain"):
    torch.manual_seed(0)
    activation = MaxMin if kind == "no slope" else partial(nn.ELU, 1.0)
    parts = [Squeeze()]
    for _ in range(2):
        g = contractive_convnet(4, 6, coefficient=0.8, activation=activation)
        parts += [ActNorm(4), ResidualBlock(g)]
    stages = [Chain(*parts), Chain(Squeeze(), ActNorm(8), ResidualBlock(contractive_convnet(8, 6)), ActNorm(8))]
    transform = Multiscale(stages, (1, 12, 12)) if kind == "multiscale" else Chain(*parts)
    base = DiagonalNormal(transform.output_shape((1, 12, 12)))
    flow = Flow(transform, base, estimator=PowerSeries(terms=terms), event_shape=(1, 12, 12))
    return flow, normal(5, 1, 12, 12, seed=1, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["plain", "multiscale", "no slope"])
def test_a_fused_density_is_the_plain_density_with_the_same_probes(kind):
    flow, x = image_flow(kind=kind)
    for _ in range(2):
        flow.train()(x, generator=torch.Generator().manual_seed(0))
    twin, results = copy.deepcopy(flow), []
    for each, context in ((flow, nullcontext(flow)), (twin, planned(twin, torch.float32, compiled=False))):
        with context as view:
            log_prob = view(x, generator=torch.Generator().manual_seed(5))
            log_prob.sum().backward()
        results.append([log_prob, *(p.grad for p in each.parameters())])
    torch.testing.assert_close(results[1], results[0], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "estimator",
    [
        PowerSeries(1),
        PowerSeries(3, probes=3),
        PowerSeries(4, shared=True),
        PowerSeries(2, probe="gaussian"),
        StoppedRoulette(5, 2, 0.7),
        StoppedRoulette(2, 2, 0.7, probes=2),
    ],
)
def test_every_fixed_series_is_fused_with_the_same_probes_and_gradients(estimator):
    flow, x = image_flow(kind="multiscale")
    flow.train()(x)
    twin, results = copy.deepcopy(flow), []
    for each, context in ((flow, nullcontext(flow)), (twin, planned(twin, torch.float32, compiled=False))):
        with context as view:
            log_prob = view(x, estimator=estimator, generator=torch.Generator().manual_seed(5))
            log_prob.sum().backward()
        results.append([log_prob, *(p.grad for p in each.parameters())])
    torch.testing.assert_close(results[1], results[0], atol=2e-4, rtol=1e-4)


def test_a_fused_density_in_the_plane_of_dense_layers_is_the_plain_one():
    torch.manual_seed(0)
    flow, x = mlp_flow(4, blocks=2, hidden=(8, 8), estimator=PowerSeries(4)), normal(6, 4, dtype=torch.float32)
    flow.train()(x)
    twin, results = copy.deepcopy(flow), []
    for each, context in ((flow, nullcontext(flow)), (twin, planned(twin, torch.float32, compiled=False))):
        with context as view:
            log_prob = view(x, generator=torch.Generator().manual_seed(5))
            log_prob.sum().backward()
        results.append([log_prob, *(p.grad for p in each.parameters())])
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)


def test_a_fused_density_refuses_a_second_derivative():
    flow, x = image_flow()
    flow.train()(x)
    scales = [p for n, p in flow.named_parameters() if n.endswith("log_scale")]
    with planned(flow, torch.float32, compiled=False) as view:
        log_prob = view(x)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(log_prob.sum(), scales, create_graph=True)


def test_a_fused_pass_initialises_every_actnorm_as_a_plain_one_does():
    flow, x = image_flow(kind="multiscale")
    twin = copy.deepcopy(flow)
    expected = flow.train()(x, generator=torch.Generator().manual_seed(5))
    with planned(twin.train(), torch.float32, compiled=False) as view:
        got = view(x, generator=torch.Generator().manual_seed(5))
    assert all(bool(m.initialised) for m in twin.modules() if isinstance(m, ActNorm))
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-4)
    norms = [{n: v for n, v in m.state_dict().items() if "log_scale" in n or "shift" in n} for m in (flow, twin)]
    torch.testing.assert_close(norms[1], norms[0], atol=1e-5, rtol=1e-4)


def test_the_first_steps_of_a_density_are_in_float32_and_keep_less():
    """By the same plan as later ones, so that they need no more memory."""
    flow, x = image_flow()
    plain, _, _ = train(MaximumLikelihood(flow), x, torch.zeros(5), EAGER, steps=2)
    quick, _, state = train(MaximumLikelihood(flow), x, torch.zeros(5), Acceleration(precision="bfloat16"), steps=2)
    assert isinstance(state.fast._eager_view(), nullcontext) is False
    torch.testing.assert_close(quick, plain, atol=1e-3, rtol=1e-5)


def test_memory_of_a_fused_density_does_not_grow_with_its_terms():
    def kept(terms):
        flow, x = image_flow(terms)
        flow.train()(x)
        sizes = {}

        def pack(t):
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with (
            planned(flow, torch.float32, compiled=False) as view,
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        ):
            log_prob = view(x)  # keeps what is saved alive
        assert log_prob.requires_grad
        return sum(sizes.values())

    assert kept(40) == pytest.approx(kept(3), rel=0.02)


# ------------------------------------------------------------------------------------------------- roulette


def roulette_flow(terms=2, continuation=0.85):
    flow, x = image_flow()
    flow.estimator = RussianRoulette(terms, continuation)
    return flow, x


def counts_of(flow, x, wish, steps=6, seed=3, first=0):
    """The numbers of terms that steps take, and their losses."""
    drawn = []

    class Noting(MaximumLikelihood):
        def forward(self, x, y=None, *, estimator=None, generator=None):
            drawn.append(estimator.count)
            return super().forward(x, y, estimator=estimator, generator=generator)

    objective, generator = Noting(flow).train(), torch.Generator().manual_seed(seed)
    state = State(objective, Training(learning_rate=1e-3), generator, wish)
    state.step = first
    losses = [state.advance(x).loss for _ in range(steps)]
    assert isinstance(flow.estimator, RussianRoulette)
    return drawn, torch.stack(losses)


@pytest.mark.slow
def test_a_roulette_draws_one_number_of_terms_a_step_from_the_seed_and_the_step():
    flow, x = roulette_flow()
    drawn, losses = counts_of(copy.deepcopy(flow), x, EAGER, steps=12)
    assert min(drawn) >= 2
    assert len(set(drawn)) > 2
    again, same = counts_of(copy.deepcopy(flow), x, EAGER, steps=12)
    assert again == drawn
    assert torch.equal(same, losses)
    assert counts_of(copy.deepcopy(flow), x, EAGER, steps=4, first=5)[0] == drawn[5:9]
    assert counts_of(copy.deepcopy(flow), x, EAGER, steps=12, seed=4)[0] != drawn


def test_a_roulette_in_bfloat16_takes_the_same_terms_and_stays_near_float32():
    flow, x = roulette_flow()
    plain, losses = counts_of(copy.deepcopy(flow), x, EAGER)
    quick, near = counts_of(copy.deepcopy(flow), x, Acceleration(precision="bfloat16"))
    assert quick == plain
    assert not torch.equal(near, losses)
    torch.testing.assert_close(near, losses, atol=0.5, rtol=1e-2)


def test_the_continuation_of_a_step_is_that_of_the_block_with_the_largest_constant():
    torch.manual_seed(0)
    blocks = [ResidualBlock(contractive_mlp(4, (8,), lipschitz=c)) for c in (0.5, 0.8, 0.3)]
    flow = Flow(Chain(*blocks), DiagonalNormal(4), estimator=RussianRoulette())
    objective = MaximumLikelihood(flow).train()
    drawn = State(objective, Training(), None, EAGER).draw_terms()
    assert drawn.continuation == pytest.approx(RussianRoulette().probability(0.8))


def test_a_resumed_roulette_continues_bit_for_bit(tmp_path):
    flow, x = roulette_flow()
    settings = Training(optimiser="adam", learning_rate=0.01, steps=7, warmup=1)

    def state_of():
        objective = MaximumLikelihood(copy.deepcopy(flow)).train()
        return State(objective, settings, torch.Generator().manual_seed(1), EAGER)

    def advance_by(state, steps):
        for _ in range(steps):
            state.advance(x)

    whole = state_of()
    advance_by(whole, 7)
    first = state_of()
    advance_by(first, 3)
    first.update_average()
    save(first.snapshot(), tmp_path / "state.safetensors", version="test")
    second = state_of()
    second.restore(load(tmp_path / "state.safetensors"))
    advance_by(second, 4)
    expected, got = whole.objective.state_dict(), second.objective.state_dict()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


class Repeated:
    """Stands in for CUDA graphs without a GPU: a launch calls the captured function again."""

    def __init__(self, generator):
        self.captured, self.fails = {}, False

    def __contains__(self, key):
        return key in self.captured

    def run_on_stream(self, function):
        return function()

    def capture(self, key, function):
        if self.fails:
            return "no memory for it"
        self.captured[key] = function
        return None

    def launch(self, key):
        return self.captured[key]()


def with_stand_in(monkeypatch, flow, graphs=32):
    monkeypatch.setattr(step, "CudaGraphs", Repeated)
    monkeypatch.setattr(step, "GRAPHS", graphs)
    objective, generator = MaximumLikelihood(flow).train(), torch.Generator().manual_seed(3)
    state = State(objective, Training(learning_rate=1e-3), generator, Acceleration(precision="float32"))
    state.engine.graph = True
    state.fast = FastStep(objective, state.optimiser, generator, state.engine)
    return state


def test_every_number_of_terms_has_a_graph_and_rare_ones_have_none(monkeypatch):
    flow, x = roulette_flow()
    plain, losses = counts_of(copy.deepcopy(flow), x, EAGER, steps=24)
    state = with_stand_in(monkeypatch, copy.deepcopy(flow), graphs=5)
    got = torch.stack([state.advance(x).loss for _ in range(24)])
    assert torch.equal(got, losses)
    after = plain[4:]  # two eager steps, two that warm up
    assert set(state.fast._graphs.captured) == {n for n in after if n < 2 + 5}
    assert max(after) >= 2 + 5
    assert len(state.fast._graphs.captured) > 2


def test_a_captured_step_uses_the_batch_it_is_given(monkeypatch):
    flow, _ = image_flow()
    batches = [normal(5, 1, 12, 12, seed=i, dtype=torch.float32) for i in range(8)]
    plain = counts_free(copy.deepcopy(flow), batches)
    state = with_stand_in(monkeypatch, copy.deepcopy(flow))
    got = torch.stack([state.advance(x).loss for x in batches])
    assert torch.equal(got, plain)
    assert list(state.fast._graphs.captured) == [0]
    state.advance(batches[0][:3])  # another size is not launched
    assert list(state.fast._graphs.captured) == [0]


def counts_free(flow, batches):
    objective, generator = MaximumLikelihood(flow).train(), torch.Generator().manual_seed(3)
    state = State(objective, Training(learning_rate=1e-3), generator, EAGER)
    return torch.stack([state.advance(x).loss for x in batches])


def test_if_a_step_cannot_be_captured_it_runs_eagerly_and_says_why(monkeypatch):
    flow, x = roulette_flow()
    _, losses = counts_of(copy.deepcopy(flow), x, EAGER, steps=8)
    monkeypatch.setattr(Repeated, "capture", lambda *_: "no memory for it")
    state = with_stand_in(monkeypatch, copy.deepcopy(flow))
    assert torch.equal(torch.stack([state.advance(x).loss for _ in range(8)]), losses)
    assert not state.engine.graph
    assert state.engine.reasons[-1] == "no CUDA graph: no memory for it"


def test_a_number_of_terms_runs_once_before_it_is_captured(monkeypatch):
    """One term alone compiles a function of its own: two of its arguments are then the same tensor."""
    flow, x = roulette_flow(terms=1, continuation=0.6)
    drawn, _ = counts_of(copy.deepcopy(flow), x, EAGER, steps=16)
    state, seen = with_stand_in(monkeypatch, copy.deepcopy(flow)), []
    run_on_stream, capture = Repeated.run_on_stream, Repeated.capture
    monkeypatch.setattr(Repeated, "run_on_stream", lambda *a: (seen.append(drawn[state.step]), run_on_stream(*a))[1])
    monkeypatch.setattr(Repeated, "capture", lambda s, key, f: (seen.append(-key), capture(s, key, f))[1])
    for _ in range(16):
        state.advance(x)
    assert 1 in drawn[2:]
    recorded = [-n for n in seen if n < 0]
    assert sorted(recorded) == sorted(set(drawn[4:]))
    assert all(seen[seen.index(-n) - 1] == n for n in recorded)


def test_a_failed_capture_restores_stream_pool_and_generators(monkeypatch):
    """Otherwise drawing the next random number, and freeing memory, would fail."""
    done = []

    class Generator:
        def clone_state(self):
            return "as before"

        def graphsafe_set_state(self, state):
            done.append((self, state))

    class Refusing:
        def __init__(self, *_, **options):
            assert options == {"pool": "a pool", "stream": "aside"}

        def __enter__(self):
            return None

        def __exit__(self, *_):
            raise RuntimeError("capture was invalidated")

    own, default = Generator(), Generator()
    for name, value in {
        "Stream": lambda: "aside", "graph_pool_handle": lambda: "a pool", "CUDAGraph": Graph, "graph": Refusing,
        "current_stream": lambda: "main", "set_stream": lambda s: done.append(s), "current_device": lambda: 0,
        "default_generators": (default,),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *arguments: done.append(arguments), raising=False)
    graphs = cuda_graph.CudaGraphs(own)
    graphs.captured[3] = Graph(), None

    def step():
        raise RuntimeError("something was read\nin between")

    assert graphs.capture(4, step) == "something was read"
    assert done == ["main", (0, "a pool"), (default, "as before"), (own, "as before")]
    assert graphs.captured == {}


class Graph:
    """Stands in for a CUDA graph."""

    def register_generator_state(self, generator):
        pass


class Reading(MaximumLikelihood):
    """Reads from the device in every step, which a CUDA graph cannot capture."""

    def forward(self, x, y=None, *, estimator=None, generator=None):
        assert float(x.abs().max()) > 0
        return super().forward(x, y, estimator=estimator, generator=generator)


@pytest.mark.gpu
def test_steps_that_cannot_be_captured_continue_with_the_same_noise():
    flow, x = roulette_flow()
    plain, _, _ = train(Reading(flow), x, torch.zeros(5), EAGER, steps=12, device="cuda")
    wish = Acceleration(precision="float32")
    quick, _, state = train(Reading(flow), x, torch.zeros(5), wish, steps=12, device="cuda")
    assert not state.engine.graph
    assert len(state.engine.reasons) == 1
    torch.testing.assert_close(quick, plain, atol=2e-3, rtol=2e-3)
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_a_captured_roulette_trains_as_eager_steps_do():
    flow, x = roulette_flow()
    plain, plain_state, _ = train(MaximumLikelihood(flow), x, torch.zeros(5), EAGER, steps=30, device="cuda")
    wish = Acceleration(precision="float32")
    quick, quick_state, state = train(MaximumLikelihood(flow), x, torch.zeros(5), wish, steps=30, device="cuda")
    assert state.engine.graph
    assert state.engine.reasons == []
    assert len(state.fast._graphs.captured) > 3
    torch.testing.assert_close(quick, plain, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(quick_state, plain_state, atol=2e-3, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [nn.ELU, partial(Sine, 2.5)])
@pytest.mark.parametrize("estimator", [PowerSeries(4), RussianRoulette(2, 0.85), PowerSeries(3, probes=2)])
def test_a_density_of_wide_branches_by_kernels_stays_near_eager_float32(estimator, activation):
    """Few channels outside and 128 inside: products of matrices, or kernels, whichever is faster."""
    torch.manual_seed(0)
    parts = [Squeeze()]
    for _ in range(3):
        parts += [ActNorm(4), ResidualBlock(contractive_convnet(4, 128, coefficient=0.8, activation=activation))]
    flow = Flow(Chain(*parts), DiagonalNormal((4, 6, 6)), estimator=estimator, event_shape=(1, 12, 12))
    x = normal(64, 1, 12, 12, seed=1, dtype=torch.float32)
    plain, _, _ = train(MaximumLikelihood(flow), x, torch.zeros(64), EAGER, steps=20, device="cuda")
    quick, _, state = train(MaximumLikelihood(flow), x, torch.zeros(64), Acceleration(), steps=20, device="cuda")
    assert state.engine.method == "one CUDA graph, blocks compiled, g in bfloat16"
    (activation_step,) = try_parse(activation()).program.steps
    assert estimator.probes > 1 or any(way.probes == 1 and act == activation_step for way, _, act, *_ in dual._WINS)
    torch.testing.assert_close(quick, plain, atol=0.5, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [nn.ELU, partial(Sine, 2.5)])
@pytest.mark.parametrize("probes", [0, 1])
@pytest.mark.parametrize("kernels", [(3, 1, 3), (3, 3)])
def test_a_wide_unit_by_kernels_has_the_gradients_of_float32(kernels, probes, activation):
    torch.manual_seed(0)
    g = contractive_convnet(12, 512, kernels=kernels, coefficient=0.8, activation=activation).cuda()
    values = [v.detach() for v in try_parse(g).tensors()[:-1]]
    x = torch.randn(16 * 64, 12, device="cuda")
    both = torch.cat([x, torch.randn(probes * 16 * 64, 12, device="cuda")])
    results = []
    for dtype, through in ((torch.float32, dual._layer_by_layer), (torch.bfloat16, dual._by_kernels)):
        way = dual.ExecutionMode(dtype, probes, True)
        leaves = [v.to(dtype).contiguous(memory_format=torch.channels_last) if v.dim() > 1 else v for v in values]
        leaves = [v.clone().requires_grad_() for v in leaves]
        layers = dual.read_layers(dual.stages(try_parse(g).program), leaves, (8, 8), 16 * (1 + probes), way)
        unrolled = [maps.Unrolled(tuple(t.weight.shape), (8, 8), True) for t in layers]
        layers = [
            replace(t, map=u, matrix=u.matrix(t.weight.detach())) if t.weight.shape[2] == 3 else t
            for t, u in zip(layers, unrolled, strict=True)
        ]
        start = x.clone().requires_grad_()
        h, _ = through(way, layers, start, both.to(dtype))
        d = torch.sin(torch.arange(h.numel(), device="cuda")).view_as(h).to(h.dtype)
        results.append([h.detach(), *torch.autograd.grad(h, [start, *leaves], d)])
    for got, expected in zip(results[1], results[0], strict=True):
        limit = 2e-2 if got.dim() > 1 else 0.1  # sums over all pixels cancel
        assert float((got.float() - expected).norm() / expected.norm()) < limit


@pytest.mark.gpu
def test_a_captured_roulette_in_bfloat16_stays_near_float32():
    flow, x = roulette_flow()
    plain, _, _ = train(MaximumLikelihood(flow), x, torch.zeros(5), EAGER, steps=20, device="cuda")
    quick, _, state = train(MaximumLikelihood(flow), x, torch.zeros(5), Acceleration(), steps=20, device="cuda")
    assert state.engine.method == "one CUDA graph, blocks compiled, g in bfloat16"
    torch.testing.assert_close(quick, plain, atol=0.5, rtol=2e-2)


def test_an_estimator_that_cannot_be_fused_runs_eagerly():
    flow, x = image_flow()
    twin = copy.deepcopy(flow.train())
    with planned(twin, torch.float32, compiled=False) as view:
        got = view(x, estimator=Exact())
    torch.testing.assert_close(got, flow(x, estimator=Exact()), atol=1e-4, rtol=1e-5)


def test_a_density_in_bfloat16_stays_near_float32():
    flow, x = image_flow()
    plain, _, _ = train(MaximumLikelihood(flow), x, torch.zeros(5), EAGER)
    quick, _, state = train(MaximumLikelihood(flow), x, torch.zeros(5), Acceleration(precision="bfloat16"))
    assert state.engine.dtype is torch.bfloat16
    assert not torch.equal(quick, plain)
    torch.testing.assert_close(quick, plain, atol=0.5, rtol=1e-2)


def test_an_exact_determinant_keeps_its_branches_in_float32_and_says_why():
    flow, x = mlp_flow(2, blocks=1, hidden=(4,)), normal(4, 2, seed=1, dtype=torch.float32)
    _, _, state = train(MaximumLikelihood(flow), x, torch.zeros(4), Acceleration(precision="bfloat16"), steps=1)
    assert state.engine.dtype is torch.float32
    assert "no bfloat16: the log-determinant is not a power series" in state.engine.reasons


@pytest.mark.parametrize("wrong", [{"graph": "yes"}, {"compile": "maybe"}, {"precision": "float8"}])
def test_invalid_settings_raise_a_clear_error(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} must be one of auto, .*; got '{wrong[name]}'"):
        Acceleration(**wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_norms_of_layers_of_different_shapes_are_the_same_on_concurrent_streams(captured, monkeypatch):
    model, x, _ = convolutional("mixed")
    x = x.cuda()
    concurrent, alone = (copy.deepcopy(model).cuda().train() for _ in range(2))

    def refresh(module):
        with batched_refresh(module):
            return [w.clone() for w in module.parameters()]

    for m in (concurrent, alone):
        m(x)
    launch = partial(refresh, concurrent)
    if captured:
        stream = torch.cuda.Stream()
        cuda_graph.run_on_stream(stream, launch)
        refresh(alone)
        graph, _ = cuda_graph.capture(launch, stream=stream)
        launch = graph.replay
    for k in range(20):
        noise = [1e-2 * normal(*p.shape, seed=k, dtype=torch.float32).cuda() for p in model.parameters()]
        for m in (concurrent, alone):
            torch._foreach_add_([p.data for p in m.parameters()], noise)
        launch()
        with monkeypatch.context() as patch:
            patch.setattr(refresh_module, "concurrently", lambda tasks, device: [task() for task in tasks])
            refresh(alone)
        for (name, a), b in zip(concurrent.named_buffers(), alone.buffers(), strict=True):
            assert torch.equal(a, b), name


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MAKE)
def test_a_graph_trains_as_eager_steps_do(kind):
    model, x, y = MAKE[kind]()
    plain, plain_state, _ = train(Classification(model), x, y, EAGER, device="cuda")
    quick, quick_state, state = train(Classification(model), x, y, Acceleration("on", "off", "float32"), device="cuda")
    assert state.engine.graph
    assert state.engine.reasons == []
    torch.testing.assert_close(quick, plain, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(quick_state, plain_state, atol=1e-3, rtol=1e-2)


@pytest.mark.gpu
def test_a_captured_density_draws_fresh_noise_at_every_step():
    flow, x = image_flow()
    plain, _, _ = train(MaximumLikelihood(flow), x, torch.zeros(5), EAGER, device="cuda")
    wish = Acceleration(precision="float32")
    quick, _, state = train(MaximumLikelihood(flow), x, torch.zeros(5), wish, device="cuda")
    assert state.engine.graph
    assert state.engine.fuse
    torch.testing.assert_close(quick, plain, atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["blocks", "free"])
def test_everything_together_stays_near_eager_float32(kind):
    model, x, y = MAKE[kind]()
    plain, _, _ = train(Classification(model), x, y, EAGER, device="cuda")
    quick, _, state = train(Classification(model), x, y, Acceleration(), device="cuda")
    assert state.engine.method == "one CUDA graph, blocks compiled, g in bfloat16"
    torch.testing.assert_close(quick, plain, atol=3e-2, rtol=3e-2)


def test_a_resumed_run_keeps_the_layout_of_its_optimiser_state(tmp_path):
    """A file keeps no layout; a fused optimiser that walks through memory would mix channels and positions."""
    model, x, y = convolutional()
    settings = Training(optimiser="adam", learning_rate=0.01, steps=6, warmup=1)
    wish = Acceleration(precision="bfloat16")

    def state_of():
        return State(Classification(copy.deepcopy(model)).train(), settings, None, wish)

    def advance_by(state, steps):
        for _ in range(steps):
            state.advance(x, y)

    first = state_of()
    advance_by(first, 4)
    first.update_average()
    save(first.snapshot(), tmp_path / "state.safetensors", version="test")
    second = state_of()
    second.restore(load(tmp_path / "state.safetensors"))
    second.fast.taken = 4  # past the eager steps, as the first is
    for state in (first, second):
        advance_by(state, 3)
    torch.testing.assert_close(second.objective.state_dict(), first.objective.state_dict(), atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="a snapshot can only be restored before the first step"):
        second.restore(load(tmp_path / "state.safetensors"))


def test_linear_blocks_on_more_axes_are_left_as_they_are():
    torch.manual_seed(0)
    chain = Chain(ResidualBlock(contractive_mlp(4, (8,))))
    x = normal(5, 4, 4, seed=1, dtype=torch.float32)
    expected = chain(x)
    with planned(chain, torch.float32, compiled=False) as plan:
        torch.testing.assert_close(plan(x), expected)


def test_a_layer_without_a_part_in_the_loss_gets_no_gradient():
    torch.manual_seed(0)
    blocks = nn.ModuleList(ResidualBlock(contractive_mlp(3, (3,))) for _ in range(2))
    with batched_refresh(blocks.train()):
        blocks[0](normal(2, 3, seed=1, dtype=torch.float32)).sum().backward()
    assert all(p.grad is None for p in blocks[1].parameters())
    assert all(p.grad is not None for p in blocks[0].parameters())


def test_a_second_derivative_through_scaled_weights_is_refused():
    model, x, _ = dense()
    model(x)
    weights = [p for n, p in model.named_parameters() if n.endswith("original")]
    (gradient,) = torch.autograd.grad(model.train()(x).square().sum(), weights[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|not have been used"):
        torch.autograd.grad(gradient.sum(), weights[:1])


@pytest.mark.parametrize("before", [True, False])
def test_sums_of_products_are_in_float32_within_a_step_and_set_back_after_it(before):
    matmul = torch.backends.cuda.matmul
    kept, matmul.allow_bf16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction, before
    try:
        with float32_accumulation():
            assert not matmul.allow_bf16_reduced_precision_reduction
        assert matmul.allow_bf16_reduced_precision_reduction == before
    finally:
        matmul.allow_bf16_reduced_precision_reduction = kept


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_the_precision_of_products_is_restored(precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with (
            float32_matmul_precision("tf32", torch.device("cuda")),
            float32_matmul_precision("ieee", torch.device("cuda")),
        ):
            pass
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
