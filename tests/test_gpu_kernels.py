"""A unit by custom kernels: compared with autograd in float32 (Triton's interpreter), and in bfloat16 on a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product as crossed

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from iresnet.branch import Step, try_parse
from iresnet.gpu import dual as dual_unit
from iresnet.gpu import kernels
from iresnet.gpu.kernels import language, tuning, wide
from iresnet.gpu.kernels.launch import Saved, _kernel, _kernels
from iresnet.gpu.maps import Dense, Unrolled
from iresnet.lipschitz import Sine
from iresnet.lipschitz.elu import elu_slope

#: One case for every method (narrow, own, library), sizes that fit no tile, with and without bias and ActNorm.
CASES = [(2, 16, 6, 5, True), (1, 16, 9, 9, False), (1, 32, 5, 7, True), (1, 64, 5, 5, False), (1, 128, 4, 3, True)]

#: Rows, depth, columns and period of products: sizes that fit no tile, and rows of slopes that repeat.
PRODUCTS = [(70, 40, 128, 70), (140, 64, 256, 70)]

#: Activations of wide units: 0 is ELU, other numbers are frequencies of a sine.
FREQUENCIES = [0.0, 2.5]


def plain(x, y, bias, norm, values, dtype=torch.float32):
    """The same function by torch, weights and activations in `dtype`."""
    w1, b1, w2, b2, w3 = values
    x = x + y if bias is None else x + y + per_channel(bias)
    if norm is not None:
        x = (x + per_channel(norm[0])) * per_channel(norm[1]).exp()
    h = F.conv2d(F.elu(x).to(dtype), w1.to(dtype), padding=1) + per_channel(b1)
    h = F.conv2d(F.elu(h).to(dtype), w2.to(dtype)) + per_channel(b2)
    return x, F.conv2d(F.elu(h).to(dtype), w3.to(dtype), padding=1)


def per_channel(v: Tensor) -> Tensor:
    return v.view(-1, 1, 1)


def inputs(n, c, h, w, full, device="cpu", dtype=torch.float32):
    g = torch.Generator().manual_seed(n + c + h)
    draw = lambda *shape: torch.randn(*shape, generator=g).to(device)  # noqa: E731
    weights = [draw(c, c, k, k) / (k * c**0.5) for k in (3, 1, 3)]
    w1, w2, w3 = (v.to(dtype).contiguous(memory_format=torch.channels_last) for v in weights)
    bias, norm = (draw(c), (draw(c) / 8, draw(c) / 8)) if full else (None, None)
    return draw(n, c, h, w), draw(n, c, h, w).to(dtype), bias, norm, [w1, draw(c), w2, draw(c), w3]


def outputs_and_gradients(function, x, y, bias, norm, values, dtype=None):
    """x', y' and the gradient of <x', s> + <y', t> in every input, for s and t fixed."""
    flat = [x, y, *([] if bias is None else [bias]), *(norm or ()), *values]
    leaves = [v.detach().to(dtype or v.dtype).requires_grad_() for v in flat]
    it = iter(leaves)
    first, second = next(it), next(it)
    bias = None if bias is None else next(it)
    norm = None if norm is None else (next(it), next(it))
    results = function(first, second, bias, norm, list(it))
    seeds = [torch.sin(torch.arange(r.numel(), device=r.device)).view(r.shape).to(r.dtype) for r in results]
    return [*results, *torch.autograd.grad(results, leaves, seeds)]


def largest_error(found, expected) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm()) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_interpreted_equal_autograd_in_float32():
    # In a process of its own: Triton decides at import whether it interprets.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = [float(line) for line in done.stdout.split()]
    assert len(errors) == len(CASES) + (1 + len(FREQUENCIES)) * len(PRODUCTS) + 4 * len(FREQUENCIES)
    assert max(errors) < 5e-6


@pytest.mark.gpu
@pytest.mark.parametrize(("c", "size"), [(16, 32), (64, 16), (256, 8), (16, 28), (64, 14), (256, 7)])
def test_kernels_on_a_gpu_are_as_near_to_float32_as_torch_in_bfloat16(c, size):
    given = inputs(37, c, size, size, True, "cuda", torch.bfloat16)
    exact = outputs_and_gradients(plain, *given, dtype=torch.float32)
    torch_error = largest_error(outputs_and_gradients(lambda *a: plain(*a, torch.bfloat16), *given), exact)
    assert largest_error(outputs_and_gradients(kernels.advance, *given), exact) < 1.5 * torch_error


@pytest.mark.gpu
@pytest.mark.parametrize(("c", "size"), [(16, 32), (64, 16)])
def test_kernels_in_a_graph_give_the_same_bits_every_time(c, size):
    # No sum depends on the order in which programs run, also with gradients of weights on a second stream.
    given = inputs(64, c, size, size, True, "cuda", torch.bfloat16)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        expected = outputs_and_gradients(three_units, *given)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = outputs_and_gradients(three_units, *given)
    for _ in range(3):
        for tensor in found:
            tensor.detach().fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def three_units(x, y, *rest):
    for _ in range(3):
        x, y = kernels.advance(x, y, *rest)
    return x, y


def branch(c=16, kernel=(3, 1, 3), activation=nn.ELU, **options) -> nn.Sequential:
    layers = [nn.Conv2d(c, c, k, padding=k // 2, **options) for k in kernel]
    return nn.Sequential(*(m for layer in layers for m in (activation(), layer)))


def test_the_unit_of_the_paper_is_supported_and_others_are_not():
    def known(g):
        return kernels.is_unit(try_parse(g).program)

    assert known(branch())
    assert not known(branch(kernel=(1, 3, 3)))
    assert not known(branch(activation=nn.ReLU))
    assert not known(branch(activation=lambda: nn.ELU(0.5)))
    assert not known(branch(bias=False))
    assert not known(branch(dilation=2))
    assert not known(nn.Sequential(*branch(), nn.ELU()))


def test_unit_is_supported_only_on_a_gpu():
    g, x = branch(), torch.zeros(1, 16, 4, 4)
    values = [v.detach().bfloat16() for v in try_parse(g).tensors()][:-1]
    with_gpu = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
    assert not kernels.supported(try_parse(g).program, x, values)
    assert kernels.supported(try_parse(g).program, x.to("cuda") if with_gpu else x, values) == with_gpu


def test_unit_needs_weights_of_bfloat16_and_a_power_of_two_channels():
    def fits(c, dtype=torch.bfloat16):
        return kernels._have_sizes(inputs(1, c, 2, 2, True, dtype=dtype)[-1], c)

    assert fits(16)
    assert fits(64)
    assert not fits(16, torch.float32)
    assert not fits(8)
    assert not fits(48)


@pytest.mark.parametrize("c", [16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("n", [1, 3, 128])
def test_programs_cover_every_pixel_once(c, n):
    shape = tuning.Shape.of(torch.empty(n, c, 7, 7))
    splits, steps, _ = shape.split()
    size = steps * shape.tuning.gradients.pixels
    assert (splits - 1) * size < shape.pixels <= splits * size
    for tile in (shape.tuning.enter, shape.tuning.mix, shape.tuning.leave):
        assert (tile.programs(shape.pixels) - 1) * tile.pixels * tile.tiles < shape.pixels
        assert tile.programs(shape.pixels) * tile.pixels * tile.tiles >= shape.pixels


def test_narrow_programs_share_their_sums():
    # Both kernels write into the same rows.
    t = tuning.tuning(16)
    assert t.mix_back.pixels * t.mix_back.tiles == t.leave.pixels * t.leave.tiles


def test_a_gradient_has_the_memory_layout_of_its_weight():
    w = torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last)
    flat = w.permute(0, 2, 3, 1).reshape(-1)
    assert torch.equal(_kernel(flat, w), w)
    assert _kernel(flat, w).stride() == w.stride()


def test_gradients_are_stored_in_the_order_w1_w3_w2():
    w1, w2, w3 = torch.zeros(2, 2, 3, 3), torch.zeros(2, 2, 1, 1), torch.zeros(2, 2, 3, 3)
    saved = Saved(w1, w1, w1, w1, w1, w2, w3, None)
    first, middle, last = _kernels(torch.arange(76.0), saved)
    assert (first.min(), first.max()) == (0, 35)
    assert (last.min(), last.max()) == (36, 71)
    assert middle.flatten().tolist() == [72, 73, 74, 75]


def product_error(rows, depth, columns, period, dtype=torch.float32, device="cpu") -> float:
    """The error of `product_times`, relative to the result in float64."""
    g = torch.Generator().manual_seed(rows)
    a, b, d = (
        torch.randn(*s, generator=g).to(device, dtype) for s in ((rows, depth), (depth, columns), (period, columns))
    )
    expected = (a.double() @ b.double()) * d.double().repeat(rows // period, 1)
    return max(
        largest_error([kernels.product_times(a, b, d, tile)], [expected])
        for tile in kernels.PRODUCT_TILES
        if columns % tile.columns == 0
    )


def bent(a, m, bias, dual, frequency):
    """What `wide.activate` computes, by torch."""
    rows = len(a) // (1 + dual)
    h, t = (a @ m.T)[:rows] + bias, (a @ m.T)[rows:]
    if not frequency:
        made = torch.cat([F.elu(h), t * torch.where(h > 0, 1.0, h.exp())]) if dual else F.elu(h)
        return made, made
    value, slope = torch.sin(frequency * h) / frequency, torch.cos(frequency * h)
    if not dual:
        return value, slope
    return torch.cat([value, slope * t]), torch.cat([slope, -frequency * torch.sin(frequency * h) * t])


def bent_back(a, b, kept, dual, frequency):
    """What `wide.activate_backward` computes: the same gradients from what was kept."""
    rows = len(a) // (1 + dual)
    g, q = (a @ b)[:rows], (a @ b)[rows:]
    slope, change = kept[:rows], kept[rows:]
    if not frequency:
        slope, change = slope.clamp(max=0) + 1, torch.where(slope[: len(change)] < 0, change, 0 * change)
    g = g * slope + (q * change if dual else 0)
    return torch.cat([g, q * slope] if dual else [g]), g.float()


def activate_error(rows, depth, columns, frequency, dtype=torch.float32, device="cpu") -> float:
    """The error of `activate` and `activate_backward` beside torch's, with tangents and without."""
    g, errors = torch.Generator().manual_seed(rows), []
    draw = lambda *shape: (torch.randn(*shape, generator=g) / 4).to(device, dtype)  # noqa: E731
    for dual in (True, False):
        count = (1 + dual) * rows
        a, m, bias, kept = draw(count, depth), draw(columns, depth), 8 * draw(columns).float(), draw(count, columns)
        made = bent(a.double(), m.double(), bias.double(), dual, frequency)
        back = bent_back(a.double(), m.double().T, kept.double(), dual, frequency)
        for tile in wide.TILES:
            out, beside = a.new_empty(count, columns), a.new_empty(count, columns)
            wide._launch_activate(a, m, bias, out, beside if frequency else out, dual, frequency, tile)
            errors.append(largest_error([out, beside if frequency else out], made))
            found, sums = wide._launch_back(a, m.T.contiguous(), kept, dual, frequency, tile)
            errors.append(largest_error([found, sums.sum(0)], [back[0], back[1].sum(0)]))
    return max(errors)


