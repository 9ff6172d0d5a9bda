"""Compiled training steps: one compilation per shape, not per block; and a second start compiles nothing."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from iresnet import ActNorm, Chain, PowerSeries, ResidualBlock, contractive_convnet
from iresnet.compiler import _compiled
from iresnet.gpu import planned
from iresnet.gpu.unit import unit_function
from tests.zoo import normal

pytestmark = pytest.mark.no_cover


def forget():
    torch._dynamo.reset()
    counters.clear()
    _compiled.cache_clear()
    unit_function.cache_clear()


@pytest.fixture(autouse=True)
def fresh():
    forget()
    yield
    forget()


def train(blocks, channels, density, steps=1):
    """Take training steps of a chain of equal blocks, compiled as on a GPU; return the number of graphs."""
    torch.manual_seed(0)
    chain = Chain(*(t for _ in range(blocks) for t in (ActNorm(4), ResidualBlock(contractive_convnet(4, channels)))))
    chain.to(memory_format=torch.channels_last)
    x = normal(2, 4, 6, 6, dtype=torch.float32)
    chain(x)
    for _ in range(steps):
        with planned(chain, torch.bfloat16, compiled=True) as view:
            z, logdet = view.forward_and_logdet(x, estimator=PowerSeries(3)) if density else (view(x), torch.zeros(()))
            (z.square().sum() + logdet.sum()).backward()
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("density", [False, True], ids=["code", "density"])
def test_blocks_of_one_shape_share_their_compiled_functions(density, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    found = []
    for blocks in (2, 5):
        forget()
        found.append(train(blocks, channels=32, density=density, steps=2))
    assert found[0] == found[1] > 0


@pytest.mark.slow
def test_a_second_start_finds_what_the_first_compiled(tmp_path):
    script = (
        "import json; from tests.test_compilations import counters, train; train(2, 32, True);"
        "print(json.dumps({k: v for k, v in counters['inductor'].items() if 'cache' in k}))"
    )
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    starts = []
    for _ in range(2):
        run = [sys.executable, "-c", script]
        printed = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
        starts.append(json.loads(printed.splitlines()[-1]))
    first, second = starts
    assert first["fxgraph_cache_miss"] == second["fxgraph_cache_hit"] > 0
    assert "fxgraph_cache_miss" not in second
