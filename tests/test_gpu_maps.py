"""All implementations of a linear map give the same numbers: compared with autograd of torch's layers."""

import gc
import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from iresnet import PowerSeries, timing
from iresnet.branch import Program, Step, try_parse
from iresnet.gpu import density, dual, kernels, maps
from iresnet.gpu.dual import Stage, stages
from iresnet.gpu.kernels import wide
from iresnet.gpu.maps import Convolution, Dense, Unrolled, as_images, as_matrix, candidates
from iresnet.gpu.neighbours import gather_neighbours, round_up_to_eight, sum_neighbours
from iresnet.lipschitz import Sine
from iresnet.lipschitz.elu import elu_slope
from iresnet.spectral import Geometry
from tests.test_gpu_kernels import bent, bent_back
from tests.zoo import DOUBLE, normal

LAYERS = {
    "3 x 3": nn.Conv2d(3, 30, 3, padding=1, bias=False),
    "3 x 3 back": nn.Conv2d(30, 3, 3, padding=1, bias=False),
    "5 x 5": nn.Conv2d(1, 25, 5, padding=2, bias=False),
    "1 x 1": nn.Conv2d(6, 4, 1, bias=False),
    "strided": nn.Conv2d(3, 5, 3, stride=2, padding=1, bias=False),
    "grouped, dilated": nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2, bias=False),
    "1-D": nn.Conv1d(3, 4, 3, padding=1, bias=False),
}


def ways_of(layer, size):
    return candidates(Geometry.of(layer), tuple(layer.weight.shape), size, True)


def uncompiled(way):
    return Unrolled(way.shape, way.size, False) if isinstance(way, Unrolled) else way


CASES = [
    (name, i) for name, layer in LAYERS.items() for i in range(len(ways_of(layer, (6, 5)[: layer.weight.dim() - 2])))
]


@pytest.mark.parametrize(("name", "index"), CASES)
def test_every_map_equals_the_layer_with_its_transpose_and_gradient(name, index):
    layer = LAYERS[name].double()
    size = (6, 5)[: layer.weight.dim() - 2]
    way, w = uncompiled(ways_of(layer, size)[index]), layer.weight.detach().clone().requires_grad_()
    x = normal(4, w.shape[1] * LAYERS[name].groups, *size, seed=1).requires_grad_()
    y = layer._conv_forward(x, w, None)
    g = normal(*y.shape, seed=2)
    dx, dw = torch.autograd.grad(y, [x, w], g)
    m = way.matrix(w.detach())
    a, b = as_matrix(x.detach()), as_matrix(g)
    close = {"check_dtype": False, "atol": 2e-5 if isinstance(way, Unrolled) else 1e-10, "rtol": 1e-5}
    torch.testing.assert_close(way.forward(a, m), as_matrix(y.detach()), **close)
    torch.testing.assert_close(way.transpose(b, m), as_matrix(dx), **close)
    torch.testing.assert_close(way.gradient(a, b, m), dw, **close)


def test_the_cases_cover_every_map():
    assert {type(ways_of(LAYERS[n], (6, 5)[: LAYERS[n].weight.dim() - 2])[i]) for n, i in CASES} == {
        Dense, Convolution, Unrolled,
    }  # fmt: skip


def test_a_convolution_between_few_and_many_channels_may_be_unrolled_and_no_other():
    def kinds(layer, compiled=True):
        return [type(w) for w in candidates(Geometry.of(layer), tuple(layer.weight.shape), (8, 8), compiled)]

    assert kinds(nn.Conv2d(12, 512, 3, padding=1)) == [Unrolled, Convolution]
    assert kinds(nn.Conv2d(512, 48, 3, padding=1)) == [Unrolled, Convolution]
    assert kinds(nn.Conv2d(512, 512, 1)) == [Dense]
    for other in (
        nn.Conv2d(64, 64, 3, padding=1),
        nn.Conv2d(12, 512, 3),
        nn.Conv2d(12, 512, 3, padding=1, stride=2),
        nn.Conv2d(12, 512, (3, 1), padding=(1, 0)),
        nn.Conv2d(12, 512, 1, stride=2),
    ):
        assert kinds(other) == [Convolution]
    assert kinds(nn.Conv2d(12, 512, 3, padding=1), compiled=False) == [Convolution]


@pytest.mark.parametrize("back", [False, True])
def test_gather_neighbours_and_sum_neighbours_are_transposes(back):
    a, size = normal(2 * 4 * 3, 2, seed=1), (4, 3)
    u = gather_neighbours(a, size, 3, back, DOUBLE)
    assert u.shape == (24, round_up_to_eight(18))
    assert u[:, 18:].abs().max() == 0
    places = F.unfold(as_images(a, size), 3, padding=1).transpose(1, 2).reshape(24, 2, 9)
    places = places.flip(2).flatten(1) if back else places.transpose(1, 2).flatten(1)
    torch.testing.assert_close(u[:, :18], places)
    z = normal(24, round_up_to_eight(18), seed=2)
    total = sum_neighbours(z, size, 3, not back, 2)
    torch.testing.assert_close((u * z).sum(), (a * total).sum(), atol=1e-4, rtol=1e-5)  # summed in float32