def test_sine_and_cosine_are_those_of_torch(monkeypatch):
    """What the kernels compute, with torch in place of Triton."""
    monkeypatch.setattr(language, "tl", torch)
    function = getattr(language.sine_and_cosine, "fn", language.sine_and_cosine)
    for largest, limit in ((10, 2e-6), (50, 5e-6)):
        x = torch.linspace(-largest, largest, 100_001)
        s, c = function(x)
        assert float((s - x.double().sin()).abs().max()) < limit
        assert float((c - x.double().cos()).abs().max()) < limit
    small = torch.tensor([0.0, 1e-30, -1e-3])
    torch.testing.assert_close(torch.stack(function(small)), torch.stack([small.sin(), small.cos()]), atol=0, rtol=1e-6)
    assert all(t.isnan().all() for t in function(torch.tensor([float("inf"), float("nan")])))


@pytest.mark.parametrize("frequency", FREQUENCIES)
def test_the_backward_of_an_activation_and_its_tangent_is_that_of_autograd(frequency):
    """What is kept is enough: for ELU the values that were made, since a'' t' is t where h < 0."""
    g = torch.Generator().manual_seed(0)
    h, t, p, q = (torch.randn(6, 5, generator=g, dtype=torch.float64) for _ in range(4))
    leaves, eye, zero = [h.requires_grad_(), t.requires_grad_()], torch.eye(5).double(), torch.zeros(5).double()
    made, kept = bent(torch.cat(leaves), eye, zero, True, frequency)
    expected = torch.cat(torch.autograd.grad(made, leaves, torch.cat([p, q])))
    torch.testing.assert_close(bent_back(torch.cat([p, q]), eye, kept.detach(), True, frequency)[0], expected)


