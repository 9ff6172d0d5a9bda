"""`torchrun -m iresnet train` and `evaluate`: one run, one voice, one result, whatever happens to a process."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from iresnet import data, lock
from iresnet.cli import main, ranks
from iresnet.gpu import Acceleration, Engine
from iresnet.models import build
from iresnet.presets import PRESETS
from iresnet.run import Run, follow, start
from iresnet.run.shared import check_batch, make_batches
from iresnet.train import Joint, TrainingError, distributed
from iresnet.train.distributed import Group, LostProcess

from .runs import tiny

FEW = ["--set", "steps=60", "--set", "batch=32", "--set", "save_every=10", "--set", "validate_every=10"]
SMALL = ["--set", "blocks=[1]", "--set", "width=4", *FEW]


@pytest.fixture
def as_rank(monkeypatch):
    """Make this process one of two that torchrun started."""

    def become(rank):
        values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(ranks, "GRACE", 0.0)

    return become


def said(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    printed = capsys.readouterr()
    return stop.value.code, printed.out, printed.err


class TestRanks:
    def test_without_torchrun_there_is_one_process(self, monkeypatch):
        monkeypatch.setenv("RANK", "3")  # which other programs set as well
        assert (distributed.rank(), distributed.world_size(), distributed.local_rank()) == (0, 1, 0)
        assert distributed.is_main()
        with distributed.joined("cpu") as group:
            assert group is distributed.ALONE

    def test_torchrun_says_who_a_process_is(self, as_rank):
        as_rank(1)
        assert (distributed.rank(), distributed.world_size(), distributed.local_rank()) == (1, 2, 1)
        assert not distributed.is_main()

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("RANK", "abc"),
            ("RANK", "-1"),
            ("RANK", "2"),
            ("WORLD_SIZE", "0"),
            ("WORLD_SIZE", ""),
            ("LOCAL_RANK", "0.5"),
        ],
    )
    def test_values_that_torchrun_does_not_set_are_a_sentence(
        self, name, value, as_rank, monkeypatch, capsys, tmp_path
    ):
        """Trap: a traceback, or a process that took itself for another one and said nothing."""
        as_rank(0)
        monkeypatch.setenv(name, value)
        code, _, error = said(capsys, "train", "points-density", "--out", tmp_path / "run")
        assert code == 2
        assert error.startswith(
            "iresnet: RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers, as torchrun sets them, with 0 <= RANK < "
            "WORLD_SIZE; got "
        ), error
        assert f"{name}={value!r}" in error
        assert error.endswith("For a single process, unset one: env -u RANK iresnet ...\n")
        assert distributed.is_main()  # so the sentence is printed

    def test_a_command_that_shares_nothing_ignores_them(self, as_rank, monkeypatch, capsys):
        as_rank("abc")
        code, text, _ = said(capsys, "presets")
        assert code == 0
        assert "table-density" in text

    def test_a_process_says_what_it_waits_for(self, as_rank, monkeypatch, capsys):
        """Trap: with variables that another program left behind, a command waited for two hours, without a word."""
        as_rank(0)
        monkeypatch.setattr(distributed, "PATIENCE", 0.0)
        monkeypatch.setattr(distributed.dist, "init_process_group", lambda *_, **__: time.sleep(0.2))
        distributed._meet("gloo")
        assert capsys.readouterr().err == (
            "iresnet: waiting for 1 of 2 processes at localhost:1. torchrun starts them; for a single process, unset "
            "WORLD_SIZE.\n"
        )

    def test_a_port_that_is_taken_is_a_sentence(self, as_rank, monkeypatch):
        as_rank(0)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
        with socket.create_server(("localhost", 0)) as taken:
            port = taken.getsockname()[1]
            monkeypatch.setenv("MASTER_PORT", str(port))
            with (
                pytest.raises(OSError, match=rf"^the processes cannot meet at localhost:{port} \(.*in use.*\)\. Check"),
                distributed.joined("cpu"),
            ):
                pass

    def test_alone_nothing_is_shared(self):
        group, loss = distributed.ALONE, torch.tensor(2.0)
        assert group.average(loss, {"nats": loss}) == (loss, {"nats": loss})
        assert (group.any(True), group.decide(False), group.share(3)) == (True, False, 3)

    @pytest.mark.parametrize(("device", "gpus"), [("cuda:0", 2), ("cuda", 1)])
    def test_every_process_needs_a_gpu_of_its_own(self, device, gpus, as_rank, monkeypatch):
        as_rank(1)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        with (
            pytest.raises(ValueError, match=f"a GPU of its own; got --device {device} for process 1 of .* with {gpus}"),
            distributed.joined(device),
        ):
            pass

    def test_more_processes_than_rows_are_refused(self):
        batches = make_batches(tiny(batch=2), data.load(PRESETS["digits-hybrid"].data).train)
        check_batch(batches, Group(0, 2))
        with pytest.raises(ValueError, match="needs a row of every batch; got 2 rows for 3 processes. Start fewer, or"):
            check_batch(batches, Group(0, 3))

    def test_the_engine_says_how_many_processes_share_a_step(self):
        engine = Engine(torch.nn.Linear(1, 1), Acceleration(), needs_logdet=False, estimator=None, ranks=2)
        assert "2 processes" in engine.method
        assert "BatchNorm" not in str(engine)
        engine = Engine(torch.nn.BatchNorm1d(1), Acceleration(), needs_logdet=False, estimator=None, ranks=2)
        assert "BatchNorm normalises by the rows of each process" in engine.reasons

    @pytest.mark.parametrize(
        ("density", "bayes", "unused"), [(1.0, False, False), (0.0, False, True), (0.0, True, False)]
    )
    def test_the_base_is_unused_if_only_classes_are_trained_for(self, density, bayes, unused):
        network = replace(tiny().network, bayes=bayes, head=())
        objective = Joint(build(network, data.load(tiny().data).schema, "hybrid"), 17, density=density)
        assert distributed._has_unused_base(objective) is unused


class TestOneVoice:
    def test_a_process_beside_rank_zero_says_what_it_alone_knows(self, as_rank, capsys):
        as_rank(1)
        code, out, err = said(capsys, "train", "moons", "--frobnicate")
        assert (code, out) == (2, "")
        assert all(line.startswith("rank 1: ") for line in err.splitlines())
        assert "No such option" in err

    @pytest.mark.parametrize("error", [TrainingError("diverged."), LostProcess("lost.")])
    def test_what_rank_zero_says_too_is_not_repeated(self, error, as_rank, capsys, monkeypatch):
        def fail(*_):
            raise error

        monkeypatch.setattr(sys.modules["iresnet.cli.train"], "follow_main", fail)
        as_rank(1)
        assert said(capsys, "train", "moons") == (1, "", "")
        as_rank(0)
        monkeypatch.setattr(sys.modules["iresnet.cli.train"], "choose_preset", fail)
        assert said(capsys, "train", "moons") == (1, "", f"iresnet: {error}\n")

    def test_success_is_silent_beside_rank_zero(self, as_rank, capsys, monkeypatch):
        monkeypatch.setattr(sys.modules["iresnet.cli.train"], "follow_main", lambda device: print("hello"))
        as_rank(1)
        assert said(capsys, "train", "moons") == (0, "", "")


def test_other_data_than_those_of_rank_zero_are_refused(tmp_path):
    class Listening(Group):
        def share(self, content=None):
            raise Caught(content)

    class Caught(Exception):
        pass

    with pytest.raises(Caught) as caught:
        start(tiny(), tmp_path / "run", group=Listening(0, 2))
    (shared,) = caught.value.args
    object.__setattr__(shared, "data", "another")
    with pytest.raises(ValueError, match="all processes need the same data; got others than rank 0 from digits."):
        follow(Group(1, 2), shared, "cpu", lambda: False)


# ------------------------------------------------------------------------------------------------ with torchrun


def torchrun(*words, processes=2, script=("-m", "iresnet")):
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", *script]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def ended(process):
    out, err = process.communicate(timeout=600)
    ours, _, launcher = err.partition("Traceback (most recent call last):")
    assert "Traceback" not in launcher.replace("Traceback (most recent call last):", "", 1).partition("====")[0]
    return process.returncode, out, ours


def validated(folder):
    """What was found at each validation; other rows of the log are means since the row before, or since a stop."""
    rows = [row for row in Run.open(folder).log() if row["validation bits/dim"] is not None]
    return {row["step"]: row["validation bits/dim"] for row in rows}


def assert_same_curve(folder, expected):
    assert len(validated(expected)) == 6
    assert validated(folder) == pytest.approx(validated(expected), rel=1e-3)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    with pytest.raises(SystemExit, match="0"):
        main(["train", "digits-density", *SMALL, "--set", "blocks=[1,1]", "--out", str(folder)])
    return folder


def train_two(folder, processes=2):
    return torchrun("train", "digits-density", *SMALL, "--set", "blocks=[1,1]", "--out", folder, processes=processes)


def wait_for_checkpoint(process, folder):
    deadline = time.monotonic() + 600
    while not (folder / "last.safetensors").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


def worker(process, rank):
    """The process of this rank, among the children of torchrun."""
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if f"\0LOCAL_RANK={rank}\0" in f"\0{Path(f'/proc/{child}/environ').read_text()}":
            return int(child)
    raise AssertionError(f"there is no rank {rank}")


@pytest.mark.slow
def test_one_run_one_summary_the_curve_of_one_process(uninterrupted, tmp_path):
    code, out, err = ended(train_two(tmp_path / "run"))
    assert code == 0, err
    assert out.count("Trained 60 steps") == 1
    assert "2 processes" in out
    assert_same_curve(tmp_path / "run", uninterrupted)
    code, out, err = ended(torchrun("train", "--resume", "--out", tmp_path / "run"))  # which is finished
    assert code == 0, err
    assert out.count("Trained 60 steps") == 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
@pytest.mark.parametrize(("killed", "processes"), [(0, 1), (1, 1), (1, 3)])
def test_a_killed_process_ends_the_job_and_any_number_of_them_resumes(killed, processes, uninterrupted, tmp_path):
    process = train_two(tmp_path / "run")
    wait_for_checkpoint(process, tmp_path / "run")
    os.kill(worker(process, killed), signal.SIGKILL)
    code, _, err = ended(process)
    assert code == 1
    if killed:
        assert len(re.findall("iresnet: another process has ended", err)) == 1
        assert f"Resume with: iresnet train --resume --out {tmp_path / 'run'}" in err
    assert not (tmp_path / "run" / "model.safetensors").exists()
    code, _, err = ended(torchrun("train", "--resume", "--out", tmp_path / "run", processes=processes))
    assert code == 0, err
    assert_same_curve(tmp_path / "run", uninterrupted)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_once_and_ends_all(number, uninterrupted, tmp_path):
    process = train_two(tmp_path / "run")
    wait_for_checkpoint(process, tmp_path / "run")
    process.send_signal(number)
    code, out, _ = ended(process)
    assert code != 0
    assert out.count("Stopped and saved at step") == 1
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--resume", "--out", str(tmp_path / "run")])
    assert_same_curve(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_a_folder_in_use_is_refused_once(tmp_path):
    with lock.lock_folder(tmp_path / "run"):
        code, _, err = ended(train_two(tmp_path / "run"))
    assert code == 1
    assert err.count("is in use: another process is training or tightening this run.") == 1
    assert "exitcode: 2" in err


@pytest.mark.slow
def test_a_bad_name_is_printed_once(tmp_path):
    code, _, err = ended(torchrun("train", "digits-densty", "--out", tmp_path / "run"))
    assert code == 1
    assert err.count("iresnet: ") == 1
    assert "Did you mean 'digits-density'?" in err


@pytest.mark.slow
def test_divergence_ends_all_with_one_sentence(tmp_path):
    wild = ["--set", "learning_rate=1e9", "--set", "warmup=0", "--set", "clip=1e9"]
    code, _, err = ended(torchrun("train", "digits-density", *SMALL, "--set", "blocks=[1,1]", *wild, "--out", tmp_path))
    assert code == 1
    assert len(re.findall(r"iresnet: the (loss|gradient) of step \d+ is", err)) == 1
    assert "exitcode: 1" in err


@pytest.mark.slow
def test_one_process_that_fails_alone_says_why(tmp_path):
    script = tmp_path / "other.py"
    script.write_text(
        "from iresnet.cli import main\nfrom iresnet.data import Dataset\nfrom iresnet.train import distributed\n"
        "if distributed.rank():\n    Dataset.fingerprint = lambda self: 'other'\nmain()\n"
    )
    words = ("train", "digits-density", *SMALL, "--set", "blocks=[1,1]", "--out", tmp_path / "run")
    code, _, err = ended(torchrun(*words, script=(script,)))
    assert code == 1
    assert err.count("rank 1: iresnet: all processes need the same data") == 1


# -------------------------------------------------------------------------------------------------- evaluate --data


@pytest.fixture(scope="module")
def density(tmp_path_factory):
    """A run folder and a file of five chunks."""
    folder = tmp_path_factory.mktemp("points")
    start(tiny("points-density"), folder / "run")
    np.save(folder / "x.npy", np.random.default_rng(0).normal(size=(210_000, 2)).astype("float32"))
    return folder


@pytest.mark.slow
def test_processes_evaluate_a_file_as_one_does(density, capsys):
    code, out, err = ended(torchrun("evaluate", density / "run", "--data", density / "x.npy", "--json"))
    assert code == 0, err
    shared = json.loads(out)
    code, out, _ = said(capsys, "evaluate", str(density / "run"), "--data", str(density / "x.npy"), "--json")
    alone = json.loads(out)
    assert shared["inverse"] == alone["inverse"]
    assert shared["rows"] == 210_000
    assert shared["density"] == {**alone["density"], **approximate(alone["density"])}


def approximate(content):
    return {name: pytest.approx(value, rel=1e-12) for name, value in content.items() if isinstance(value, float)}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_a_killed_process_ends_the_evaluation(density):
    process = torchrun("evaluate", density / "run", "--data", density / "x.npy", script=(pausing(density),))
    while not (density / "started-1").exists():
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(worker(process, 1), signal.SIGKILL)
    code, out, err = ended(process)
    assert code == 1
    sentences = ("another process has ended; its message, if any, is above.", "Stopped. If another process has ended")
    assert any(sentence in out + err for sentence in sentences)
    assert "samples" not in out


def pausing(folder):
    """A script that runs the command; a process says that it has started, and takes a while for every chunk."""
    script = folder / "pausing.py"
    script.write_text(
        "import pathlib, time\nfrom iresnet.cli import main\nfrom iresnet.evaluate import streaming\n"
        "from iresnet.train import distributed\nadd = streaming._Adder.add\ndef slow(self, data):\n"
        f"    pathlib.Path({str(folder)!r}, f'started-{{distributed.rank()}}').touch()\n    time.sleep(1)\n"
        "    add(self, data)\nstreaming._Adder.add = slow\nmain()\n"
    )
    return script


@pytest.mark.slow
def test_bad_input_in_the_chunks_of_another_process_is_its_sentence(density):
    lines = [",".join(Run.open(density / "run").schema.names), *["0.5,1"] * 110_000]
    lines[100_500] = "0.5,one"
    file = density / "bad.csv"
    file.write_text("\n".join(lines))
    code, out, err = ended(torchrun("evaluate", density / "run", "--data", file))
    assert code == 1
    assert "samples" not in out
    assert err.count("rank 1: iresnet: ") == 1
    assert "'one' is not a number in line 100501" in err
