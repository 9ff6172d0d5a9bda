"""Several processes: what the first batch sets is the same in all of them, and they train one model."""

import hashlib
import multiprocessing
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from iresnet import ActNorm, Chain, mlp_flow
from iresnet.presets import Experiment
from iresnet.run import Run, follow, start
from iresnet.train import State, distributed
from iresnet.transforms.mixing import PrincipalAxes

from .runs import tiny
from .zoo import normal

#: A density of points, one of images with uniform noise and a roulette, a hybrid with dropout; batches of 15 rows.
EXPERIMENTS = {
    # Adam would divide the gradient of the last shift, which is zero up to rounding, by its own size.
    "points": lambda: tiny("points-density", batch=15, optimiser="sgd", learning_rate=0.01),
    "images": lambda: _with(tiny("digits-density", batch=15), estimator="roulette"),
    "hybrid": lambda: _with(tiny("digits-semi-supervised", batch=15, labelled_batch=5), head=(4,), dropout=0.5),
}


def _with(experiment: Experiment, **network) -> Experiment:
    return replace(experiment, network=replace(experiment.network, **network))


SENTENCE = (
    "the first batch, which initialises {}, must pass through the plain model in training mode before "
    "init_process_group, since ranks may have different batches; got it in a group of 2 ranks."
)


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
        with pytest.raises(RuntimeError, match="Move that call up, or load initialised weights"):
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


def _by_hand(rank: int, file: str) -> tuple[str, list[float]]:
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


def _train(rank: int, folder: Path) -> dict[str, list[tuple[float, str]]]:
    """Train every experiment as one of two processes; the loss and a digest of all tensors after each step."""
    torch.set_num_threads(1)
    curves = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, experiment in EXPERIMENTS.items():
            port = (folder / f"{name}.port").read_text()
            values = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": 2,
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": port,
            }
            for variable, value in values.items():
                patch.setenv(variable, str(value))
            curves[name] = watched(lambda e=experiment, n=name: _train_one(e(), folder / n), patch)
    return curves


def _train_one(experiment: Experiment, folder: Path) -> None:
    with distributed.joined("cpu") as group:
        if group.rank == 0:
            start(experiment, folder, group=group)
        else:
            follow(group, group.share(), "cpu", lambda: False)


def watched(call, patch) -> list[tuple[float, str]]:
    """The loss and a digest of the weights and buffers after every step of a training."""
    curve, advance = [], State.advance

    def spy(state, x, y=None):
        result = advance(state, x, y)
        tensors = [t.detach().numpy().tobytes() for t in state.objective.state_dict().values()]
        curve.append((float(result.loss), hashlib.sha256(b"".join(tensors)).hexdigest()))
        return result

    with patch.context() as inner:
        inner.setattr(State, "advance", spy)
        call()
    return curve


def _send(rank, folder, answers):
    answers.put((_by_hand(rank, str(folder / "store")), _train(rank, folder)))


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """(folder, what rank 0 found, what rank 1 found): this process and another, started once."""
    folder, context = tmp_path_factory.mktemp("ranks"), multiprocessing.get_context("spawn")
    for name in EXPERIMENTS:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            (folder / f"{name}.port").write_text(str(free.getsockname()[1]))
    answers = context.Queue()
    other = context.Process(target=_send, args=(1, folder, answers))
    other.start()
    first = _by_hand(0, str(folder / "store")), _train(0, folder)
    second = answers.get(timeout=120)
    other.join()
    return folder, first, second


def test_a_model_that_is_wrapped_by_hand_is_one_model(two_processes):
    _, (first, _), (second, _) = two_processes
    assert SENTENCE.format("ActNorm") in first[0]
    assert first == second


@pytest.mark.parametrize("name", EXPERIMENTS)
class TestTwoProcesses:
    def test_the_loss_is_that_of_one_process(self, two_processes, name, tmp_path, monkeypatch):
        folder, (_, curves), _ = two_processes
        alone = watched(lambda: start(EXPERIMENTS[name](), tmp_path / "run"), monkeypatch)
        assert [loss for loss, _ in curves[name]] == pytest.approx([loss for loss, _ in alone], rel=2e-5)
        rows, expected = (Run.open(path).log() for path in (folder / name, tmp_path / "run"))
        assert len(rows) == len(expected)
        for row, other in zip(rows, expected, strict=True):
            assert without_time(row) == pytest.approx(without_time(other), rel=1e-4, abs=1e-6)

    def test_weights_and_constraint_vectors_are_the_same_bit_for_bit(self, two_processes, name):
        _, (_, first), (_, second) = two_processes
        assert first[name] == second[name]

    def test_there_is_one_log_and_one_checkpoint(self, two_processes, name):
        folder, *_ = two_processes
        files = {path.name for path in (folder / name).iterdir()} - {"tensorboard"}
        assert files == {
            "config.toml", "schema.json", "data.json", "environment.json", "log.csv", "last.safetensors",
            "best.safetensors", "model.safetensors", "certificate.json",
        }  # fmt: skip
        assert "2 processes" in Run.open(folder / name).read_json("environment.json")["engine"]


def without_time(row):
    return {name: value for name, value in row.items() if name != "seconds" and value is not None}