@pytest.mark.parametrize("frequency", FREQUENCIES)
@pytest.mark.parametrize("dual", [True, False])
@pytest.mark.parametrize("middle", [0, 1, 2])
def test_a_wide_unit_is_its_layers_one_by_one(monkeypatch, middle, dual, frequency):
    """The differentiable function with torch in place of the kernels."""
    monkeypatch.setattr(wide, "activate", bent)
    monkeypatch.setattr(wide, "activate_backward", bent_back)
    by_kernels, by_layers = unit_results(frequency, dual, 20, middle)
    torch.testing.assert_close(by_kernels, by_layers, atol=1e-4, rtol=1e-4)


def unit_results(frequency, dual, inner, middle):
    """Values, slopes and gradients of a wide unit in float32, by kernels and layer by layer."""
    way, branch = dual_unit.ExecutionMode(torch.float32, int(dual), False), wide_branch(frequency, inner, middle)
    values = [v.detach().clone().requires_grad_() for v in try_parse(branch).tensors()[:-1]]
    layers = dual_unit.read_layers(dual_unit.stages(try_parse(branch).program), values, (4, 3), 2, way)
    layers = [
        replace(t, map=m, matrix=m.matrix(t.weight.detach()))
        for t in layers
        for m in [Unrolled(tuple(t.weight.shape), (4, 3), False) if t.weight.shape[2] == 3 else t.map]
    ]
    torch.manual_seed(0)
    x = torch.randn(24, 2, requires_grad=True)
    both = torch.cat([x.detach(), torch.randn(24, 2)]) if dual else x.detach()
    results = []
    for through in (dual_unit._by_kernels, dual_unit._layer_by_layer):
        h, slopes = through(way, layers, x, both)
        made = [elu_slope(s.values) if s.activated else s.values for s in slopes[1:]] if dual else []
        results.append([h, *made, *torch.autograd.grad(h, [x, *values], torch.ones_like(h).cumsum(0) / 9)])
    return results


