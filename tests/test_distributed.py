"""Several ranks: what the first batch sets must be the same on all of them."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from iresnet import ActNorm, Chain, mlp_flow
from iresnet.transforms.mixing import PrincipalAxes

from .zoo import normal

SENTENCE = "the first batch, which initialises {}, must be the same on all ranks; got 2 ranks with different batches."


@pytest.fixture
def group(tmp_path, request):
    """A process group of this process alone, which may believe that there are others."""
    backend, ranks = request.param
    store = dist.FileStore(str(tmp_path / "store"), ranks)
    if backend == "fake":
        store = pytest.importorskip("torch.testing._internal.distributed.fake_pg").FakeStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=ranks)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("group", [("fake", 2)], indirect=True)
@pytest.mark.usefixtures("group")
class TestTwoRanks:
    @pytest.mark.parametrize("part", [ActNorm(2), PrincipalAxes(2)], ids=lambda part: type(part).__name__)
    def test_a_first_batch_of_ones_own_is_refused(self, part):
        before = {key: t.clone() for key, t in part.state_dict().items()}
        with pytest.raises(RuntimeError, match=SENTENCE.format(type(part).__name__)):
            part(normal(9, 2, dtype=torch.float32))
        with pytest.raises(RuntimeError, match="before init_process_group, or load initialised weights"):
            Chain(part)(normal(9, 2, dtype=torch.float32))
        assert all(torch.equal(t, before[key]) for key, t in part.state_dict().items())

    def test_what_has_seen_a_batch_and_what_is_in_eval_go_on(self):
        x, state = normal(9, 2, dtype=torch.float32), ActNorm(2).initialise_(torch.eye(2)).state_dict()
        told, loaded = ActNorm(2).initialise_(x), ActNorm(2)
        loaded.load_state_dict(state)
        assert all(part(x).shape == x.shape for part in (told, loaded, ActNorm(2).eval()))

    def test_the_flag_alone_may_have_come_from_rank_zero(self):
        part = ActNorm(2)
        part.initialised.fill_(True)
        assert part(torch.ones(3, 2)).equal(torch.ones(3, 2))


@pytest.mark.parametrize("group", [("gloo", 1)], indirect=True)
@pytest.mark.usefixtures("group")
def test_one_rank_initialises_as_always():
    z = ActNorm(2)(normal(9, 2))
    torch.testing.assert_close(z.mean(0), torch.zeros(2, dtype=z.dtype), atol=1e-6, rtol=0)


def _rank(rank: int, file: str) -> tuple[str, list[float]]:
    """Train a little on data of its own; the complaint of a model without a first batch, and the weights at the end."""
    torch.manual_seed(rank)
    x, flow, cold = torch.randn(16, 2) * (1 + rank), mlp_flow(2, blocks=1, hidden=(4,)), mlp_flow(2, blocks=1)
    flow(x)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    try:
        with pytest.raises(RuntimeError) as caught:
            DistributedDataParallel(cold)(x)
        model = DistributedDataParallel(flow)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimiser.zero_grad()
            (-model(x).mean()).backward()
            optimiser.step()
        return str(caught.value), torch.cat([p.detach().flatten() for p in flow.parameters()]).tolist()
    finally:
        dist.destroy_process_group()


def _send(rank, file, answers):
    answers.put(_rank(rank, file))


def test_two_processes_keep_one_model(tmp_path):
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    other = context.Process(target=_send, args=(1, str(tmp_path / "store"), answers))
    other.start()
    sentence, weights = _rank(0, str(tmp_path / "store"))
    assert SENTENCE.format("ActNorm") in sentence
    assert (sentence, weights) == answers.get(timeout=600)
    other.join()