def test_a_program_is_read_as_stages():
    elu, conv = Step("elu", settings=(1.0,)), Step("linear", 2)
    assert stages(Program.of(conv, elu, conv)) == (Stage(None, conv), Stage(elu, conv))
    assert stages(Program.of(elu, conv)) == (Stage(elu, conv),)
    assert stages(Program.of(conv, conv)) == (Stage(None, conv), Stage(Step("identity"), conv))
    assert stages(Program.of(conv, elu)) is None
    assert stages(Program.of(conv, elu, elu, conv)) is None
    assert try_parse(nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.Linear(2, 2))).program.has_slopes


# ------------------------------------------------------------------------------------------------- measuring


@pytest.fixture
def tried(monkeypatch):
    """Without a GPU, call every candidate once and choose the last; return what was measured."""
    seen = []

    def fastest(what, ways, call):
        for way in ways:
            call(way)
        seen.append((what, list(ways)))
        return ways[-1]

    for module in (maps, dual, wide):
        monkeypatch.setattr(module, "can_measure", lambda _: True)
        monkeypatch.setattr(module, "fastest", fastest)
    _forget()
    yield seen
    _forget()


def _forget():
    for function in (maps._fastest_map, maps._tile, wide._tile):
        function.cache_clear()
    dual._WINS.clear()


def test_the_fastest_candidate_is_chosen_and_measurements_are_kept(monkeypatch):
    monkeypatch.setattr(timing, "_graph_seconds", lambda function, repeats: repeats * function())
    monkeypatch.setattr(timing, "MEASURED", [])
    assert timing.fastest("a sum", ["slow", "fast", "none"], {"slow": 3.0, "fast": 1.0, "none": math.inf}.get) == "fast"
    (kept,) = timing.MEASURED
    assert kept == ("a sum", ["slow", "fast", "none"], [3e6, 1e6, math.inf])


@pytest.mark.parametrize(("times", "taken"), [((1.0, 0.99), 0), ((1.0, 0.9), 1), ((math.inf, 5.0), 1)])
def test_another_candidate_is_chosen_only_if_it_is_clearly_faster(monkeypatch, times, taken):
    monkeypatch.setattr(timing, "_graph_seconds", lambda function, repeats: repeats * function())
    assert timing.fastest("a sum", [0, 1], times.__getitem__) == taken
    assert timing.fastest("a sum", [0, 1], lambda _: math.inf) == 0


def test_without_a_graph_candidates_are_called_and_one_out_of_memory_is_not_chosen(monkeypatch):
    clock = [0.0]

    def call(way):
        if way == "large":
            raise torch.cuda.OutOfMemoryError
        clock[0] += way

    monkeypatch.setattr(timing, "MEASURED", [])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    assert timing.fastest("a wait", ["large", 0.02, 0.0], call, repeats=2, graph=False) == 0.0
    assert timing.MEASURED[0][2][0] == math.inf