def wide_branch(frequency, inner, middle):
    torch.manual_seed(1)
    layers = [nn.Conv2d(2, inner, 3, padding=1), *(nn.Conv2d(inner, inner, 1) for _ in range(middle))]
    parts = [part for layer in layers for part in (layer, Sine(frequency) if frequency else nn.ELU())]
    return nn.Sequential(*parts, nn.Conv2d(inner, 2, 3, padding=1))


def test_a_wide_unit_is_recognised_by_its_layers():
    elu, sine = Step("elu", settings=(1.0,)), Step("sine", settings=(2.5,))

    def known(*activations, bias=True, ready=True, inner=128):
        first, last = Unrolled((inner, 2, 3, 3), (4, 4), True), Unrolled((2, inner, 3, 3), (4, 4), True)
        middle = [Dense((inner, inner, 1, 1))] * (len(activations) - 2)
        biases = [torch.zeros(inner) if bias else None, *[torch.zeros(inner)] * len(middle), None]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wide, "is_ready", lambda *_: ready)
            return wide.supported([first, *middle, last][: len(activations)], list(activations), biases, torch.zeros(1))

    assert known(None, elu, elu)
    assert known(None, sine, sine)
    assert known(None, sine)
    assert known(None, sine, sine, sine)
    assert not known(None)
    assert not known(elu, elu, elu)
    assert not known(None, None, None)
    assert not known(None, elu, sine)
    assert not known(None, sine, Step("sine", settings=(2.0,)))
    assert not known(None, sine, sine, elu)
    assert not known(None, Step("lipswish", 1), Step("lipswish", 1))
    assert not known(None, Step("elu", settings=(0.5,)), Step("elu", settings=(0.5,)))
    assert not known(None, elu, elu, bias=False)
    assert not known(None, sine, bias=False)
    assert not known(None, elu, elu, ready=False)
    assert not known(None, elu, elu, inner=96)
    assert not known(None, sine, inner=96)


@pytest.mark.gpu
@pytest.mark.parametrize("frequency", FREQUENCIES)
@pytest.mark.parametrize(("rows", "depth"), [(2048, 512), (500, 112), (33, 432)])
def test_products_with_an_activation_on_a_gpu_are_those_of_torch(rows, depth, frequency):
    assert activate_error(rows, depth, 512, frequency, torch.bfloat16, "cuda") < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "depth", "period"), [(2048, 512, 2048), (1000, 112, 500), (4096, 432, 2048)])
def test_a_product_times_slopes_on_a_gpu_is_that_of_torch(rows, depth, period):
    assert product_error(rows, depth, 512, period, torch.bfloat16, "cuda") < 5e-3


def test_products_are_multiplied_by_kernels_only_on_a_gpu_and_in_bfloat16():
    tile, cpu = kernels.PRODUCT_TILES[0], torch.device("cpu")
    assert not kernels.multiplies((512, 512), torch.bfloat16, cpu, tile)
    if torch.cuda.is_available():
        assert not kernels.multiplies((512, 512), torch.float32, torch.device("cuda", 0), tile)


if __name__ == "__main__":
    for product in PRODUCTS:
        print(product_error(*product))
        for frequency in FREQUENCIES:
            print(activate_error(*product[:3], frequency))
    for frequency in FREQUENCIES:
        for dual, middle in crossed((True, False), (0, 1)):
            print(largest_error(*unit_results(frequency, dual, 128, middle)))
    for case in CASES:
        given = inputs(*case)
        print(largest_error(outputs_and_gradients(kernels.advance, *given), outputs_and_gradients(plain, *given)))