def test_a_candidate_that_cannot_be_captured_is_not_chosen_and_its_capture_ends(monkeypatch):
    ended = []

    class Graph:
        def capture_begin(self):
            pass

        def capture_end(self):
            ended.append(True)

    class Stream:
        device = None

        def wait_stream(self, _):
            pass

    for name, value in {
        "CUDAGraph": Graph, "synchronize": lambda: None, "current_stream": lambda _: Stream(),
        "stream": lambda _: nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(timing, "_stream", Stream)
    calls = iter([None, None, "recorded"])

    def way():
        if next(calls) == "recorded":
            raise RuntimeError("not while a stream is recorded")

    assert timing._graph_seconds(way, 5) == math.inf
    assert ended == [True]
    assert gc.isenabled()


def test_matrices_beyond_32_bit_indices_are_left_to_torch(tried, monkeypatch):
    monkeypatch.setattr(kernels, "multiplies", lambda *_: True)
    assert kernels.counts(2 * 256 * 32 * 32, 512)
    assert not kernels.counts(2**22, 512)
    maps._tile.cache_clear()
    assert maps._tile(2**22, (512, 512), (2**22, 512), torch.bfloat16, torch.device("cpu"), False) is None
    assert tried == []


def test_all_maps_for_a_convolution_are_measured_on_matrices_of_its_size(tried):
    maps._fastest_map.cache_clear()
    for shape in ((20, 2, 3, 3), (2, 20, 3, 3)):
        layer = nn.Conv2d(shape[1], shape[0], 3, padding=1, bias=False)
        step = try_parse(layer).program.steps[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(maps, "maybe_compile", lambda function, _: function)
            assert isinstance(maps.choose_map(step, layer.weight.detach(), (4, 3), 2, compiled=True), Convolution)
    assert [[type(way) for way in ways] for _, ways in tried] == [[Unrolled, Convolution]] * 2


@pytest.mark.parametrize("activated", [True, False])
def test_products_times_slopes_are_measured_with_every_tile(tried, monkeypatch, activated):
    maps._tile.cache_clear()
    used = []

    def product(a, b, d, tile, *, activated):
        used.append(tile)
        return maps.times_repeated(a @ b, elu_slope(d) if activated else d)

    monkeypatch.setattr(kernels, "multiplies", lambda *_: True)
    monkeypatch.setattr(kernels, "product_times", product)
    a, b, d = normal(6, 4), normal(4, 5, seed=2), normal(3, 5, seed=3)
    expected = (a @ b) * (torch.where(d > 0, 1.0, d + 1) if activated else d).repeat(2, 1)
    torch.testing.assert_close(maps.product_times(a, b, d, activated), expected)
    assert tried[0][1] == [None, *kernels.PRODUCT_TILES]
    assert used == [*kernels.PRODUCT_TILES, kernels.PRODUCT_TILES[-1]]


def launch_bent(a, m, bias, out, kept, dual, frequency, _):
    made, beside = bent(a, m, bias, dual, frequency)
    assert (kept is out) == (not frequency)
    kept.copy_(beside)
    out.copy_(made)


@pytest.mark.parametrize("activation", [nn.ELU, partial(Sine, 2.5)])
@pytest.mark.parametrize("probes", [0, 1])
def test_kernels_of_a_unit_are_measured_against_its_layers_forward_and_backward(tried, monkeypatch, probes, activation):
    """With torch in place of the kernels: what is left is the whole of a step as a GPU takes it."""
    monkeypatch.setattr(wide, "_launch_activate", launch_bent)
    monkeypatch.setattr(wide, "_launch_back", lambda *arguments: bent_back(*arguments[:-1]))
    monkeypatch.setattr(wide, "is_ready", lambda *_: True)
    monkeypatch.setattr(maps, "maybe_compile", lambda function, _: function)
    monkeypatch.setattr(dual, "maybe_compile", lambda function, _: function)
    monkeypatch.setattr(density, "maybe_compile", lambda function, _: function)
    monkeypatch.setattr(dual, "choose_map", lambda step, w, size, *_, compiled: candidates(
        step.geometry, tuple(w.shape), size, True)[-1])  # fmt: skip
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 128, 3, padding=1), nn.Conv2d(128, 128, 1), nn.Conv2d(128, 2, 3, padding=1)
    g = nn.Sequential(layers[0], activation(), layers[1], activation(), layers[2])
    parts, values = (
        dual.stages(try_parse(g).program),
        [v.detach().requires_grad_() for v in try_parse(g).tensors()[:-1]],
    )
    x = normal(3, 2, 4, 3, seed=1, dtype=torch.float32).requires_grad_()
    noise, weights = torch.ones(3, 2, 4, 3, dtype=torch.int8), density.pack(*PowerSeries(4).weights(x))
    results = []
    for way in (dual.ExecutionMode(torch.float32, probes, True), dual.ExecutionMode(torch.float32, probes, False)):
        arguments = parts, way, x, torch.zeros_like(x), None, None, values
        out = (
            density.advance_with_logdet(*arguments, noise, weights)
            if probes
            else density.advance_without_logdet(*arguments)
        )
        results.append([*out, *torch.autograd.grad(sum(t.square().sum() for t in out), [x, *values])])
    assert [ways for what, ways in tried if what.startswith("a unit")] == [[True, False]]
    assert [dual._WINS[key] for key in dual._WINS] == [False]
    assert {what.split(",")[0] for what, _ in tried} >= {"activate", "activate_backward"}
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-3)
    dual._WINS[next(iter(dual._WINS))] = True  # by the kernels
    way = dual.ExecutionMode(torch.float32, probes, True)
    arguments = parts, way, x, torch.zeros_like(x), None, None, values
    out = (
        density.advance_with_logdet(*arguments, noise, weights)
        if probes
        else density.advance_without_logdet(*arguments)
    )
    results.append([*out, *torch.autograd.grad(sum(t.square().sum() for t in out), [x, *values])])
    torch.testing.assert_close(results[2], results[1], atol=1e-4, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 12, 3, 3), (48, 512, 3, 3)])
def test_the_map_is_chosen_by_measurement_and_is_accurate_in_bfloat16(shape):
    layer = nn.Conv2d(shape[1], shape[0], 3, padding=1, bias=False).cuda()
    w = layer.weight.detach().bfloat16().contiguous(memory_format=torch.channels_last)
    step = try_parse(layer).program.steps[0]
    way = maps.choose_map(step, w, (8, 8), 16, compiled=True)
    assert isinstance(way, Unrolled | Convolution)
    a = torch.randn(16 * 64, shape[1], device="cuda").bfloat16()
    for each in candidates(step.geometry, shape, (8, 8), True):
        expected = as_matrix(F.conv2d(as_images(a, (8, 8)).float(), w.float(), padding=1))
        got = each.forward(a, each.matrix(w)).float()
        assert float((got - expected).norm() / expected.norm()) < 1e-2
